"""Simulated worker processes: the production cores, tables, batch, allocator and prefix cache, driven as their `worker`
modules drive them, with the toy model on the engine thread. A step takes time, in which anything else may happen. It reads and
writes its blocks when it ends, so that a block that was freed too early is noticed.
"""

from decode_worker.batch import Draw, RunningBatch, StepPlan
from decode_worker.core import DecodeCore
from decode_worker.requests import AttemptTable
from decode_worker.senders import Senders
from decode_worker.suffixes import Slice
from engine.sampling.finish import finish_reason
from kvtransfer.session.session import KvFailed, KvSent
from prefill_worker.core import Begun, PrefillCore, PrefillStepResult
from prefill_worker.prompts import Key, PromptTable
from proto.kv import Commit, Fetch, FetchRefused, FirstToken, is_of_fetch, of_fetch
from proto.messages import Destination, Message, Prefill, Reserve, Role, Step, TokenItem
from proto.progress import AnswerNames
from tests.world.connection_pool import SimulatedConnectionPool
from tests.world.faults.lineup import Lineup
from tests.world.faults.surroundings import FaultSurroundings
from tests.world.faults.tier import FaultCopies
from tests.world.faults.worker_process import WorkerGateways, WorkerProcess, role_of, unexpected
from tests.world.links import Link, SimulatedServer
from tests.world.registration import SimulatedRegistration
from tests.world.toy_model import VOCAB, ToyState
from tests.world.transfers.receiver import SimulatedReceiver
from tests.world.transfers.sender import SimulatedSender

KV_TIMEOUT_S = 10.0
STEP_TOKENS_MAX = 64
OFFER_S = 3.0


class PrefillProcess(WorkerProcess):
    role = Role.PREFILL

    def __init__(self, cluster: FaultSurroundings, lineup: Lineup) -> None:
        super().__init__(cluster, lineup)
        self.core = PrefillCore(
            self,
            PromptTable(self.allocator, self.block_size, cluster.plan.prefix_cache),
            vocab_size=VOCAB,
            step_tokens_max=STEP_TOKENS_MAX,
            tokens_forwarded=lambda: self.toy.tokens_forwarded,
        )
        self.registration = SimulatedRegistration(
            self,
            self.hello,
            held=self.core.table.held,
            on_message=self._order,
            on_lost=self.core.coordinator_lost,
            is_idle=lambda: self.gateways.idle,
            on_may_go=self.may_go,
            on_registered=self.report_cache,
            is_quiet=self.is_quiet,
            changeover=lineup.changeover,
            on_flipped=lineup.flipped,
            finished=lineup.reports(),
        )
        self.gateways = WorkerGateways(self, self.hello, unexpected, self.core.gateway_lost, self.registration.look)
        self.receivers = SimulatedConnectionPool(self, self.hello, self._kv_message, self._receiver_lost)
        self.sender = SimulatedSender(self, self.toy, self._send_kv, self._kv_result)
        self.receiver = SimulatedReceiver(
            self,
            self.toy,
            lambda incarnation, message, blob: self._send_kv(incarnation, of_fetch(message), blob),
            accept=self.core.fetches.offered,
            on_committed=self._fetched,
            on_failed=self._not_fetched,
            on_quarantined=lambda request_id, attempt, blocks: None,
        )
        self.transfers = (self.sender, self.receiver)
        if cluster.plan.tier_slots:
            copies = FaultCopies(self, self._step)
            copies.tier = self.core.use_tier(copies, cluster.plan.tier_slots)
        self._computing = False

    def report_cache(self) -> None:
        self.registration.report_cache(self.core.take_changes)

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

    def _run(self, begun: Begun, broken: bool) -> PrefillStepResult:
        """As `prefill_worker.compute.run_step`."""
        first: dict[Key, list[TokenItem]] = {}
        for prompt, chunk in begun.work:
            self.check_held(prompt.blocks, chunk.request_id)
            order, end = prompt.order, chunk.start + chunk.length
            total = self.toy.forward(prompt.tokens[chunk.start : end], chunk.start, prompt.blocks)
            if end < order.prompt_tokens:
                continue
            items = first[prompt.key] = draw_first_tokens(order, prompt.tokens, total, prompt.cached_tokens)
            if not broken:
                self.cluster.oracles.drawn(order.request_id, len(items))
        keys = frozenset(prompt.key for prompt, _ in begun.work) if broken else frozenset()
        step_ms = 4.0 + 10.0 * sum(chunk.length for _, chunk in begun.work)
        return PrefillStepResult(step_ms, {} if broken else first, keys)

    def _kv_result(self, result: KvSent | KvFailed) -> None:
        self.core.kv_result(result)

    def _send_kv(self, incarnation: int, message: Message, blob: bytes) -> None:
        receiver = self.core.receiver_of.get(incarnation)
        if receiver is not None:
            self.receivers.send(receiver, message, blob)

    def _kv_message(self, link: Link, message: Message, blob: bytes) -> None:
        if isinstance(message, FetchRefused):
            self.core.fetches.refused(link.incarnation, message)
            self._step()
        elif is_of_fetch(message, from_prefill=False):
            self.receiver.handle(link.incarnation, message, blob)
        else:
            self.sender.handle(link.incarnation, message, blob)

    def _receiver_lost(self, incarnation: int, reason: str) -> None:
        self.core.receiver_of.pop(incarnation, None)
        self.core.fetches.peer_lost(incarnation)
        self.receiver.peer_lost(incarnation, reason)
        self.sender.peer_lost(incarnation, reason)
        self._step()

    def fetch(self, decode: Destination, message: Fetch) -> None:
        self.receivers.send(decode, message)
        self.after(OFFER_S, self._expire, (message.request_id, message.attempt))

    def _expire(self, key: Key) -> None:
        self.core.fetches.expire(key)
        self._step()

    def _fetched(self, _: int, commit: Commit, blocks: list[int], __: list[int]) -> None:
        self.core.fetches.committed(commit, blocks)
        self.report_cache()
        self._step()

    def _not_fetched(self, request_id: str, attempt: int, _: list[int]) -> None:
        self.core.fetches.not_received(request_id, attempt, "the transfer failed")
        self._step()


