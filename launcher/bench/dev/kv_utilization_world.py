"""A coordinator and one decode worker under overload, in virtual time: what `crossdock bench dev kv-utilization` measures.

The core, the table of attempts, the batch and the block allocator are those that serve. Made up are the prefill workers (one
step each per decode step), the answers' lengths, and the delays: hand-overs take 1 to 5 steps, reports 2.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from random import Random

from coordinator.core import Core
from coordinator.events import Limits, PeerUp, Received, Send
from decode_worker.batch import Batch, DecodeRequest
from decode_worker.progress import ProgressReport
from decode_worker.requests import AttemptTable, Phase
from engine.kv.allocator import BlockAllocator
from kvtransfer.session.session import Accepted
from proto.codec import pack_tokens
from proto.errors import Interrupt
from proto.held import Capacity
from proto.limits import HASH_BYTES, PROTOCOL_VERSION
from proto.messages import (
    Finished,
    HandedOver,
    Hello,
    Interrupted,
    Message,
    Peer,
    Prefill,
    Rejected,
    Release,
    Released,
    Reserve,
    Role,
    Step,
    StepDone,
    Submit,
    WorkFailed,
)
from proto.sampling import Sampling

GATEWAY, DECODE, PREFILL = 1, 2, (10, 11, 12, 13)
STEP_S = 0.03
REPORT_STEPS = 2
STOP, OTHER = 1, 2
Key = tuple[str, int]


@dataclass(frozen=True)
class Job:
    prompt_tokens: int
    max_tokens: int
    outputs: tuple[int, ...]
    """Tokens of each choice."""
    text: str = ""
    """Prompts of one text begin alike ..."""
    shared_tokens: int = 0
    """... with so many tokens."""

    def token_steps(self) -> float:
        """Slots times steps that its KV takes in decode."""
        return self.prompt_tokens * max(self.outputs) + sum(tokens * tokens / 2 for tokens in self.outputs)


@dataclass
class Figures:
    """`kv_use` is the mean share of the pool's blocks that were really held, over the steps measured."""

    kv_use: float = 0.0
    finished: int = 0
    output_tokens: int = 0
    refused_after_prefill: int = 0
    out_of_memory: int = 0
    preempted: int = 0
    recomputed_tokens: int = 0
    """Prompt tokens of attempts after the first."""
    steps: int = 0


@dataclass
class _Prompt:
    order: Prefill
    computed: int = 0


