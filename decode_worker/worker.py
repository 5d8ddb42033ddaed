"""Drives a decode worker: reservations and KV in, steps to the engine thread, tokens to gateways."""

import asyncio

from decode_worker.batch import Batch
from decode_worker.compute import StepResult, run_step
from decode_worker.core import DecodeCore
from decode_worker.leases import QUARANTINE_WARN_S, leases
from decode_worker.metrics import DecodeMetrics
from decode_worker.requests import AttemptTable
from decode_worker.senders import Senders
from engine.engine import Engine
from engine.kv.allocator import BlockAllocator
from engine.sampling.sampler import SamplerState
from engine.thread import EngineThread
from kvtransfer.memory.layout import KvLayout
from kvtransfer.receiver import KvReceiver
from kvtransfer.session.limits import DIGEST_EVERY, KvSettings, segment_bytes_on
from kvtransfer.transports.registry import allowed_on
from kvtransfer.transports.transport import PoolMemory
from proto.compatible import mismatch
from proto.errors import CrossdockError, RemoteProtocolError
from proto.held import Capacity
from proto.kv import Commit, FirstToken
from proto.messages import Hello, Message, Reserve, Role, StatusRequest
from runtime.link.connection_pool import ConnectionPool
from runtime.link.server import LinkServer, LinkSettings
from runtime.link.server import Peer as LinkPeer
from runtime.metrics.common import link_counters
from runtime.metrics.server import MetricsServer
from runtime.process import clock
from runtime.process.driver import Stop
from runtime.process.log import Log
from runtime.process.rate_limited_log import RateLimitedLog
from runtime.settings.addresses import advertised
from runtime.settings.workers import WorkerSettings
from runtime.worker.process import end_if_gpu_is_lost, kv_held, work_until_stopped
from runtime.worker.registration import Registration, worker_hello
from runtime.worker.step_watch import StepWatch


