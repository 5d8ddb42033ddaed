"""Drives a decode worker: reservations and KV in, steps to the engine thread, tokens to gateways."""

import asyncio
import contextlib

from decode_worker.batch import Batch, Running, StepPlan
from decode_worker.compute import StepResult, run_step
from decode_worker.leases import QUARANTINE_WARN_S, leases
from decode_worker.progress import ProgressReport
from decode_worker.requests import Attempt, AttemptTable, Farewell, Phase, failed
from engine.blocks import BlockAllocator
from engine.engine import Engine
from engine.sampler import SamplerState
from engine.thread import EngineThread
from kvtransfer.layout import KvLayout
from kvtransfer.memory import SharedMemory
from kvtransfer.receiver import KvReceiver
from kvtransfer.session import Accepted
from kvtransfer.settings import KvSettings, allowed_transports
from proto.compatible import mismatch
from proto.errors import CrossdockError, Interrupt, RemoteProtocolError
from proto.kv import Commit, Offer
from proto.messages import Capacity, Hello, Message, Release, Released, Reserve, Role, Tokens
from runtime import clock
from runtime.addresses import advertised
from runtime.driver import watched
from runtime.link import LinkServer, LinkSettings
from runtime.link import Peer as LinkPeer
from runtime.log import Log
from runtime.outbound import Outbound
from runtime.registration import Registration, worker_hello
from runtime.settings import WorkerSettings