@dataclass
class RoomWorld:
    draw: Callable[[Random], Job]
    kv_blocks: int
    block_size: int
    overload: float
    """Offered load over what the decode worker could carry with every block in use."""
    whole_life: bool = False
    """No progress is reported, so that every attempt stays counted with prompt + max_tokens."""
    overcommit: float = 1.0
    seed: int = 0
    figures: Figures = field(default_factory=Figures)

    def __post_init__(self) -> None:
        self.random = Random(self.seed)
        self.core = Core(Limits(queue_wait_s_max=1e6, kv_overcommit=self.overcommit, attempts_max=1000))
        self.batch: Batch[None] = Batch()
        self.allocator = BlockAllocator(self.kv_blocks)
        self.table = AttemptTable(self.allocator, self.block_size, self.batch)
        self.progress = ProgressReport(self.table)
        self.jobs: dict[str, Job] = {}
        self.emitted: dict[str, int] = {}
        self.prompts: dict[tuple[int, Key], _Prompt] = {}
        self.steps: dict[int, deque[Step]] = {incarnation: deque() for incarnation in PREFILL}
        self.receiving: dict[Key, list[int]] = {}
        self.handing_over: list[tuple[int, int, Prefill]] = []
        self.reports: deque[tuple[int, int, Message]] = deque()
        self.step = self.made = 0
        self.due = 0.0
        samples = [self.draw(Random(number)) for number in range(500)]
        self.rate = self.overload * self.kv_blocks * self.block_size * len(samples)
        self.rate /= sum(job.token_steps() for job in samples)
        self._join()

    def _join(self) -> None:
        self._core(PeerUp(GATEWAY, Hello(PROTOCOL_VERSION, Role.GATEWAY, GATEWAY, "gateway", address="tcp://g")))
        for role, incarnation in ((Role.DECODE, DECODE), *((Role.PREFILL, incarnation) for incarnation in PREFILL)):
            capacity = Capacity(self.kv_blocks, self.block_size, 1 << 16, 1 << 20)
            hello = Hello(PROTOCOL_VERSION, role, incarnation, f"w{incarnation}", "m", "f", "tcp://w", capacity)
            self._core(PeerUp(incarnation, hello))

    def run(self, warmup_steps: int, steps: int) -> Figures:
        held = 0
        for number in range(warmup_steps + steps):
            if number == warmup_steps:
                self.figures.finished = self.figures.output_tokens = 0
            self._arrive()
            self._prefill()
            self._hand_over()
            blocks = self._decode()
            held += blocks if number >= warmup_steps else 0
            while self.reports and self.reports[0][0] <= self.step:
                _, incarnation, message = self.reports.popleft()
                self._core(Received(incarnation, message))
            self.step += 1
        self.figures.kv_use, self.figures.steps = held / (steps * self.kv_blocks), steps
        return self.figures

    # --- the gateway ----------------------------------------------------------------------------------------------------

    def _arrive(self) -> None:
        while self.due <= self.step:
            self.due += self.random.expovariate(self.rate)
            self.made += 1
            name = f"r{self.made}"
            self.jobs[name] = self.draw(self.random)
            self._submit(name, 1, 0)

    def _submit(self, name: str, attempt: int, resumed: int) -> None:
        job = self.jobs[name]
        sampling = Sampling(max_tokens=job.max_tokens, stop_token_ids=(STOP,))
        tokens = job.prompt_tokens + resumed
        self.figures.recomputed_tokens += tokens if attempt > 1 else 0
        submit = Submit(
            name,
            attempt,
            "m",
            tokens,
            sampling,
            len(job.outputs),
            0,
            resumed,
            block_hashes=self._hashes(name, job),
            hash_block_size=self.block_size if job.text else 0,
        )
        self._core(Received(GATEWAY, submit, pack_tokens([0] * tokens)))

    def _hashes(self, name: str, job: Job) -> bytes:
        """Of the prompt's full blocks; empty where it shares nothing."""
        blocks = job.prompt_tokens // self.block_size if job.text else 0
        alike = job.shared_tokens // self.block_size
        texts = (f"{job.text if block < alike else name} {block}" for block in range(blocks))
        return b"".join(blake2b(text.encode(), digest_size=HASH_BYTES).digest() for text in texts)

    def _core(self, event: PeerUp | Received) -> None:
        for action in self.core.handle(event, self.step * STEP_S):
            if isinstance(action, Send):
                self._react(action.incarnation, action.message)

    def _report(self, incarnation: int, message: Message) -> None:
        self.reports.append((self.step + REPORT_STEPS, incarnation, message))

    def _react(self, incarnation: int, message: Message) -> None:
        match message:
            case Rejected(name):
                del self.jobs[name]
            case Interrupted(name, attempt, reason):
                assert len(self.jobs[name].outputs) == 1, "several choices come back one by one: not modelled"
                self.figures.preempted += reason is Interrupt.PREEMPTED
                self._submit(name, attempt + 1, self.emitted.get(name, 0))
            case Reserve():
                self.table.reserve(message)
            case Prefill(name, attempt):
                offered = self.table.target_blocks(
                    (name, attempt), incarnation, -(-message.prompt_tokens // self.block_size)
                )
                if isinstance(offered, Accepted):
                    self.receiving[(name, attempt)] = list(offered.block_ids)
                    self.prompts[(incarnation, (name, attempt))] = _Prompt(message)
                else:
                    self.figures.refused_after_prefill += 1
                    self._report(incarnation, WorkFailed(name, attempt, Interrupt.TRANSFER_FAILED, offered or ""))
            case Step():
                self.steps[incarnation].append(message)
            case Release(name, attempt):
                self._release(incarnation, (name, attempt))
            case _:
                pass

    # --- the workers ----------------------------------------------------------------------------------------------------

    def _release(self, incarnation: int, key: Key) -> None:
        if incarnation != DECODE:
            self.prompts.pop((incarnation, key), None)
            self.handing_over = [entry for entry in self.handing_over if (entry[2].request_id, entry[2].attempt) != key]
            self._report(incarnation, Released(*key))
            return
        attempt = self.table.attempts.get(key)
        if attempt is None:
            self._report(DECODE, Released(*key))
            return
        said = self.table.close(attempt, Released(*key))
        if attempt.phase is Phase.RECEIVING:
            said = self.table.received_nothing(key, self.receiving.pop(key), Released(*key))
        for final_report in said:
            self._report(DECODE, final_report)

    def _prefill(self) -> None:
        for incarnation, steps in self.steps.items():
            if not steps:
                continue
            step = steps.popleft()
            done = tuple(c for c in step.chunks if (incarnation, (c.request_id, c.attempt)) in self.prompts)
            self._report(incarnation, StepDone(step.step_id, done, 1000 * STEP_S, 0))
            for chunk in done:
                prompt = self.prompts[(incarnation, (chunk.request_id, chunk.attempt))]
                prompt.computed += chunk.length
                if prompt.computed == prompt.order.prompt_tokens:
                    self.handing_over.append((self.step + self.random.randint(1, 5), incarnation, prompt.order))

    def _hand_over(self) -> None:
        ready = [entry for entry in self.handing_over if entry[0] <= self.step]
        self.handing_over = [entry for entry in self.handing_over if entry[0] > self.step]
        for _, incarnation, order in ready:
            key = (order.request_id, order.attempt)
            del self.prompts[(incarnation, key)]
            outputs = self.jobs[order.request_id].outputs
            first = order.resumed_tokens + 1
            self.emitted[order.request_id] = first
            going_on = [choice for choice, tokens in enumerate(outputs) if tokens > first]
            if not going_on:
                self._end(Finished(*key, len(outputs), 0))
                self._report(incarnation, Finished(*key, len(outputs), 0))
                continue
            attempt = self.table.attempts[key]
            tables = self.table.fork(attempt, self.receiving.pop(key), len(going_on))
            self.table.start(
                attempt,
                [
                    DecodeRequest(key, choice, Peer("", 1), order.sampling, table, None, OTHER, first)
                    for choice, table in zip(going_on, tables, strict=True)
                ],
            )
            self._report(incarnation, HandedOver(*key, 0, 0.0))

    def _decode(self) -> int:
        """One step; blocks held in it."""
        plan = self.batch.plan(self._stuck)
        held = self.allocator.held_count
        progress = self.progress.due(self.step * STEP_S)
        if progress is not None and not self.whole_life:
            self._report(DECODE, progress)
        if plan is None:
            return held
        drawn = []
        for row in plan.rows:
            running = row.running
            last = running.index + 1 >= self.jobs[running.key[0]].outputs[running.choice]
            drawn.append((STOP if last else OTHER, None))
            self.emitted[running.key[0]] = running.index + 1
        for final_report in self.table.ended(self.batch.apply(list(drawn)).ended):
            if isinstance(final_report, Finished):
                self._end(final_report)
            self._report(DECODE, final_report)
        return held

    def _stuck(self, sequences: list[DecodeRequest[None]]) -> None:
        self.figures.out_of_memory += 1
        attempt = self.table.attempts[sequences[0].key]
        attempt.final_report = WorkFailed(*attempt.key, Interrupt.PREEMPTED, "no free KV block")
        for final_report in self.table.ended(sequences):
            self._report(DECODE, final_report)

    def _end(self, finished: Finished) -> None:
        self.figures.finished += 1
        self.figures.output_tokens += sum(self.jobs[finished.request_id].outputs)
