"""The role-specific part of a decode worker: KV in, orders to its core, steps of its batch."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from decode_worker.batch import RunningBatch, StepPlan
from decode_worker.compute import DecodeStepResult, run_ahead, run_step
from decode_worker.core import DecodeCore
from decode_worker.metrics import DecodeMetrics
from decode_worker.requests import Attempt, AttemptTable
from decode_worker.senders import Senders
from decode_worker.suffixes import IDLE_TOKENS, Slice, SliceSizes
from engine.engine import Engine
from engine.kv.allocator import BlockAllocator
from engine.sampling.sampler import SamplerState
from kvtransfer.memory.layout import KvLayout
from kvtransfer.ports import ReceiverOwner, SenderOwner
from kvtransfer.receiver import KvReceiver
from kvtransfer.sender import KvSender
from kvtransfer.session.limits import CPU_BYTES_PER_S, FETCH_IDLE_MS, KvSettings, segment_bytes_on
from kvtransfer.session.session import KvFailed, KvSent, OfferAccepted
from kvtransfer.transports.transport import PoolMemory
from proto.compatible import mismatch
from proto.errors import RemoteProtocolError
from proto.kv import Commit, Fetch, FetchRefused, FirstToken, Offer, is_of_fetch, of_fetch
from proto.limits import KV_TIMEOUT_MS
from proto.messages import Hello, Message, Reserve, Role
from proto.progress import AnswerNames
from proto.status import KvHeld
from runtime.grammar.compiler import GrammarError, Matcher
from runtime.link.peer import Peer
from runtime.link.server import LinkServer
from runtime.process import clock
from runtime.process.rate_limited_log import RateLimitedLog
from runtime.settings.addresses import advertised
from runtime.settings.workers import WorkerSettings
from worker.driver import ComputeStep, WorkerDriver
from worker.gpu_faults import end_if_gpu_is_lost
from worker.grammars import GrammarThread

QUARANTINE_WARN_S = 10.0  # longer than a transfer thread waits for a reachable peer; then an operator should look


class DecodeRole(ReceiverOwner):
    """A `WorkerRole`, and the owner of the receiver of its KV."""

    def __init__(
        self,
        engine: Engine,
        blocks: BlockAllocator,
        driver: WorkerDriver,
        transports: tuple[str, ...],
        own_receivers: set[int],
        memory: PoolMemory | None,
    ) -> None:
        """`blocks` are those of the engine's pool, all free or cached. `transports` are those that KV may come by;
        `own_receivers` are the incarnations of the decode workers in this process; `memory` is what the KV pool lies in, if
        other processes may map it."""
        settings, info = driver.settings, engine.info
        own_receivers.add(driver.hello.incarnation)
        self.engine, self.driver, self.log = engine, driver, driver.log
        self.registration, self.gateways = driver.registration, driver.gateways
        batch: RunningBatch[SamplerState] = RunningBatch(depth=1 if engine.pipeline is None else 2)
        self.table = AttemptTable(
            blocks, info.block_size, batch, lambda: engine.tokens_forwarded, settings.prefix_cache
        )
        self.core = DecodeCore(self, self.table, vocab_size=info.vocab_size, make_state=self._sampler_state)
        self.slices = SliceSizes(settings.stall_share)
        self.grammars = GrammarThread(info.model_path, info.vocab_size, info.eos_token_ids)
        self.core.suffixes.prepare_grammar = self._prepare_grammar
        self._matchers: list[Matcher] = []  # of choices that are about to join the batch, all alike
        self.held, self.gateway_lost = self.table.held, self.core.gateway_lost
        self.senders: Senders[Peer] = Senders()
        self.server = LinkServer(
            bind=settings.kv_bind,
            hello=driver.hello,
            accept=self._refusal,
            on_up=lambda peer: None,
            on_message=self._kv_message,
            on_down=self._sender_down,
            settings=driver.links,
        )
        self.ports = {"kv": self.server.counters}
        self.strangers_log = RateLimitedLog(self.log.warning)
        layout = KvLayout(info.layers, info.kv_heads, info.head_dim, info.block_size, info.dtype)
        kv = _kv_settings(settings, transports, engine.pool.device.type)
        self.receiver = self._make_receiver(layout, memory, kv)
        self.sender = self._make_sender(layout, kv)
        self.metrics = DecodeMetrics(
            self.table, self.receiver.counters, lambda: engine.pipeline.padding_rows if engine.pipeline else 0
        )
        self.registry = self.metrics.registry

    def _make_receiver(self, layout: KvLayout, memory: PoolMemory | None, settings: KvSettings) -> KvReceiver:
        return KvReceiver(
            layout=layout,
            pool=self.engine.pools,
            incarnation=self.driver.hello.incarnation,
            clock=clock.now,
            listen_host=self.driver.settings.transfer_host,
            owner=self,
            settings=settings,
            memory=memory,
        )

    def _make_sender(self, layout: KvLayout, settings: KvSettings) -> KvSender:
        return KvSender(
            layout=layout,
            pool=self.engine.pools,
            incarnation=self.driver.hello.incarnation,
            clock=clock.now,
            owner=_Lending(self),
            settings=replace(settings, idle_timeout_ms=FETCH_IDLE_MS, remembers_digests=False, bytes_per_s=0),
        )

    async def start(self) -> str:
        return advertised(self.driver.settings.advertise, await self.server.start())

    async def close_transfers(self) -> None:
        await self.sender.close()
        await self.receiver.close()

    async def close(self) -> None:
        self.grammars.close()
        self.table.allocator.close()
        await self.server.close()

    def registered(self) -> None:
        self.registration.report_cache(self.table.allocator.take_changes)

    def kv_held(self) -> KvHeld:
        sessions = self.receiver.sessions + self.sender.sessions
        return KvHeld(self.table.allocator.held_count, self.table.allocator.quarantined_count, sessions)

    def order(self, message: Message, blob: bytes) -> None:
        self.core.order(message, blob)
        self.driver.wake()
        if isinstance(message, Reserve) and message.sampling.grammar:
            self.grammars.warm(message.sampling.grammar)  # while the prompt is computed elsewhere

    def coordinator_lost(self, _: str) -> None:
        now, loop = clock.now(), asyncio.get_running_loop()
        self.core.coordinator_lost(now)
        # A stalled transfer would be aborted after the same time.
        loop.call_later(KV_TIMEOUT_MS / 1000, self.core.expire, now)

    def gateway_said(self, incarnation: int, message: Message) -> None:
        if not isinstance(message, AnswerNames):
            raise RemoteProtocolError(f"a gateway sent {type(message).__name__}")
        self.core.answer_named(incarnation, message)

    # --- KV in ----------------------------------------------------------------------------------------------------------

    def _refusal(self, hello: Hello) -> str | None:
        if hello.role is not Role.PREFILL:
            return f"this is a KV port; a {hello.role} has no business here"
        if hello.capacity is None:
            return "a prefill worker must state its capacity"
        own, size = self.engine.info, hello.capacity.block_size
        name = self.driver.name
        return mismatch(name, own.fingerprint, own.block_size, hello.name, hello.fingerprint, size) or None

    def turned_away(self, reason: str) -> None:
        self.strangers_log("a connection to the KV port was turned away", reason=reason)

    def _sender_down(self, peer: Peer, reason: str) -> None:
        if self.senders.lost(peer.incarnation, peer):
            self.receiver.peer_lost(peer.incarnation, reason)
            self.sender.peer_lost(peer.incarnation, reason)

    def send(self, peer_incarnation: int, message: Message, blob: bytes) -> None:
        peer = self.senders.link(peer_incarnation)
        if peer is not None:
            peer.send(message, blob)

    def _kv_message(self, peer: Peer, message: Message, blob: bytes) -> None:
        self.senders.heard(peer.incarnation, peer)
        if isinstance(message, Fetch):
            self.core.lending.asked(peer.incarnation, message)
        elif is_of_fetch(message, from_prefill=True):
            self.sender.handle(peer.incarnation, message, blob)
        else:
            self.receiver.handle(peer.incarnation, message, blob)

    def refuse_fetch(self, incarnation: int, message: FetchRefused) -> None:
        self.send(incarnation, message, b"")

    def is_busy(self) -> bool:
        return bool(self.table.batch.running)

    def pair_failed(self, error: Exception) -> None:
        end_if_gpu_is_lost(error, self.log)

    def offered(self, peer_incarnation: int, offer: Offer) -> OfferAccepted | str | None:
        return self.core.offered(peer_incarnation, offer)

    def committed(self, peer_incarnation: int, commit: Commit, block_ids: list[int], prompt_tokens: list[int]) -> None:
        attempt = self.table.attempts.get((commit.request_id, commit.attempt))
        if attempt is None or not attempt.order.sampling.grammar:
            self._join(peer_incarnation, commit, block_ids, prompt_tokens)
            return
        order = attempt.order

        def ready(made: list[Matcher] | GrammarError) -> None:
            if isinstance(made, GrammarError):
                self.core.cannot_run(commit, block_ids, f"the grammar: {made}")
                return
            self._matchers = made
            self._join(peer_incarnation, commit, block_ids, prompt_tokens)

        resumed = prompt_tokens[len(prompt_tokens) - order.resumed_tokens :] if order.resumed_tokens else ()
        self.grammars.prepare(order.sampling.grammar, resumed, len(commit.first_tokens), ready)

    def _join(self, incarnation: int, commit: Commit, blocks: list[int], prompt_tokens: list[int]) -> None:
        self.core.committed(incarnation, commit, blocks, prompt_tokens)
        self.driver.wake()

    def not_received(self, request_id: str, attempt: int, block_ids: list[int], reason: str) -> None:
        self.log.debug("KV not received", request_id=request_id, attempt=attempt, reason=reason)
        self.core.not_received(request_id, attempt, block_ids)

    def _sampler_state(self, order: Reserve, first: FirstToken, prompt_tokens: list[int]) -> SamplerState:
        split = len(prompt_tokens) - order.resumed_tokens if prompt_tokens else 0
        state = SamplerState(
            order.sampling, first.choice, self.engine.info.vocab_size, prompt_tokens[:split], prompt_tokens[split:],
            start_index=order.resumed_tokens, constraint=self._matchers.pop() if order.sampling.grammar else None,
        )  # fmt: skip
        state.accept(first.token)
        return state

    def in_doubt(self, request_id: str, attempt: int, block_ids: list[int]) -> None:
        self.core.not_yet_free(request_id, attempt, block_ids)
        asyncio.get_running_loop().call_later(QUARANTINE_WARN_S, self._still_in_doubt, (request_id, attempt))

    def _still_in_doubt(self, key: tuple[str, int]) -> None:
        blocks = self.core.table.quarantined.get(key)
        if blocks is None:
            return
        receiving = self.receiver.receiving()
        incarnations = [one.peer_incarnation for one in receiving if (one.request_id, one.attempt) == key]
        self.log.warning(
            f"{len(blocks)} KV blocks cannot be used: their sender stopped amid a transfer and may still write to them;"
            " ending that prefill worker frees them",
            request_id=key[0],
            attempt=key[1],
            peer_incarnations=incarnations,
            blocks_in_quarantine=self.core.table.allocator.quarantined_count,
        )
        asyncio.get_running_loop().call_later(QUARANTINE_WARN_S, self._still_in_doubt, key)

    # --- steps ----------------------------------------------------------------------------------------------------------

    def next_step(self) -> ComputeStep[DecodeStepResult] | None:
        before, pipeline = self.table.batch.in_flight, self.engine.pipeline
        if pipeline is None:
            part = self._next_slice() if len(self.core.suffixes) else None
            plan = self.core.plan()
            return None if plan is None and part is None else self._compute_step(plan, part)
        plan = self.core.plan()
        newest = plan or before
        if newest is None:
            return None
        compute = partial(run_ahead, self.engine, pipeline, plan, collects=before is not None)
        return ComputeStep(len(newest.rows), compute, partial(self._step_done, None), self._step_failed)

    def _next_slice(self) -> Slice[SamplerState] | None:
        running, tokens_max = len(self.table.batch.running), self.driver.settings.step_tokens_on(self.engine.on_gpu)
        if running:
            tokens_max = min(tokens_max, self.slices.tokens(running, self.core.tpot_targets()))
        elif len(self.table.attempts) > len(self.core.suffixes):
            tokens_max = min(tokens_max, IDLE_TOKENS)
        return self.core.next_slice(tokens_max, clock.now())

    def _compute_step(
        self, plan: StepPlan[SamplerState] | None, part: Slice[SamplerState] | None
    ) -> ComputeStep[DecodeStepResult]:
        matchers = part.suffix.matchers if part is not None else []
        compute = partial(run_step, self.engine, plan, part, matchers[0] if matchers else None)
        failed = partial(self._step_failed, part=part, with_streams=plan is not None)
        tokens = len(plan.rows if plan is not None else ()) + len(part.tokens if part is not None else ())
        return ComputeStep(tokens, compute, partial(self._step_done, part), failed)

    def _step_done(self, part: Slice[SamplerState] | None, result: DecodeStepResult) -> Callable[[], None]:
        drawn, tokens = result.drawn, len(part.tokens) if part is not None else 0
        self.slices.measured(len(drawn or ()), tokens, result.step_ms)
        applied = self.core.apply(drawn) if drawn is not None else None
        if part is not None:
            self.metrics.slice_done(tokens, len(result.first_tokens or ()))
            self._matchers = list(part.suffix.matchers)
            self.core.slice_computed(part, result.first_tokens, clock.now())
        if drawn is None or applied is None:
            return lambda: None

        def pass_on() -> None:
            self.core.pass_on(*applied, clock.now())
            self.metrics.step_done(result.step_ms, len(drawn), applied[0])

        return pass_on

    def _step_failed(self, error: str, part: Slice[SamplerState] | None = None, *, with_streams: bool = True) -> None:
        self.metrics.step_failed()
        if part is not None:
            self.core.suffixes.failed(part, error)
        if with_streams:
            self.core.step_failed(error)

    def _prepare_grammar(self, attempt: Attempt[SamplerState]) -> None:
        suffix = attempt.suffix
        assert suffix is not None
        order = suffix.order
        resumed = suffix.tokens[len(suffix.tokens) - order.resumed_tokens :] if order.resumed_tokens else ()

        def done(made: list[Matcher] | GrammarError) -> None:
            suffix.matchers = [] if isinstance(made, GrammarError) else made
            self.core.suffixes.grammar_ready(attempt, str(made) if isinstance(made, GrammarError) else "")
            self.driver.wake()

        self.grammars.prepare(order.sampling.grammar, resumed, order.choices, done)


class _Lending(SenderOwner):
    """The owner of the sender for the KV that prefill workers fetch."""

    def __init__(self, worker: DecodeRole) -> None:
        self._worker = worker

    def send(self, peer_incarnation: int, message: Message, blob: bytes) -> None:
        self._worker.send(peer_incarnation, of_fetch(message), blob)

    def sent(self, result: KvSent | KvFailed) -> None:
        self._worker.core.lending.sent(result)

    def pair_failed(self, error: Exception) -> None:
        self._worker.pair_failed(error)


def _kv_settings(settings: WorkerSettings, transports: tuple[str, ...], device: str) -> KvSettings:
    return KvSettings(
        transports=transports,
        encrypt=settings.encrypts_transfers,
        segment_bytes=segment_bytes_on(device),
        bytes_per_s=CPU_BYTES_PER_S if device == "cpu" else 0,
    )
