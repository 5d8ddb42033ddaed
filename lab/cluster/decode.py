"""A decode worker: the production core, batch and block allocator, one step after the other; `Timing` says what steps take."""

from decode_worker.batch import Draw, RunningBatch, StepPlan
from decode_worker.core import DecodeCore
from decode_worker.requests import AttemptTable
from decode_worker.suffixes import Slice, SliceSizes
from engine.kv.allocator import BlockAllocator
from lab.cluster.surroundings import (
    FAILED_STEP_S,
    ClientRequest,
    ClusterEngine,
    ClusterGateways,
    ClusterRegistration,
    ClusterSurroundings,
    first_tokens,
)
from lab.cluster.transfers import ClusterKvSender, Transfers
from proto.kv import Commit, FetchRefused
from proto.limits import HASH_BYTES, MAX_VOCAB
from proto.messages import Message, Step
from proto.parts import STALL_SHARE, Capacity
from proto.progress import AnswerNames


class ClusterDecodeWorker:
    def __init__(
        self,
        cluster: ClusterSurroundings,
        transfers: Transfers,
        fetches: Transfers,
        incarnation: int,
        capacity: Capacity,
        engine: ClusterEngine,
    ) -> None:
        self.registration = ClusterRegistration(cluster, incarnation)
        self.gateways = ClusterGateways(cluster)
        self.receiver = transfers
        self.allocator = BlockAllocator(capacity.kv_blocks)
        self.tokens_forwarded = self.suffix_tokens = 0
        self.table: AttemptTable[None] = AttemptTable(
            self.allocator, capacity.block_size, RunningBatch(), lambda: self.tokens_forwarded
        )
        self.core: DecodeCore[None] = DecodeCore(
            self, self.table, vocab_size=MAX_VOCAB, make_state=lambda order, first, prompt_tokens: None
        )
        self.sender = ClusterKvSender(fetches, incarnation, self.core.lending.sent)
        self._incarnation = incarnation
        self.offered, self.not_received = self.core.offered, self.core.not_received
        self.held_block_s = 0.0  # held KV blocks × seconds of steps
        self.slices = SliceSizes(STALL_SHARE)
        self._step_tokens = capacity.step_tokens
        self._cluster = cluster
        self.engine = engine
        self._stepping = False

    def refuse_fetch(self, incarnation: int, message: FetchRefused) -> None:
        self._cluster.refuse_fetch(self._incarnation, incarnation, message)

    def order(self, message: Message, blob: bytes) -> None:
        self.core.order(message, blob)
        if isinstance(message, Step):
            self._cluster.at(self._cluster.now, self._start_step)

    def name_answer(self, gateway_incarnation: int, request: ClientRequest) -> None:
        """Tells the worker what the blocks of a stream that has ended hold, as the gateway does."""
        submit, size = request.submit, self.table.block_size
        first = len(submit.block_hashes) // HASH_BYTES
        names = AnswerNames(submit.request_id, submit.attempt, 0, size, first, request.answer_hashes)
        self.core.answer_named(gateway_incarnation, names)
        request.answer_hashes = b""

    def committed(self, incarnation: int, commit: Commit, blocks: list[int], prompt_tokens: list[int]) -> None:
        self.core.committed(incarnation, commit, blocks, prompt_tokens)
        if not self._stepping:
            self._cluster.at(self._cluster.now, self._start_step)

    def _start_step(self) -> None:
        if self._stepping:
            return
        now, running, timing = self._cluster.now, len(self.core.batch.running), self.engine.timing
        tokens_max = self.slices.tokens(running, self.core.tpot_targets()) if running else self._step_tokens
        part = self.core.next_slice(min(tokens_max, self._step_tokens), now) if len(self.core.suffixes) else None
        plan = self.core.plan()
        if plan is None and part is None:
            return
        self._stepping = True
        rows, tokens = len(plan.rows) if plan is not None else 0, len(part.tokens) if part is not None else 0
        took_s = timing.decode_s(rows) if plan is not None else 0.0
        took_s += (timing.slice_s(tokens, rows) if rows else timing.prefill_s(tokens)) if part is not None else 0.0
        fails = self.engine.fails_now()
        took_s = FAILED_STEP_S if fails else took_s
        self.slices.measured(rows, tokens, 1000 * took_s)
        self.held_block_s += self.allocator.held_count * took_s
        self.engine.run(took_s, self._step_ended, plan, part, fails)

    def _step_ended(self, plan: StepPlan[None] | None, part: Slice[None] | None, fails: bool) -> None:
        if not self.registration.up:
            return
        self._stepping = False
        rows = [(row.running.key[0], row.running.index + 1) for row in plan.rows] if plan is not None else []
        if part is not None:
            rows.append((part.suffix.order.request_id, 0))
        if any(self._cluster.ends_worker(*row) for row in rows):
            self._cluster.on_death(self._incarnation)
            return
        if fails:
            if part is not None:
                self.core.suffixes.failed(part, "the step fails")
            if plan is not None:
                self.core.step_failed("the step fails")
            self._start_step()
            return
        applied = None
        if plan is not None:
            self.tokens_forwarded += len(plan.rows)
            drawn: list[Draw] = []
            for row in plan.rows:
                running = row.running
                drawn.append((self._cluster.draw(running.key[0], running.choice, running.index), None))
            applied = self.core.apply(drawn)
        if part is not None:
            self.tokens_forwarded += len(part.tokens)
            self.suffix_tokens += len(part.tokens)
            suffix = part.suffix
            items = first_tokens(self._cluster, suffix.order, suffix.cached_tokens) if part.is_last else []
            self.core.slice_computed(part, items, self._cluster.now)
        self._start_step()
        if applied is not None:
            self.core.pass_on(*applied, self._cluster.now)
