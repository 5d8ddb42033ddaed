"""Drives a prefill worker: orders in, steps to the engine thread, tokens to gateways, KV to decode workers."""

import asyncio

from engine.engine import Engine
from engine.kv.allocator import BlockAllocator
from engine.thread import EngineThread
from kvtransfer.memory.layout import KvLayout
from kvtransfer.sender import KvSender
from kvtransfer.session.limits import KvSettings, segment_bytes_on
from kvtransfer.session.session import KvFailed, KvSent
from kvtransfer.transports.registry import allowed_on
from prefill_worker.compute import run_step
from prefill_worker.core import PrefillCore
from prefill_worker.metrics import PrefillMetrics
from prefill_worker.prompts import PromptTable
from proto.errors import CrossdockError, RemoteProtocolError
from proto.held import Capacity
from proto.messages import Message, Role, StatusRequest
from proto.status import KvPair, KvPairs
from runtime.link.connection_pool import ConnectionPool
from runtime.link.server import LinkSettings
from runtime.link.server import Peer as LinkPeer
from runtime.metrics.common import link_counters
from runtime.metrics.server import MetricsServer
from runtime.process import clock
from runtime.process.driver import Stop
from runtime.process.log import Log
from runtime.settings.workers import WorkerSettings
from runtime.worker.process import end_if_gpu_is_lost, kv_held, work_until_stopped
from runtime.worker.registration import Registration, worker_hello
from runtime.worker.step_watch import StepWatch


