"""Drives a prefill worker: orders in, steps to the engine thread, tokens to gateways, KV to decode workers."""

import asyncio
import contextlib

from engine.blocks import BlockAllocator
from engine.engine import Engine
from engine.thread import EngineThread
from kvtransfer.layout import KvLayout
from kvtransfer.sender import KvSender
from kvtransfer.session import KvFailed, KvSent
from kvtransfer.settings import KvSettings, allowed_transports
from prefill_worker.compute import StepResult, run_step
from prefill_worker.prompts import Farewell, Prompt, PromptTable
from proto.codec import unpack_tokens
from proto.errors import CrossdockError, Interrupt, RemoteProtocolError
from proto.kv import FirstToken
from proto.messages import (
    CacheMiss,
    Capacity,
    Chunk,
    Finished,
    HandedOver,
    Message,
    Peer,
    Prefill,
    Release,
    Released,
    Step,
    StepDone,
    TokenItem,
    Tokens,
    WorkFailed,
)
from proto.sampling import Sampling
from runtime import clock
from runtime.driver import watched
from runtime.link import LinkSettings
from runtime.link import Peer as LinkPeer
from runtime.log import Log
from runtime.outbound import Outbound
from runtime.registration import Registration, worker_hello
from runtime.settings import WorkerSettings

STEPS_QUEUED_MAX = 64