class DecodeProcess(WorkerProcess):
    role = Role.DECODE

    def __init__(self, cluster: FaultSurroundings, lineup: Lineup) -> None:
        super().__init__(cluster, lineup)
        batch: RunningBatch[ToyState] = RunningBatch()
        table = AttemptTable(
            self.allocator, self.block_size, batch, lambda: self.toy.tokens_forwarded, cluster.plan.prefix_cache
        )
        self.core: DecodeCore[ToyState] = DecodeCore(self, table, vocab_size=VOCAB, make_state=_toy_state)
        self.registration = SimulatedRegistration(
            self,
            self.hello,
            held=table.held,
            on_message=self._order,
            on_lost=self._coordinator_lost,
            is_idle=lambda: self.gateways.idle,
            on_may_go=self.may_go,
            on_registered=self.report_cache,
            is_quiet=self.is_quiet,
            changeover=lineup.changeover,
            on_flipped=lineup.flipped,
            finished=lineup.reports(),
        )
        gateway_lost, look = self.core.gateway_lost, self.registration.look
        self.gateways = WorkerGateways(self, self.hello, self._gateway_said, gateway_lost, look)
        self.senders: Senders[Link] = Senders()
        self.server = SimulatedServer(
            self,
            f"{lineup.name}/kv",
            accept=lambda hello: None if hello.role is Role.PREFILL else "this is a KV port",
            on_up=lambda link: None,
            on_message=self._kv_message,
            on_down=self._sender_down,
        )
        self.sender = SimulatedSender(
            self,
            self.toy,
            lambda incarnation, message, blob: self._send_kv(incarnation, of_fetch(message), blob),
            self.core.lending.sent,
        )
        self.receiver = SimulatedReceiver(
            self,
            self.toy,
            self._send_kv,
            accept=self.core.offered,
            on_committed=self._committed,
            on_failed=self.core.not_received,
            on_quarantined=self.core.not_yet_free,
        )
        self.transfers = (self.sender, self.receiver)
        self._computing = False

    def _gateway_said(self, link: Link, message: Message, _: bytes) -> None:
        assert isinstance(message, AnswerNames)
        self.core.answer_named(link.incarnation, message)

    def _order(self, _: Link, message: Message, blob: bytes) -> None:
        self.core.order(message, blob)
        if isinstance(message, Step):
            self.after(0.0, self._wake)

    def _coordinator_lost(self, _: str) -> None:
        now = self.now()
        self.core.coordinator_lost(now)
        self.after(KV_TIMEOUT_S, self.core.expire, now)

    def _kv_message(self, link: Link, message: Message, blob: bytes) -> None:
        self.senders.heard(link.incarnation, link)
        if isinstance(message, Fetch):
            self.core.lending.asked(link.incarnation, message)
        elif is_of_fetch(message, from_prefill=True):
            self.sender.handle(link.incarnation, message, blob)
        else:
            self.receiver.handle(link.incarnation, message, blob)

    def refuse_fetch(self, incarnation: int, message: FetchRefused) -> None:
        self._send_kv(incarnation, message, b"")

    def _sender_down(self, link: Link, reason: str) -> None:
        if self.senders.lost(link.incarnation, link):
            self.receiver.peer_lost(link.incarnation, reason)
            self.sender.peer_lost(link.incarnation, reason)

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
        plan, part = self.core.plan(), self.core.next_slice(self.world.random.choice((1, 3, 8)), self.now())
        if plan is not None or part is not None:
            self._computing = True
            tokens = len(plan.rows if plan is not None else ()) + len(part.tokens if part is not None else ())
            self.compute(tokens, self.step_s(0.008, 0.02), self._step_ended, plan, part)

    def _step_ended(self, plan: StepPlan[ToyState] | None, part: Slice[ToyState] | None) -> None:
        self._computing = False
        fail, self.fail_step = self.fail_step, ""
        if fail == "error":
            self.log("step fails")
            if part is not None:
                self.core.suffixes.failed(part, "planted")
            if plan is not None:
                self.core.step_failed("planted")
            self._start_step()
            return
        broken = fail == "nan"
        items = self._compute_slice(part, broken) if part is not None else []
        applied = self.core.apply(self._run(plan, broken)) if plan is not None else None
        if part is not None:
            self.core.slice_computed(part, items, self.now())
        self._start_step()
        if applied is not None:
            self.core.pass_on(*applied, self.now())

    def _compute_slice(self, part: Slice[ToyState], broken: bool) -> list[TokenItem] | None:
        suffix, order = part.suffix, part.suffix.order
        self.check_held(suffix.blocks, order.request_id)
        total = self.toy.forward(part.tokens, part.start, suffix.blocks)
        if not part.is_last:
            return [] if not broken else None
        items = draw_first_tokens(order, suffix.tokens, total, suffix.cached_tokens)
        if not broken:
            self.cluster.oracles.drawn(order.request_id, len(items))
        return None if broken else items

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


