"""The role-specific part of a prefill worker: orders to its core, steps of prompt chunks, KV to decode workers."""

import asyncio
from collections.abc import Callable, Container, Mapping
from dataclasses import replace
from functools import partial
from typing import Final

from engine.engine import Engine
from engine.kv.allocator import BlockAllocator
from kvtransfer.memory.layout import KvLayout
from kvtransfer.memory.pool import rows_of
from kvtransfer.ports import ReceiverOwner, SenderOwner
from kvtransfer.receiver import KvReceiver
from kvtransfer.sender import KvSender
from kvtransfer.session.limits import FETCH_IDLE_MS, KvSettings, segment_bytes_on
from kvtransfer.session.session import KvFailed, KvSent, OfferAccepted
from kvtransfer.transports.transport import PoolMemory
from prefill_worker.compute import draw_late, run_step
from prefill_worker.core import Begun, PrefillCore, PrefillStepResult
from prefill_worker.metrics import PrefillMetrics
from prefill_worker.prompts import PrefillRequest, PromptTable
from prefill_worker.tier_copies import TierCopies
from proto.errors import RemoteProtocolError
from proto.kv import Commit, Fetch, FetchRefused, Offer, is_of_fetch, of_fetch
from proto.messages import Destination, Message, Role
from proto.status import KvHeld, KvPair, KvPairs
from runtime.grammar.compiler import GrammarError, Matcher
from runtime.link.connection_pool import ConnectionPool
from runtime.link.peer import LinkCounters, Peer
from runtime.process import clock
from runtime.process.rate_limited_log import RateLimitedLog
from worker.driver import ComputeStep, WorkerDriver
from worker.gpu_faults import end_if_gpu_is_lost
from worker.grammars import GrammarThread

CACHE_REPORTS_MAX = 16
OFFER_S: Final = 3.0  # in which KV that is to be fetched must be offered