class PrefillWorker:
    def __init__(self, settings: WorkerSettings, engine: Engine, thread: EngineThread, log: Log, name: str) -> None:
        info = engine.info
        self.log = log
        self.engine = engine
        self.thread = thread
        self.table = PromptTable(BlockAllocator(engine.blocks), info.block_size, settings.prefix_cache)
        self.steps: asyncio.Queue[Step] = asyncio.Queue(STEPS_QUEUED_MAX)
        self.links_lost = 0
        self.step_tokens_max = settings.step_tokens_max
        epoch = clock.new_epoch()
        capacity = Capacity(engine.blocks, info.block_size, settings.max_seqs, info.context_tokens)
        hello = worker_hello(settings, epoch=epoch, name=name, fingerprint=info.fingerprint, capacity=capacity)
        links = LinkSettings(heartbeat_ms=settings.heartbeat_ms)
        self.registration = Registration(
            settings=settings,
            hello=hello,
            held=self.table.held,
            on_message=self._order,
            on_lost=self._coordinator_lost,
            log=log,
        )
        self.gateways = Outbound(hello=hello, on_message=_unexpected, on_lost=self._gateway_lost, settings=links)
        self.receivers = Outbound(hello=hello, on_message=self._kv_message, on_lost=self._receiver_lost, settings=links)
        self.receiver_of: dict[int, Peer] = {}
        self.sender = KvSender(
            layout=KvLayout(info.layers, info.kv_heads, info.head_dim, info.block_size, info.dtype),
            pool=engine.pool,
            epoch=epoch,
            clock=clock.now,
            send=self._send_kv,
            on_result=self._kv_result,
            settings=KvSettings(
                transports=allowed_transports(settings.kv_transport),
                ack_timeout_ms=settings.kv_timeout_ms,
                rendezvous_timeout_ms=settings.kv_timeout_ms,
            ),
        )

    async def run(self, stop: asyncio.Event) -> None:
        await self.registration.start()
        stepping = watched(self._run_steps())
        stopping = asyncio.get_running_loop().create_task(stop.wait())
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
                await self.sender.close()
            await self.gateways.close()
            await self.receivers.close()
        if stepping.done() and not stepping.cancelled():
            stepping.result()

    # --- orders ---------------------------------------------------------------------------------------------------------

    def _order(self, _: LinkPeer, message: Message, blob: bytes) -> None:
        match message:
            case Prefill():
                self._take_in(message, blob)
            case Step():
                if self.steps.full():
                    raise RemoteProtocolError(f"more than {STEPS_QUEUED_MAX} steps in flight")
                self.steps.put_nowait(message)
            case Release():
                self._release(message)
            case _:
                raise RemoteProtocolError(f"unexpected {type(message).__name__}")

    def _take_in(self, order: Prefill, blob: bytes) -> None:
        try:
            tokens = unpack_tokens(blob, order.prompt_tokens)
            fault = "a token id outside the vocabulary" if max(tokens) >= self.engine.info.vocab_size else ""
        except RemoteProtocolError as error:
            # A gateway's fault: the coordinator passed the ids on unread, and its link is not the one to end.
            tokens, fault = [], str(error)
        if fault:
            self._say([WorkFailed(order.request_id, order.attempt, Interrupt.ENGINE_ERROR, fault)])
            return
        prompt = self.table.take_in(order, tokens)
        if isinstance(prompt, WorkFailed):
            self._say([prompt])
        elif prompt is not None:
            self.receiver_of[order.decode.epoch] = order.decode
            self.gateways.connect(order.gateway)
            prompt.sending = True
            # Blocks cross in the smaller of the two sizes, in which ours are counted by the tokens they hold.
            size = min(self.table.block_size, order.decode_block_size)
            self.sender.open(*prompt.key, order.decode.epoch, -(-order.prompt_tokens // size), size)
            self.sender.blocks_ready(*prompt.key, *self.table.fresh_blocks(prompt))
            if prompt.cached_tokens < order.cached_tokens:
                self.registration.send(CacheMiss(*prompt.key, prompt.cached_tokens))

    def _release(self, message: Release) -> None:
        prompt = self.table.prompts.get((message.request_id, message.attempt))
        released = Released(message.request_id, message.attempt)
        if prompt is None:
            self._say([released])
        else:
            self._close(prompt, released, "released")

    def _coordinator_lost(self, _: str) -> None:
        """Steps will not come any more; what is already on its way to decode goes on."""
        self.links_lost += 1
        self.table.allocator.report_all()
        while not self.steps.empty():
            self.steps.get_nowait()
        for prompt in list(self.table.prompts.values()):
            if not prompt.done:
                self._close(prompt, Released(*prompt.key), "coordinator lost")

    def _gateway_lost(self, epoch: int, reason: str) -> None:
        for prompt in [p for p in self.table.prompts.values() if p.order.gateway.epoch == epoch]:
            self._fail(prompt, Interrupt.GATEWAY_LINK_LOST, reason)

    # --- steps ----------------------------------------------------------------------------------------------------------

    async def _run_steps(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            step = await self.steps.get()
            link = self.links_lost
            work = self.table.runnable(step.chunks)
            if sum(chunk.length for _, chunk in work) > self.step_tokens_max:
                for prompt, _ in work:
                    self._fail(prompt, Interrupt.ENGINE_ERROR, f"a step over --step-tokens-max {self.step_tokens_max}")
                work = []
            if not work:
                self._step_done(link, step, (), 0.0)
                continue
            self.table.begin_step(work)
            try:
                result = await loop.run_in_executor(self.thread, run_step, self.engine, work)
            except (CrossdockError, RuntimeError, ValueError, IndexError) as error:
                self.log.exception("step failed", step_id=step.step_id)
                self._step_done(link, step, (), 0.0)
                self._step_failed(work, str(error))
                continue
            done = tuple(chunk for _, chunk in work)
            self._step_done(link, step, done, result.step_ms)
            self._say(self.table.end_step(work, result.broken))
            self.registration.report_cache(self.table.allocator.take_changes)
            self._pass_on(work, result)

    def _step_done(self, link: int, step: Step, done: tuple[Chunk, ...], step_ms: float) -> None:
        """Step ids begin anew with each registration: one from before the last loss means nothing to the coordinator now."""
        if link == self.links_lost:
            self.registration.send(StepDone(step.step_id, done, step_ms, self.engine.tokens_forwarded))

    def _step_failed(self, work: list[tuple[Prompt, Chunk]], error: str) -> None:
        for prompt, _ in work:
            prompt.in_step = False
            self._fail(prompt, Interrupt.ENGINE_ERROR, f"the model failed: {error[:300]}")

    def _pass_on(self, work: list[tuple[Prompt, Chunk]], result: StepResult) -> None:
        """Blocks to the KV sender, first tokens to gateways."""
        by_gateway: dict[int, tuple[Peer, list[TokenItem]]] = {}
        for prompt, _ in work:
            if prompt.farewell is not None:
                continue
            if prompt.key in result.broken:
                self._fail(prompt, Interrupt.ENGINE_ERROR, "the model's logits are not finite")
                continue
            first, blocks = self.table.fresh_blocks(prompt)
            items = result.first_tokens.get(prompt.key)
            if items is not None:
                prompt.output_tokens = len(items)
                gateway = prompt.order.gateway
                by_gateway.setdefault(gateway.epoch, (gateway, []))[1].extend(items)
            self.sender.blocks_ready(*prompt.key, first, blocks)
            if items is not None:
                self._first_tokens_drawn(prompt, items)
        for gateway, tokens in by_gateway.values():
            self.gateways.send(gateway, Tokens(tuple(tokens)))

    def _first_tokens_drawn(self, prompt: Prompt, items: list[TokenItem]) -> None:
        going_on = [FirstToken(item.choice, item.tokens[0]) for item in items if item.finish is None]
        if going_on:
            needs_prompt = penalised(prompt.order.sampling, prompt.order.resumed_tokens)
            self.sender.commit(*prompt.key, going_on, prompt.tokens if needs_prompt else ())
        else:
            self._close(
                prompt, Finished(*prompt.key, len(items), self.engine.tokens_forwarded), "ended with its first token"
            )

    # --- the end of an attempt ------------------------------------------------------------------------------------------

    def _fail(self, prompt: Prompt, reason: Interrupt, message: str) -> None:
        self._close(prompt, WorkFailed(*prompt.key, reason, message[:500]), message)

    def _close(self, prompt: Prompt, farewell: Farewell, why: str) -> None:
        self._say(self.table.close(prompt, farewell))
        if prompt.sending:
            self.sender.abort(*prompt.key, why)

    def _kv_result(self, result: KvSent | KvFailed) -> None:
        prompt = self.table.prompts.get((result.request_id, result.attempt))
        if prompt is None:
            return
        if isinstance(result, KvSent):
            farewell: Farewell = HandedOver(*prompt.key, result.kv_bytes, result.transfer_ms)
        else:
            farewell = WorkFailed(*prompt.key, Interrupt.TRANSFER_FAILED, result.reason[:500])
        self._say(self.table.sent(prompt, farewell))

    def _say(self, farewells: list[Farewell]) -> None:
        for farewell in farewells:
            self.registration.send(farewell)

    # --- KV control -----------------------------------------------------------------------------------------------------

    def _send_kv(self, epoch: int, message: Message, blob: bytes) -> None:
        receiver = self.receiver_of.get(epoch)
        if receiver is not None:
            self.receivers.send(receiver, message, blob)

    def _kv_message(self, peer: LinkPeer, message: Message, blob: bytes) -> None:
        self.sender.handle(peer.epoch, message, blob)

    def _receiver_lost(self, epoch: int, reason: str) -> None:
        self.receiver_of.pop(epoch, None)
        self.sender.peer_lost(epoch, reason)


def penalised(sampling: Sampling, resumed_tokens: int) -> bool:
    """Whether decode must know the prompt's ids (or the resumed output among them) to sample."""
    output = sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0
    return sampling.repetition_penalty != 1.0 or (output and resumed_tokens > 0)


def _unexpected(_: LinkPeer, message: Message, __: bytes) -> None:
    raise RemoteProtocolError(f"a gateway sent {type(message).__name__}")