class DecodeWorker:
    def __init__(
        self,
        settings: WorkerSettings,
        engine: Engine,
        thread: EngineThread,
        log: Log,
        name: str,
        memory: SharedMemory | None = None,
    ) -> None:
        """`memory` is what the KV pool lies in, if other processes may map it."""
        info = engine.info
        self.settings = settings
        self.log = log
        self.engine = engine
        self.thread = thread
        self.batch: Batch[SamplerState] = Batch()
        self.table = AttemptTable(
            BlockAllocator(engine.blocks),
            info.block_size,
            self.batch,
            lambda: engine.tokens_forwarded,
            settings.prefix_cache,
        )
        self.progress = ProgressReport(self.table)
        self.work = asyncio.Event()
        """Set when there may be something to run."""
        self.name = name
        self.epoch = clock.new_epoch()
        self.links = LinkSettings(heartbeat_ms=settings.heartbeat_ms)
        hello = self._hello("")
        self.gateways = Outbound(hello=hello, on_message=_unexpected, on_lost=self._gateway_lost, settings=self.links)
        self.server = LinkServer(
            bind=settings.kv_bind,
            hello=hello,
            accept=self._refusal,
            on_up=self._sender_up,
            on_message=self._kv_message,
            on_down=self._sender_down,
            settings=self.links,
        )
        self.senders: dict[int, LinkPeer] = {}
        self.receiver = KvReceiver(
            layout=KvLayout(info.layers, info.kv_heads, info.head_dim, info.block_size, info.dtype),
            pool=engine.pool,
            epoch=self.epoch,
            clock=clock.now,
            send=self._send_kv,
            listen_host=settings.transfer_host,
            accept=self._offered,
            on_committed=self._committed,
            on_failed=self._not_received,
            on_quarantined=self._in_doubt,
            settings=KvSettings(
                transports=allowed_transports(settings.kv_transport), rendezvous_timeout_ms=settings.kv_timeout_ms
            ),
            memory=memory,
        )
        self.undecided: dict[tuple[str, int], tuple[int, Offer]] = {}
        """Offers, and whose, that came before their reservations, each on a link of its own."""
        self.registration: Registration | None = None

    def _hello(self, address: str) -> Hello:
        info = self.engine.info
        return worker_hello(
            self.settings,
            epoch=self.epoch,
            name=self.name,
            fingerprint=info.fingerprint,
            capacity=Capacity(self.engine.blocks, info.block_size, self.settings.max_seqs, info.context_tokens),
            address=address,
        )

    async def run(self, stop: asyncio.Event) -> None:
        bound = await self.server.start()
        self.registration = Registration(
            settings=self.settings,
            hello=self._hello(advertised(self.settings.advertise, bound)),
            held=self.table.held,
            on_message=self._order,
            on_lost=self._coordinator_lost,
            log=self.log,
        )
        await self.registration.start()
        loop = asyncio.get_running_loop()
        stepping, stopping = watched(self._run_steps()), loop.create_task(stop.wait())
        try:
            await asyncio.wait({stepping, stopping}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
            stepping.cancel()
            await asyncio.wait({stepping}, timeout=5)
            await self.registration.close()
            with contextlib.suppress(
                TimeoutError
            ):  # a transfer thread is stuck with a dead peer; the process ends anyway
                await self.receiver.close()
            await self.server.close()
            await self.gateways.close()
        if stepping.done() and not stepping.cancelled():
            stepping.result()

    # --- orders ---------------------------------------------------------------------------------------------------------

    def _order(self, _: LinkPeer, message: Message, __: bytes) -> None:
        match message:
            case Reserve():
                self._reserve(message)
            case Release():
                self._release(message)
            case _:
                raise RemoteProtocolError(f"unexpected {type(message).__name__}")

    def _reserve(self, order: Reserve) -> None:
        self.table.reserve(order)
        self.gateways.connect(order.gateway)
        waiting = self.undecided.pop((order.request_id, order.attempt), None)
        if waiting is not None:
            answer = self.table.target_blocks((order.request_id, order.attempt), waiting[0], waiting[1].blocks)
            assert answer is not None
            self.receiver.decide(order.request_id, order.attempt, answer)

    def _release(self, message: Release) -> None:
        attempt = self.table.attempts.get((message.request_id, message.attempt))
        released = Released(message.request_id, message.attempt)
        if attempt is None:
            self._say([released])
        else:
            self._close(attempt, released, "released")

    def _coordinator_lost(self, _: str) -> None:
        self.table.allocator.report_all()
        for attempt in self.table.coordinator_lost():
            self._close(attempt, Released(*attempt.key), "coordinator lost")

    def _gateway_lost(self, epoch: int, reason: str) -> None:
        for attempt in self.table.of_gateway(epoch):
            self._close(attempt, failed(attempt, Interrupt.GATEWAY_LINK_LOST, reason), reason)

    def _close(self, attempt: Attempt[SamplerState], farewell: Farewell, why: str) -> None:
        self._say(self.table.close(attempt, farewell))
        if attempt.phase is Phase.RECEIVING:
            self.receiver.abort(*attempt.key, why)

    def _say(self, farewells: list[Farewell]) -> None:
        assert self.registration is not None
        for farewell in farewells:
            self.registration.send(farewell)

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

    def _sender_up(self, peer: LinkPeer) -> None:
        self.senders[peer.epoch] = peer

    def _sender_down(self, peer: LinkPeer, reason: str) -> None:
        if self.senders.get(peer.epoch) is peer:
            del self.senders[peer.epoch]
            self.receiver.peer_lost(peer.epoch, reason)

    def _send_kv(self, epoch: int, message: Message, blob: bytes) -> None:
        peer = self.senders.get(epoch)
        if peer is not None:
            peer.send(message, blob)

    def _kv_message(self, peer: LinkPeer, message: Message, blob: bytes) -> None:
        self.receiver.handle(peer.epoch, message, blob)

    def _offered(self, epoch: int, offer: Offer) -> Accepted | str | None:
        """Asked for a session that exists; one that ends before it is decided is taken out again by `_not_received`."""
        answer = self.table.target_blocks((offer.request_id, offer.attempt), epoch, offer.blocks)
        if answer is None:
            self.undecided[(offer.request_id, offer.attempt)] = (epoch, offer)
        return answer

    def _committed(self, _: int, commit: Commit, blocks: list[int], prompt_tokens: list[int]) -> None:
        attempt = self.table.attempts.get((commit.request_id, commit.attempt))
        if attempt is None or attempt.farewell is not None:
            farewell = Released(commit.request_id, commit.attempt)
            self._say(self.table.received_nothing((commit.request_id, commit.attempt), blocks, farewell))
            return
        order = attempt.order
        fault = self._fault(order, commit, prompt_tokens)
        if fault:
            broken = failed(attempt, Interrupt.TRANSFER_FAILED, fault)
            self._say(self.table.received_nothing(attempt.key, blocks, broken))
            return
        split = len(prompt_tokens) - order.resumed_tokens if prompt_tokens else 0
        tables = self.table.fork(attempt, blocks, len(commit.first_tokens))
        sequences = []
        for first, table in zip(commit.first_tokens, tables, strict=True):
            state = SamplerState(
                order.sampling, first.choice, self.engine.info.vocab_size, prompt_tokens[:split], prompt_tokens[split:],
                start_index=order.resumed_tokens,
            )  # fmt: skip
            state.accept(first.token)
            sequences.append(
                Running(
                    attempt.key,
                    first.choice,
                    order.gateway,
                    order.sampling,
                    table,
                    state,
                    first.token,
                    order.resumed_tokens + 1,
                )
            )
        self.table.start(attempt, sequences)
        assert self.registration is not None
        self.registration.report_cache(self.table.allocator.take_changes)
        self.work.set()

    def _fault(self, order: Reserve, commit: Commit, prompt_tokens: list[int]) -> str:
        """What of a commit does not fit its reservation; empty if all does."""
        choices = [first.choice for first in commit.first_tokens]
        if len(set(choices)) < len(choices) or not set(choices) <= set(
            range(order.first_choice, order.first_choice + order.choices)
        ):
            return f"choices {choices} committed"
        if prompt_tokens and len(prompt_tokens) != order.prompt_tokens:
            return f"{len(prompt_tokens)} prompt tokens committed, {order.prompt_tokens} reserved"
        if max([*prompt_tokens, *(first.token for first in commit.first_tokens)]) >= self.engine.info.vocab_size:
            return "a token id outside the vocabulary"
        return ""

    def _not_received(self, request_id: str, attempt: int, blocks: list[int], reason: str) -> None:
        self.undecided.pop((request_id, attempt), None)
        self.log.debug("KV not received", request_id=request_id, attempt=attempt, reason=reason)
        # Whether the attempt failed is the prefill worker's to say, whose session ends with ours: it may have ended well,
        # with its first token.
        farewell = Released(request_id, attempt)
        self._say(self.table.received_nothing((request_id, attempt), blocks, farewell))

    def _in_doubt(self, request_id: str, attempt: int, blocks: list[int]) -> None:
        self.table.quarantine((request_id, attempt), blocks)
        asyncio.get_running_loop().call_later(QUARANTINE_WARN_S, self._still_in_doubt, (request_id, attempt))

    def _still_in_doubt(self, key: tuple[str, int]) -> None:
        blocks = self.table.quarantined.get(key)
        if blocks is None:
            return
        epochs = [
            lease.peer_epoch
            for lease in leases(self.table, self.receiver.receiving())
            if (lease.request_id, lease.attempt) == key
        ]
        self.log.warning(
            f"{len(blocks)} KV blocks cannot be used: their sender stopped amid a transfer and may still write to them;"
            " ending that prefill worker frees them",
            request_id=key[0],
            attempt=key[1],
            peer_epochs=epochs,
            blocks_in_quarantine=self.table.allocator.quarantined_count,
        )
        asyncio.get_running_loop().call_later(QUARANTINE_WARN_S, self._still_in_doubt, key)

    # --- steps ----------------------------------------------------------------------------------------------------------

    async def _run_steps(self) -> None:
        """One step after the other while anything runs. The next step starts before the last one's tokens are sent."""
        loop = asyncio.get_running_loop()
        while True:
            plan = self.batch.plan(self._stuck)
            if plan is None:
                self.work.clear()
                await self.work.wait()
                continue
            step: asyncio.Future[StepResult] | None = loop.run_in_executor(self.thread, run_step, self.engine, plan)
            while step is not None:
                step = await self._finish_step(step)

    async def _finish_step(self, step: "asyncio.Future[StepResult]") -> "asyncio.Future[StepResult] | None":
        try:
            result = await step
        except (CrossdockError, RuntimeError, ValueError, IndexError) as error:
            self.log.exception("step failed")
            self._step_failed(str(error))
            return None
        outcome = self.batch.apply(result.drawn)
        for broken in outcome.broken:
            self.table.allocator.forget(broken.blocks.table)
            self._mark_failed(broken, "the model's logits are not finite")
        # Freed before the next plan, said after: blocks that ended are there for those that go on.
        farewells = self.table.ended(outcome.ended)
        plan: StepPlan[SamplerState] | None = self.batch.plan(self._stuck)
        following = None
        if plan is not None:
            following = asyncio.get_running_loop().run_in_executor(self.thread, run_step, self.engine, plan)
        for gateway, items in outcome.by_gateway.values():
            self.gateways.send(gateway, Tokens(tuple(items)))
        self._say(farewells)
        self._report()
        return following

    def _step_failed(self, error: str) -> None:
        ended = self.batch.abandon()
        for sequence in ended:
            self._mark_failed(sequence, f"the model failed: {error[:300]}")
        self._say(self.table.ended(ended))

    def _report(self) -> None:
        assert self.registration is not None
        progress = self.progress.due(clock.now())
        # A coordinator that comes back is told by the Hello what is held here, and counts that whole.
        if progress is not None and self.registration.up:
            self.registration.send(progress)

    def _stuck(self, sequences: list[Running[SamplerState]]) -> None:
        attempt = self.table.attempts.get(sequences[0].key)
        if attempt is not None and attempt.farewell is None:
            attempt.farewell = failed(attempt, Interrupt.PREEMPTED, "no free KV block")
        self._say(self.table.ended(sequences))

    def _mark_failed(self, sequence: Running[SamplerState], why: str) -> None:
        """The attempt fails with this sequence; its other choices, if any, are taken out too."""
        attempt = self.table.attempts.get(sequence.key)
        if attempt is not None:
            self._say(self.table.close(attempt, failed(attempt, Interrupt.ENGINE_ERROR, why)))


def _unexpected(_: LinkPeer, message: Message, __: bytes) -> None:
    raise RemoteProtocolError(f"a gateway sent {type(message).__name__}")