class DecodeWorker:
    def __init__(
        self,
        settings: WorkerSettings,
        engine: Engine,
        thread: EngineThread,
        log: Log,
        name: str,
        links: LinkSettings,
        memory: PoolMemory | None,
        observed: MetricsServer,
    ) -> None:
        """`memory` is what the KV pool lies in, if other processes may map it."""
        info = engine.info
        self.settings = settings
        self.log = log
        log.info("loaded", kv_blocks=engine.blocks, batch_invariant=engine.is_batch_invariant)
        self.engine = engine
        self.thread = thread
        batch: Batch[SamplerState] = Batch()
        blocks, forwarded = BlockAllocator(engine.blocks), lambda: engine.tokens_forwarded
        table = AttemptTable(blocks, info.block_size, batch, forwarded, settings.prefix_cache)
        self.core = DecodeCore(self, table, vocab_size=info.vocab_size, make_state=self._sampler_state)
        self.work = asyncio.Event()
        """Set when there may be something to run."""
        self.watch = StepWatch(settings.step_timeout_ms / 1000)
        self.name = name
        self.observed = observed
        self.incarnation = clock.new_incarnation()
        self.links = links
        hello = self._hello("")
        self.gateways = ConnectionPool(
            hello=hello,
            to=Role.GATEWAY,
            on_message=_unexpected,
            on_lost=self.core.gateway_lost,
            on_idle=lambda: self.registration.look(),
            settings=links,
        )
        self.server = LinkServer(
            bind=settings.kv_bind,
            hello=hello,
            accept=self._refusal,
            on_up=lambda peer: None,
            on_message=self._kv_message,
            on_down=self._sender_down,
            settings=links,
        )
        self.senders: Senders[LinkPeer] = Senders()
        self.strangers_log = RateLimitedLog(self.log.warning)
        self.receiver = self._make_receiver(memory)
        self.metrics = DecodeMetrics(table, self.receiver.counters)
        self.metrics.registry.introduce(name=name, model=settings.served_model_id)
        self.registration: Registration
        """Made by `run`, when the KV port's address is known."""

    def _make_receiver(self, memory: PoolMemory | None) -> KvReceiver:
        info, pool, settings = self.engine.info, self.engine.pool, self.settings
        return KvReceiver(
            layout=KvLayout(info.layers, info.kv_heads, info.head_dim, info.block_size, info.dtype),
            pool=pool,
            incarnation=self.incarnation,
            clock=clock.now,
            send=self._send_kv,
            listen_host=settings.transfer_host,
            accept=self.core.offered,
            on_committed=self._committed,
            on_failed=self._not_received,
            on_quarantined=self._in_doubt,
            settings=_kv_settings(settings, pool.device.type),
            memory=memory,
            is_busy=lambda: bool(self.core.batch.running),
            on_stranger=self._stranger,
            on_pair_error=lambda error: end_if_gpu_is_lost(error, self.log),
        )

    def _stranger(self, reason: str) -> None:
        """In another thread."""
        self.strangers_log("a connection to the KV port was turned away", reason=reason)

    def _hello(self, address: str) -> Hello:
        info = self.engine.info
        return worker_hello(
            self.settings,
            incarnation=self.incarnation,
            name=self.name,
            fingerprint=info.fingerprint,
            capacity=Capacity(self.engine.blocks, info.block_size, self.settings.max_seqs, info.context_tokens),
            address=address,
            metrics=self.observed.address,
        )

    async def run(self, stop: Stop) -> None:
        bound = await self.server.start()
        self.registration = Registration(
            settings=self.settings,
            hello=self._hello(advertised(self.settings.advertise, bound)),
            held=self.core.table.held,
            on_message=self._order,
            on_lost=self._coordinator_lost,
            log=self.log,
            is_idle=lambda: self.gateways.idle,
            links=self.links,
        )
        ends = {"kv": self.server.counters, "coordinator": self.registration.counters}
        link_counters(self.metrics.registry, ends, lambda: self.registration.up)
        self.observed.show(self.metrics.registry, self.registration.not_ready)
        try:
            await work_until_stopped(
                self._run_steps(),
                registration=self.registration,
                thread=self.thread,
                watch=self.watch,
                stop=stop,
                drain_timeout_s=self.settings.drain_timeout_s,
                close_transfers=self.receiver.close,
                logger=self.log,
            )
        finally:
            await self.server.close()
            await self.gateways.close()

    def _order(self, _: LinkPeer, message: Message, __: bytes) -> None:
        if isinstance(message, StatusRequest):
            self.registration.send(kv_held(self.core.table.allocator, self.receiver.sessions))
        else:
            self.core.order(message)

    def _coordinator_lost(self, _: str) -> None:
        now, loop = clock.now(), asyncio.get_running_loop()
        self.core.coordinator_lost(now)
        # A transfer that stood still for so long would be given up too.
        loop.call_later(self.settings.kv_timeout_ms / 1000, self.core.expire, now)

    # --- KV in ----------------------------------------------------------------------------------------------------------

    def _refusal(self, hello: Hello) -> str | None:
        if hello.role is not Role.PREFILL:
            return f"this is a KV port; a {hello.role} has no business here"
        if hello.capacity is None:
            return "a prefill worker must state its capacity"
        info = self.engine.info
        return (
            mismatch(
                self.name, info.fingerprint, info.block_size, hello.name, hello.fingerprint, hello.capacity.block_size
            )
            or None
        )

    def _sender_down(self, peer: LinkPeer, reason: str) -> None:
        if self.senders.lost(peer.incarnation, peer):
            self.receiver.peer_lost(peer.incarnation, reason)

    def _send_kv(self, incarnation: int, message: Message, blob: bytes) -> None:
        peer = self.senders.link(incarnation)
        if peer is not None:
            peer.send(message, blob)

    def _kv_message(self, peer: LinkPeer, message: Message, blob: bytes) -> None:
        self.senders.heard(peer.incarnation, peer)
        self.receiver.handle(peer.incarnation, message, blob)

    def _committed(self, incarnation: int, commit: Commit, blocks: list[int], prompt_tokens: list[int]) -> None:
        self.core.committed(incarnation, commit, blocks, prompt_tokens)
        self.work.set()

    def _not_received(self, request_id: str, attempt: int, blocks: list[int], reason: str) -> None:
        self.log.debug("KV not received", request_id=request_id, attempt=attempt, reason=reason)
        self.core.not_received(request_id, attempt, blocks)

    def _sampler_state(self, order: Reserve, first: FirstToken, prompt_tokens: list[int]) -> SamplerState:
        split = len(prompt_tokens) - order.resumed_tokens if prompt_tokens else 0
        state = SamplerState(
            order.sampling, first.choice, self.engine.info.vocab_size, prompt_tokens[:split], prompt_tokens[split:],
            start_index=order.resumed_tokens,
        )  # fmt: skip
        state.accept(first.token)
        return state

    def _in_doubt(self, request_id: str, attempt: int, blocks: list[int]) -> None:
        self.core.not_yet_free(request_id, attempt, blocks)
        asyncio.get_running_loop().call_later(QUARANTINE_WARN_S, self._still_in_doubt, (request_id, attempt))

    def _still_in_doubt(self, key: tuple[str, int]) -> None:
        blocks = self.core.table.quarantined.get(key)
        if blocks is None:
            return
        incarnations = [
            lease.peer_incarnation
            for lease in leases(self.core.table, self.receiver.receiving())
            if (lease.request_id, lease.attempt) == key
        ]
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

    async def _run_steps(self) -> None:
        """One step after the other while anything runs. The next step starts before the last one's tokens are sent."""
        while True:
            step = self._start_step()
            if step is None:
                self.work.clear()
                await self.work.wait()
            while step is not None:
                step = await self._finish_step(step)

    def _start_step(self) -> "asyncio.Future[StepResult] | None":
        plan = self.core.plan()
        if plan is None:
            return None
        self.watch.begin(len(plan.rows), clock.now())
        return asyncio.get_running_loop().run_in_executor(self.thread, run_step, self.engine, plan)

    async def _finish_step(self, step: "asyncio.Future[StepResult]") -> "asyncio.Future[StepResult] | None":
        try:
            result = await step
        except (CrossdockError, RuntimeError, ValueError, IndexError) as error:
            self.log.exception("step failed")
            self.metrics.step_failed()
            self.core.step_failed(str(error))
            end_if_gpu_is_lost(error, self.log)
            return None
        finally:
            self.watch.end(clock.now())
        outcome, final_reports = self.core.apply(result.drawn)
        following = self._start_step()
        self.core.pass_on(outcome, final_reports, clock.now())
        self.metrics.step_done(result.step_ms, len(result.drawn), outcome)
        return following


def _kv_settings(settings: WorkerSettings, device: str) -> KvSettings:
    return KvSettings(
        transports=allowed_on(settings.kv_transport, device, settings.transfer_encryption == "on"),
        encrypt=settings.encrypts_transfers,
        rendezvous_timeout_ms=settings.kv_timeout_ms,
        segment_bytes=segment_bytes_on(device),
        digest_every=DIGEST_EVERY[settings.kv_digest],
        bytes_per_s=settings.kv_mib_per_s << 20 if device == "cpu" else 0,
    )


def _unexpected(_: LinkPeer, message: Message, __: bytes) -> None:
    raise RemoteProtocolError(f"a gateway sent {type(message).__name__}")
