"""Simulated worker processes: the production cores, tables, batch, allocator and prefix cache, driven as their `worker` modules
drive them, with the toy model on the engine thread. A step takes time, during which anything else may happen; it reads and
writes its blocks when it ends, so that a block given away too early shows.
"""

from collections.abc import Callable, Sequence
from typing import Any

from decode_worker.batch import Batch, Draw, StepPlan
from decode_worker.core import DecodeCore
from decode_worker.requests import AttemptTable
from decode_worker.senders import Senders
from engine.kv.allocator import BlockAllocator
from engine.sampling.finish import finish_reason
from kvtransfer.session.session import KvFailed, KvSent
from prefill_worker.core import Begun, PrefillCore, StepResult
from prefill_worker.prompts import Key, PromptTable
from proto.errors import RemoteProtocolError
from proto.held import Capacity
from proto.kv import Commit, FirstToken
from proto.limits import PROTOCOL_VERSION
from proto.messages import Hello, Message, Reserve, Role, TokenItem, Tokens
from proto.messages import Peer as Destination
from proto.progress import Hung
from runtime.worker.service import GO_AFTER_S
from runtime.worker.step_watch import StepWatch
from simulation.faults.oracles import DRAINED
from simulation.faults.surroundings import Surroundings
from simulation.transfers.connections import PoolProcess
from simulation.transfers.receiver import Receiver
from simulation.transfers.sender import Sender
from simulation.world.connection_pool import ConnectionPool
from simulation.world.links import Link, Server
from simulation.world.registration import Registration
from simulation.world.toy_model import VOCAB, Toy, ToyState
from simulation.world.world import Violation

STEP_TIMEOUT_S = 1.0
KV_TIMEOUT_S = 10.0
RESTART_S = 0.5
MODEL, FINGERPRINT = "toy", "f"
STEP_TOKENS_MAX = 64


def role_of(name: str) -> Role:
    """In which a worker of this name starts."""
    return Role(name.partition("-")[0])


class Gateways(ConnectionPool):
    """Every token a worker sends passes here, so that none is sent twice."""

    def send(self, to: Destination, message: Message, blob: bytes = b"") -> None:
        assert isinstance(message, Tokens) and isinstance(self.process, WorkerProcess)
        self.process.cluster.oracles.emitted(self.process.name, message)
        super().send(to, message, blob)