class PrefillRole(SenderOwner):
    """A `WorkerRole`, and the owner of the sender of its prompts' KV."""

    ports: Mapping[str, LinkCounters] = {}

    def __init__(
        self,
        engine: Engine,
        blocks: BlockAllocator,
        driver: WorkerDriver,
        transports: tuple[str, ...],
        own_receivers: Container[int],
        memory: PoolMemory | None,
    ) -> None:
        """`blocks` are those of the engine's pool for this role, all free or cached; `transports` are those that KV may be sent
        by; `own_receivers` are the incarnations of the decode workers in this process; `memory` is what the KV pool lies in, if
        other processes may map it."""
        settings, info = driver.settings, engine.info
        self.engine, self.driver = engine, driver
        self.registration, self.gateways = driver.registration, driver.gateways
        self.table = PromptTable(blocks, info.block_size, settings.prefix_cache)
        self.core = PrefillCore(
            self,
            self.table,
            vocab_size=info.vocab_size,
            step_tokens_max=settings.step_tokens_max,
            tokens_forwarded=lambda: engine.tokens_forwarded,
            prepare_grammar=self._prepare_grammar,
        )
        self.grammars = GrammarThread(info.model_path, info.vocab_size, info.eos_token_ids)
        self.coordinator_lost, self.gateway_lost = self.core.coordinator_lost, self.core.gateway_lost
        self.held = self.table.held
        self.receivers = ConnectionPool(
            hello=driver.hello,
            to=Role.DECODE,
            on_message=self._kv_message,
            on_lost=self._receiver_lost,
            settings=driver.links,
        )
        layout = KvLayout(info.layers, info.kv_heads, info.head_dim, info.block_size, info.dtype)
        kv = KvSettings(
            transports=transports,
            encrypt=settings.encrypts_transfers,
            segment_bytes=segment_bytes_on(engine.pool.device.type),
            # In a mixed worker, its other role writes to blocks too, and what it has cached is sent from here.
            remembers_digests=not driver.hello.process,
        )
        self.sender = self._make_sender(layout, own_receivers, kv)
        self.receiver = self._make_receiver(layout, memory, replace(kv, idle_timeout_ms=FETCH_IDLE_MS))
        self.metrics = PrefillMetrics(
            self.table, self.core.steps, self.sender.counters, lambda: engine.tokens_forwarded, self.core.tier_counts
        )
        self.registry = self.metrics.registry
        self.tier: TierCopies | None = None
        if settings.kv_tier_gib and settings.prefix_cache:
            warn = RateLimitedLog(driver.log.warning)
            rows = rows_of(engine.pools, layout)
            self.tier = TierCopies(settings, rows, warn, self.sender.received, driver.wake)
            self.tier.tier = self.core.use_tier(self.tier, self.tier.slots)

    def _make_sender(self, layout: KvLayout, own_peers: Container[int], settings: KvSettings) -> KvSender:
        return KvSender(
            layout=layout,
            pool=self.engine.pools,
            incarnation=self.driver.hello.incarnation,
            clock=clock.now,
            owner=self,
            own_peers=own_peers,
            settings=settings,
        )

    def _make_receiver(self, layout: KvLayout, memory: PoolMemory | None, settings: KvSettings) -> KvReceiver:
        return KvReceiver(
            layout=layout,
            pool=self.engine.pools,
            incarnation=self.driver.hello.incarnation,
            clock=clock.now,
            listen_host=self.driver.settings.transfer_host,
            owner=_Fetching(self),
            settings=settings,
            memory=memory,
        )

    async def start(self) -> str:
        return ""

    async def close_transfers(self) -> None:
        await self.receiver.close()
        await self.sender.close()
        if self.tier is not None:
            await self.tier.close()

    async def close(self) -> None:
        self.grammars.close()
        self.table.allocator.close()
        await self.receivers.close()

    def registered(self) -> None:
        # After a role change this worker may hold the KV of streams that are being resumed, so all of it is reported at once.
        for _ in range(CACHE_REPORTS_MAX if self.driver.hello.flipped_from and not self.core.links_lost else 1):
            self.registration.report_cache(self.core.take_changes)
        if self.core.links_lost:
            self.pairs_changed()  # a coordinator that has started anew does not know them

    def kv_held(self) -> KvHeld:
        sessions = self.sender.sessions + self.receiver.sessions
        return KvHeld(self.table.allocator.held_count, self.table.allocator.quarantined_count, sessions)

    def order(self, message: Message, blob: bytes) -> None:
        self.core.order(message, blob)
        self.driver.wake()

    def gateway_said(self, incarnation: int, message: Message) -> None:
        raise RemoteProtocolError(f"a gateway sent {type(message).__name__}")

    # --- steps ----------------------------------------------------------------------------------------------------------

    def next_step(self) -> ComputeStep[PrefillStepResult] | None:
        if late := self.core.begin_draw():
            return ComputeStep(
                tokens=len(late),
                compute=partial(draw_late, late),
                done=partial(self._drawn, late),
                failed=partial(self.core.draw_failed, late),
            )
        begun = self.core.begin_step()
        if begun is None:
            return None
        return ComputeStep(
            tokens=sum(chunk.length for _, chunk in begun.work),
            compute=partial(run_step, self.engine, begun.work, self.sender.digest),
            done=partial(self._step_done, begun),
            failed=partial(self._step_failed, begun),
            log_fields={"step_id": begun.step.step_id},
        )

    def _step_done(self, begun: Begun, result: PrefillStepResult) -> Callable[[], None]:
        self.core.step_done(begun, result)
        return partial(self.metrics.step_done, begun.work, result)

    def _drawn(self, prompts: list[PrefillRequest], result: PrefillStepResult) -> Callable[[], None]:
        return partial(self.core.drawn, prompts, result)

    def _prepare_grammar(self, prompt: PrefillRequest) -> None:
        """Prepare one matcher for the prompt: all choices draw their first token from the same mask, and decode then feeds
        each choice's token to its own matcher."""
        output = (
            prompt.tokens[len(prompt.tokens) - prompt.order.resumed_tokens :] if prompt.order.resumed_tokens else ()
        )

        def done(made: list[Matcher] | GrammarError) -> None:
            if isinstance(made, GrammarError):
                self.core.grammar_ready(prompt, None, str(made))
            else:
                self.core.grammar_ready(prompt, made[0])
            self.driver.wake()

        self.grammars.prepare(prompt.order.sampling.grammar, output, 1, done)

    def _step_failed(self, begun: Begun, error: str) -> None:
        self.metrics.step_failed()
        self.core.step_failed(begun, error)

    # --- KV out ---------------------------------------------------------------------------------------------------------

    def pairs_changed(self) -> None:
        pairs = self.sender.transports()
        self.registration.send(KvPairs(tuple(KvPair(p.peer_incarnation, p.transport, p.why[:512]) for p in pairs)))

    def send(self, peer_incarnation: int, message: Message, blob: bytes) -> None:
        receiver = self.core.receiver_of.get(peer_incarnation)
        if receiver is not None:
            self.receivers.send(receiver, message, blob)

    def _kv_message(self, peer: Peer, message: Message, blob: bytes) -> None:
        if isinstance(message, FetchRefused):
            self.core.fetches.refused(peer.incarnation, message)
            self.driver.wake()
        elif is_of_fetch(message, from_prefill=False):
            self.receiver.handle(peer.incarnation, message, blob)
        else:
            self.sender.handle(peer.incarnation, message, blob)

    def sent(self, result: KvSent | KvFailed) -> None:
        self.metrics.kv_result(result)
        self.core.kv_result(result)

    def pair_failed(self, error: Exception) -> None:
        end_if_gpu_is_lost(error, self.driver.log)

    def _receiver_lost(self, incarnation: int, reason: str) -> None:
        self.core.receiver_of.pop(incarnation, None)
        self.core.fetches.peer_lost(incarnation)
        self.receiver.peer_lost(incarnation, reason)
        self.sender.peer_lost(incarnation, reason)
        self.driver.wake()

    # --- KV in: what is fetched -----------------------------------------------------------------------------------------

    def now(self) -> float:
        return clock.now()

    def fetch(self, decode: Destination, message: Fetch) -> None:
        self.receivers.send(decode, message)
        asyncio.get_running_loop().call_later(OFFER_S, self._expire, (message.request_id, message.attempt))

    def _expire(self, key: tuple[str, int]) -> None:
        self.core.fetches.expire(key)
        self.driver.wake()


class _Fetching(ReceiverOwner):
    """The owner of the receiver for fetched KV."""

    def __init__(self, worker: PrefillRole) -> None:
        self._worker = worker

    def send(self, peer_incarnation: int, message: Message, blob: bytes) -> None:
        self._worker.send(peer_incarnation, of_fetch(message), blob)

    def pair_failed(self, error: Exception) -> None:
        self._worker.pair_failed(error)

    def offered(self, peer_incarnation: int, offer: Offer) -> OfferAccepted | str | None:
        return self._worker.core.fetches.offered(peer_incarnation, offer)

    def committed(self, peer_incarnation: int, commit: Commit, block_ids: list[int], prompt_tokens: list[int]) -> None:
        worker = self._worker
        worker.sender.received(block_ids)
        worker.core.fetches.committed(commit, block_ids)
        worker.registration.report_cache(worker.core.take_changes)
        worker.driver.wake()

    def not_received(self, request_id: str, attempt: int, block_ids: list[int], reason: str) -> None:
        self._worker.driver.log.debug("KV not fetched", request_id=request_id, attempt=attempt, reason=reason)
        self._worker.core.fetches.not_received(request_id, attempt, reason)
        self._worker.driver.wake()