def draw_first_tokens(order: Prefill, tokens: list[int], total: int, cached_tokens: int) -> list[TokenItem]:
    """Returns the first token of each choice of a computed prompt; `total` is the result of its last forward."""
    split, items = len(tokens) - order.resumed_tokens, []
    for choice in range(order.first_choice, order.first_choice + order.choices):
        token = ToyState.of(order.sampling, choice, tokens[:split], tokens[split:]).draw(total)
        finish = finish_reason(token, order.resumed_tokens + 1, order.sampling)
        items.append(
            TokenItem(
                order.request_id, order.attempt, choice, order.resumed_tokens, (token,), finish, (), cached_tokens
            )
        )
    return items


def _toy_state(order: Reserve, first: FirstToken, prompt_tokens: list[int]) -> ToyState:
    split = len(prompt_tokens) - order.resumed_tokens if prompt_tokens else 0
    state = ToyState.of(
        order.sampling, first.choice, prompt_tokens[:split], prompt_tokens[split:], order.resumed_tokens
    )
    state.accept(first.token)
    return state


KINDS: dict[Role, type[PrefillProcess | DecodeProcess]] = {Role.PREFILL: PrefillProcess, Role.DECODE: DecodeProcess}


def line_up(
    cluster: FaultSurroundings, name: str, role: Role, before: Lineup | None = None
) -> list[PrefillProcess | DecodeProcess]:
    """Makes the worker process in this role; `before`: the same process in its last role."""
    configured, plan = role_of(name), cluster.plan
    lineup = Lineup(cluster, name, role, plan.kv_blocks[configured], plan.block_size[configured], before)
    return [KINDS[one](cluster, lineup) for one in role.registers_as]