class WorkerProcess(PoolProcess):
    """What both kinds share."""

    role: Role
    registration: Registration
    gateways: Gateways
    transfers: Sender | Receiver
    toy: Toy
    allocator: BlockAllocator

    def __init__(self, cluster: Surroundings, name: str, before: "WorkerProcess | None" = None) -> None:
        """`before` is the same process in its other role: pool and cache stay."""
        super().__init__(cluster, name)
        self.cluster = cluster
        plan = cluster.plan
        configured = role_of(name)
        self.kv_blocks, self.block_size = plan.kv_blocks[configured], plan.block_size[configured]
        self.flip_ends = ""
        """What is wrong with its next change of role: it cannot be prepared (`cannot`), or the process dies in it (`dies`)."""
        self.slow = 1.0
        self.fail_step = ""
        """The next step fails: in the model (`error`), or its logits are not finite (`nan`)."""
        self.hang_s = 0.0
        """So much longer does the next step take."""
        self.watch = StepWatch(STEP_TIMEOUT_S)
        self._hangs = self._goes_over = False
        self.toy = before.toy if before is not None else Toy(self.kv_blocks, self.block_size)
        self.allocator = before.allocator if before is not None else BlockAllocator(self.kv_blocks)
        self.hello = Hello(
            PROTOCOL_VERSION, self.role, self.incarnation, name, MODEL, FINGERPRINT, f"{name}/kv",
            Capacity(self.kv_blocks, self.block_size, plan.max_seqs, plan.context_tokens),
            flipped_from=before.incarnation if before is not None else 0,
        )  # fmt: skip

    def start(self) -> None:
        self.registration.client.start()
        self.after(self.watch.look_every_s, self._look)

    def _look(self) -> None:
        """As `runtime.worker.driver`."""
        ran_s = self.watch.hung_for(self.now())
        if ran_s is None:
            self.after(self.watch.look_every_s, self._look)
            return
        self.log(f"its step hangs for {ran_s:.1f} s")
        if not self._hangs:
            raise Violation("no false alarm", f"{self.name} ends itself, though its step does not hang")
        self.registration.send(Hung(1000 * ran_s))
        self.cluster.end(self, RESTART_S)

    def compute(self, tokens: int, seconds: float, then: Callable[..., None], *arguments: Any) -> None:
        """A step, on the thread that computes."""
        self.watch.begin(tokens, self.now())
        hang_s, self.hang_s = self.hang_s, 0.0
        self._hangs = hang_s > STEP_TIMEOUT_S
        self.after(seconds + hang_s, self._computed, then, arguments)

    def _computed(self, then: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        if self.resumed_at == self.world.now:
            # Stopped in the midst of it, that thread has the rest yet to do.
            self.after(0.001, self._computed, then, arguments)
            return
        self.watch.end(self.now())
        self._hangs = False
        then(*arguments)

    def drain(self, grace_s: float) -> None:
        """As on SIGTERM."""
        self.registration.leave(grace_s)
        self.after(grace_s + GO_AFTER_S, self._go, "its time is up")

    def may_go(self) -> None:
        self.after(0.0, self._go, DRAINED)

    # --- change of role -------------------------------------------------------------------------------------------------

    def prepare_flip(self, _: Role) -> None:
        """As `runtime.worker.driver`: ready, or not, after a while."""
        ready = self.registration.ready_to_flip
        if self.flip_ends == "cannot":
            self.after(self.world.random.uniform(0.001, 0.05), self.registration.cannot_flip, "planted")
        else:
            self.after(self.world.random.uniform(0.001, 0.05), ready)

    def is_quiet(self) -> bool:
        return not (self.allocator.held_count or self.allocator.quarantined_count) and self.transfers.idle

    def may_flip(self) -> None:
        if not self._goes_over:
            self._goes_over = True
            self.after(0.0, self._flip)

    def _flip(self) -> None:
        assert isinstance(self, PrefillProcess | DecodeProcess)
        if self.flip_ends == "dies":
            self.log("dies in its change of role")
            self.cluster.end(self, RESTART_S)
        else:
            self.log("changes its role")
            self.cluster.worker_flips(self)

    def report_cache(self) -> None:
        self.registration.report_cache(self.allocator.take_changes)

    def _go(self, why: str) -> None:
        assert isinstance(self, PrefillProcess | DecodeProcess)
        self.log("goes", why)
        self.cluster.worker_goes(self, why)

    def step_s(self, least: float, most: float) -> float:
        return self.world.random.uniform(least, most) * self.slow

    def check_writable(self, blocks: Sequence[int]) -> None:
        """Nobody else may hold what is received into, and nobody may find it in the cache."""
        for block in blocks:
            if self.allocator.refs(block) != 1 and not self.allocator.is_quarantined(block):
                raise Violation("no block is freed early", f"{self.name} receives KV into block {block}, not its own")

    def check_held(self, blocks: list[int] | tuple[int, ...], request_id: str) -> None:
        for block in blocks:
            if not self.allocator.refs(block):
                raise Violation("no block is freed early", f"{self.name} computes in block {block}, free", request_id)


class PrefillProcess(WorkerProcess):
    role = Role.PREFILL

    def __init__(self, cluster: Surroundings, name: str, before: WorkerProcess | None = None) -> None:
        super().__init__(cluster, name, before)
        self.core = PrefillCore(
            self,
            PromptTable(self.allocator, self.block_size, cluster.plan.prefix_cache),
            vocab_size=VOCAB,
            step_tokens_max=STEP_TOKENS_MAX,
            tokens_forwarded=lambda: self.toy.tokens_forwarded,
        )
        self.registration = Registration(
            self,
            self.hello,
            held=self.core.table.held,
            on_message=self._order,
            on_lost=self.core.coordinator_lost,
            is_idle=lambda: self.gateways.idle,
            on_may_go=self.may_go,
            on_registered=self.report_cache,
            on_flip=self.prepare_flip,
            is_quiet=self.is_quiet,
            on_may_flip=self.may_flip,
        )
        self.gateways = Gateways(self, self.hello, _unexpected, self.core.gateway_lost, self.registration.look)
        self.receivers = ConnectionPool(self, self.hello, self._kv_message, self._receiver_lost)
        self.sender = self.transfers = Sender(self, self.toy, self._send_kv, self._kv_result)
        self._computing = False

    def _order(self, _: Link, message: Message, blob: bytes) -> None:
        self.core.order(message, blob)
        self._step()

    def _step(self) -> None:
        if self._computing:
            return
        begun = self.core.begin_step()
        if begun is not None:
            self._computing = True
            tokens = sum(chunk.length for _, chunk in begun.work)
            self.compute(tokens, self.step_s(0.002, 0.006) + 0.0005 * tokens * self.slow, self._step_ended, begun)

    def _step_ended(self, begun: Begun) -> None:
        self._computing = False
        fail, self.fail_step = self.fail_step, ""
        if fail == "error":
            self.log("step fails")
            self.core.step_failed(begun, "planted")
        else:
            self.core.step_done(begun, self._run(begun, broken=fail == "nan"))
        self._step()

    def _run(self, begun: Begun, broken: bool) -> StepResult:
        """As `prefill_worker.compute.run_step`."""
        first: dict[Key, list[TokenItem]] = {}
        for prompt, chunk in begun.work:
            self.check_held(prompt.blocks, chunk.request_id)
            order, end = prompt.order, chunk.start + chunk.length
            total = self.toy.forward(prompt.tokens[chunk.start : end], chunk.start, prompt.blocks)
            if end < order.prompt_tokens:
                continue
            split = len(prompt.tokens) - order.resumed_tokens
            items = first[prompt.key] = []
            for choice in range(order.first_choice, order.first_choice + order.choices):
                state = ToyState.of(order.sampling, choice, prompt.tokens[:split], prompt.tokens[split:])
                token = state.draw(total)
                finish = finish_reason(token, order.resumed_tokens + 1, order.sampling)
                items.append(
                    TokenItem(*prompt.key, choice, order.resumed_tokens, (token,), finish, (), prompt.cached_tokens)
                )
            if not broken:
                self.cluster.oracles.drawn(order.request_id, len(items))
        keys = frozenset(prompt.key for prompt, _ in begun.work) if broken else frozenset()
        return StepResult(1.0, {} if broken else first, keys)

    def _kv_result(self, result: KvSent | KvFailed) -> None:
        self.core.kv_result(result)

    def _send_kv(self, incarnation: int, message: Message, blob: bytes) -> None:
        receiver = self.core.receiver_of.get(incarnation)
        if receiver is not None:
            self.receivers.send(receiver, message, blob)

    def _kv_message(self, link: Link, message: Message, blob: bytes) -> None:
        self.sender.handle(link.incarnation, message, blob)

    def _receiver_lost(self, incarnation: int, reason: str) -> None:
        self.core.receiver_of.pop(incarnation, None)
        self.sender.peer_lost(incarnation, reason)


class DecodeProcess(WorkerProcess):
    role = Role.DECODE

    def __init__(self, cluster: Surroundings, name: str, before: WorkerProcess | None = None) -> None:
        super().__init__(cluster, name, before)
        batch: Batch[ToyState] = Batch()
        table = AttemptTable(
            self.allocator,
            self.block_size,
            batch,
            lambda: self.toy.tokens_forwarded,
            cluster.plan.prefix_cache,
        )
        self.core: DecodeCore[ToyState] = DecodeCore(self, table, vocab_size=VOCAB, make_state=_toy_state)
        self.registration = Registration(
            self,
            self.hello,
            held=table.held,
            on_message=lambda _, message, __: self.core.order(message),
            on_lost=self._coordinator_lost,
            is_idle=lambda: self.gateways.idle,
            on_may_go=self.may_go,
            on_registered=self.report_cache,
            on_flip=self.prepare_flip,
            is_quiet=self.is_quiet,
            on_may_flip=self.may_flip,
        )
        self.gateways = Gateways(self, self.hello, _unexpected, self.core.gateway_lost, self.registration.look)
        self.senders: Senders[Link] = Senders()
        self.server = Server(
            self,
            f"{name}/kv",
            accept=lambda hello: None if hello.role is Role.PREFILL else "this is a KV port",
            on_up=lambda link: None,
            on_message=self._kv_message,
            on_down=self._sender_down,
        )
        self.receiver = self.transfers = Receiver(
            self,
            self.toy,
            self._send_kv,
            accept=self.core.offered,
            on_committed=self._committed,
            on_failed=self.core.not_received,
            on_quarantined=self.core.not_yet_free,
        )
        self._computing = False

    def _coordinator_lost(self, _: str) -> None:
        now = self.now()
        self.core.coordinator_lost(now)
        self.after(KV_TIMEOUT_S, self.core.expire, now)

    def _kv_message(self, link: Link, message: Message, blob: bytes) -> None:
        self.senders.heard(link.incarnation, link)
        self.receiver.handle(link.incarnation, message, blob)

    def _sender_down(self, link: Link, reason: str) -> None:
        if self.senders.lost(link.incarnation, link):
            self.receiver.peer_lost(link.incarnation, reason)

    def _send_kv(self, incarnation: int, message: Message, blob: bytes) -> None:
        link = self.senders.link(incarnation)
        if link is not None:
            link.send(message, blob)

    def _committed(self, incarnation: int, commit: Commit, blocks: list[int], prompt_tokens: list[int]) -> None:
        self.core.committed(incarnation, commit, blocks, prompt_tokens)
        if not self._computing:
            self.after(0.0, self._wake)

    def _wake(self) -> None:
        if not self._computing:
            self._start_step()

    def _start_step(self) -> None:
        plan = self.core.plan()
        if plan is not None:
            self._computing = True
            self.compute(len(plan.rows), self.step_s(0.008, 0.02), self._step_ended, plan)

    def _step_ended(self, plan: StepPlan[ToyState]) -> None:
        self._computing = False
        fail, self.fail_step = self.fail_step, ""
        if fail == "error":
            self.log("step fails")
            self.core.step_failed("planted")
            self._start_step()
            return
        outcome, final_reports = self.core.apply(self._run(plan, broken=fail == "nan"))
        self._start_step()
        self.core.pass_on(outcome, final_reports, self.now())

    def _run(self, plan: StepPlan[ToyState], broken: bool) -> list[Draw]:
        """As `decode_worker.compute.run_step`."""
        for source, target in plan.copies:
            self.toy.copy(source, target)
        drawn: list[Draw] = []
        for row in plan.rows:
            self.check_held(row.table, row.running.key[0])
            state = row.running.state
            token = state.draw(self.toy.forward((row.token,), row.position, row.table))
            if broken:
                drawn.append(None)
                continue
            state.accept(token)
            self.cluster.oracles.drawn(row.running.key[0], 1)
            drawn.append((token, None))
        return drawn


def _toy_state(order: Reserve, first: FirstToken, prompt_tokens: list[int]) -> ToyState:
    split = len(prompt_tokens) - order.resumed_tokens if prompt_tokens else 0
    state = ToyState.of(
        order.sampling, first.choice, prompt_tokens[:split], prompt_tokens[split:], order.resumed_tokens
    )
    state.accept(first.token)
    return state


def _unexpected(_: Link, message: Message, __: bytes) -> None:
    raise RemoteProtocolError(f"a gateway sent {type(message).__name__}")