class PrefillWorker:
    def __init__(
        self,
        settings: WorkerSettings,
        engine: Engine,
        thread: EngineThread,
        log: Log,
        name: str,
        links: LinkSettings,
        observed: MetricsServer,
    ) -> None:
        info = engine.info
        self.settings, self.log, self.engine, self.thread = settings, log, engine, thread
        log.info("loaded", kv_blocks=engine.blocks, batch_invariant=engine.is_batch_invariant)
        self.core = PrefillCore(
            self,
            PromptTable(BlockAllocator(engine.blocks), info.block_size, settings.prefix_cache),
            vocab_size=info.vocab_size,
            step_tokens_max=settings.step_tokens_max,
            tokens_forwarded=lambda: engine.tokens_forwarded,
        )
        self.work = asyncio.Event()
        """Set when there may be a step to run."""
        self.watch = StepWatch(settings.step_timeout_ms / 1000)
        self.pairs_reported_at = 0
        incarnation = clock.new_incarnation()
        capacity = Capacity(engine.blocks, info.block_size, settings.max_seqs, info.context_tokens)
        hello = worker_hello(
            settings,
            incarnation=incarnation,
            name=name,
            fingerprint=info.fingerprint,
            capacity=capacity,
            metrics=observed.address,
        )
        self.registration = Registration(
            settings=settings,
            hello=hello,
            held=self.core.table.held,
            on_message=self._order,
            on_lost=self.core.coordinator_lost,
            log=log,
            is_idle=lambda: self.gateways.idle,
            links=links,
        )
        self.gateways: ConnectionPool = ConnectionPool(
            hello=hello,
            to=Role.GATEWAY,
            on_message=_unexpected,
            on_lost=self.core.gateway_lost,
            on_idle=self.registration.look,
            settings=links,
        )
        self.receivers = ConnectionPool(
            hello=hello, to=Role.DECODE, on_message=self._kv_message, on_lost=self._receiver_lost, settings=links
        )
        self.sender = self._make_sender(incarnation)
        self.metrics = PrefillMetrics(
            self.core.table, self.core.steps, self.sender.counters, lambda: engine.tokens_forwarded
        )
        self._show(observed, name, settings.served_model_id)

    def _make_sender(self, incarnation: int) -> KvSender:
        info, pool, settings = self.engine.info, self.engine.pool, self.settings
        return KvSender(
            layout=KvLayout(info.layers, info.kv_heads, info.head_dim, info.block_size, info.dtype),
            pool=pool,
            incarnation=incarnation,
            clock=clock.now,
            send=self._send_kv,
            on_result=self._kv_result,
            on_pairs=lambda pairs: self._report_pairs(),
            on_pair_error=lambda error: end_if_gpu_is_lost(error, self.log),
            settings=_kv_settings(settings, pool.device.type),
        )

    def _show(self, observed: MetricsServer, name: str, model: str) -> None:
        registry = self.metrics.registry
        registry.introduce(name=name, model=model)
        link_counters(registry, {"coordinator": self.registration.counters}, lambda: self.registration.up)
        observed.show(registry, self.registration.not_ready)

    async def run(self, stop: Stop) -> None:
        try:
            await work_until_stopped(
                self._run_steps(),
                registration=self.registration,
                thread=self.thread,
                watch=self.watch,
                stop=stop,
                drain_timeout_s=self.settings.drain_timeout_s,
                close_transfers=self.sender.close,
                logger=self.log,
            )
        finally:
            await self.gateways.close()
            await self.receivers.close()

    def _order(self, _: LinkPeer, message: Message, blob: bytes) -> None:
        if self.pairs_reported_at != self.core.links_lost:
            self._report_pairs()  # a coordinator that has started anew does not know them
        if isinstance(message, StatusRequest):
            self.registration.send(kv_held(self.core.table.allocator, self.sender.sessions))
            return
        self.core.order(message, blob)
        self.work.set()

    async def _run_steps(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            begun = self.core.begin_step()
            if begun is None:
                self.work.clear()
                await self.work.wait()
                continue
            self.watch.begin(sum(chunk.length for _, chunk in begun.work), clock.now())
            try:
                result = await loop.run_in_executor(self.thread, run_step, self.engine, begun.work, self.sender.digest)
            except (CrossdockError, RuntimeError, ValueError, IndexError) as error:
                self.log.exception("step failed", step_id=begun.step.step_id)
                self.metrics.step_failed()
                self.core.step_failed(begun, str(error))
                end_if_gpu_is_lost(error, self.log)
                continue
            finally:
                self.watch.end(clock.now())
            self.core.step_done(begun, result)
            self.metrics.step_done(begun.work, result)

    def _report_pairs(self) -> None:
        pairs = self.sender.transports()
        self.registration.send(KvPairs(tuple(KvPair(p.peer_incarnation, p.transport, p.why[:512]) for p in pairs)))
        self.pairs_reported_at = self.core.links_lost

    # --- KV control -----------------------------------------------------------------------------------------------------

    def _send_kv(self, incarnation: int, message: Message, blob: bytes) -> None:
        receiver = self.core.receiver_of.get(incarnation)
        if receiver is not None:
            self.receivers.send(receiver, message, blob)

    def _kv_message(self, peer: LinkPeer, message: Message, blob: bytes) -> None:
        self.sender.handle(peer.incarnation, message, blob)

    def _kv_result(self, result: KvSent | KvFailed) -> None:
        self.metrics.kv_result(result)
        self.core.kv_result(result)

    def _receiver_lost(self, incarnation: int, reason: str) -> None:
        self.core.receiver_of.pop(incarnation, None)
        self.sender.peer_lost(incarnation, reason)


def _kv_settings(settings: WorkerSettings, device: str) -> KvSettings:
    return KvSettings(
        transports=allowed_on(settings.kv_transport, device, settings.transfer_encryption == "on"),
        encrypt=settings.encrypts_transfers,
        segment_bytes=segment_bytes_on(device),
        ack_timeout_ms=settings.kv_timeout_ms,
        rendezvous_timeout_ms=settings.kv_timeout_ms,
    )


def _unexpected(_: LinkPeer, message: Message, __: bytes) -> None:
    raise RemoteProtocolError(f"a gateway sent {type(message).__name__}")
