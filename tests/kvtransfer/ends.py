"""Two drivers wired together in one process, and what the tests ask of them."""

import asyncio
import itertools
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

import tests.kvtransfer.gloo  # noqa: F401 - a stand-in for NCCL
from kvtransfer.memory.cuda import DeviceMemory
from kvtransfer.memory.layout import KvLayout
from kvtransfer.receiver import KvReceiver
from kvtransfer.sender import KvSender
from kvtransfer.session.limits import KvSettings
from kvtransfer.session.session import KvFailed, KvSent, OfferAccepted
from kvtransfer.transports.transport import PoolMemory
from proto.kv import Announce, Commit, FirstToken, Offer, PairListen
from proto.messages import Message
from tests.kvtransfer.owners import Receives, Sends

LAYOUT = KvLayout(layers=2, kv_heads=2, head_dim=8, block_size=4, dtype="float32")
SMALL = KvSettings(segment_bytes=3 * LAYOUT.block_bytes, rendezvous_timeout_ms=20_000, segment_timeout_ms=10_000)
TRANSPORT = "gloo"  # Of pairs whose settings do not say; empty: they choose. `tcp-plain` is `tcp` without encryption.
FIRST = (FirstToken(0, 7),)
WAIT_S = 60.0  # a test that waits this long has hung

Hook = Callable[[Message], bool]  # sees a frame before it is delivered; False drops it


def announces(message: Message, request_id: str, segment: int) -> bool:
    """Whether this segment is among those announced by this frame."""
    mine = isinstance(message, Announce) and message.request_id == request_id
    return mine and 0 <= segment - message.segment < len(message.blocks)  # type: ignore[attr-defined]


def filled_pool(layout: KvLayout, blocks: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (blocks, layout.block_bytes), dtype=torch.uint8, generator=generator)
    return raw.view(getattr(torch, layout.dtype)).view(layout.shape(blocks))


def settings_for(transport: str, settings: KvSettings) -> KvSettings:
    """These settings, for pairs of one transport."""
    return replace(settings, transports=(transport.removesuffix("-plain"),), encrypt=transport == "tcp")


ON_GPU = ("cuda_ipc", "nccl")


def memory_of(transport: str) -> PoolMemory | None:
    return DeviceMemory("cuda") if transport in ON_GPU else None


def pool_in(memory: PoolMemory | None, layout: KvLayout, blocks: int, seed: int) -> torch.Tensor:
    """A filled pool, in this memory if there is one."""
    pool = filled_pool(layout, blocks, seed)
    if memory is None:
        return pool
    return memory.allocate(blocks * layout.block_bytes).view(pool.dtype).view(pool.shape).copy_(pool)


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.cpu().contiguous().view(torch.uint8), other.cpu().contiguous().view(torch.uint8))


@dataclass
class Ends:
    """Sender 1 and receiver 2 on one loop, frames passed on in order through the loop."""

    layout: KvLayout = LAYOUT
    settings: KvSettings = SMALL
    receiver_settings: KvSettings | None = None
    receiver_layout: KvLayout | None = None  # where its blocks are of another size; it has `blocks` of them too
    blocks: int = 64
    accept: Callable[[int, Offer], OfferAccepted | str | None] | None = None
    """None: each gets the next blocks, from 0 on and from 0 again."""
    to_receiver: Hook = lambda message: True
    to_sender: Hook = lambda message: True
    results: list[KvSent | KvFailed] = field(default_factory=list)
    committed: list[tuple[Commit, list[int], list[int]]] = field(default_factory=list)
    failed: list[tuple[str, int, list[int], str]] = field(default_factory=list)
    frames: list[Message] = field(default_factory=list)  # all that the sender has sent
    strangers: list[Message] = field(default_factory=list)  # what the receiver said to other peers

    def __post_init__(self) -> None:
        if TRANSPORT and self.settings.transports == KvSettings().transports:
            self.settings = settings_for(TRANSPORT, self.settings)
        if TRANSPORT and self.receiver_settings and self.receiver_settings.transports == KvSettings().transports:
            self.receiver_settings = settings_for(TRANSPORT, self.receiver_settings)
        self.loop = asyncio.get_running_loop()
        self.changed = asyncio.Event()
        self._given = 0
        self.source = filled_pool(self.layout, self.blocks, seed=1)
        self.target = filled_pool(self.receiver_layout or self.layout, self.blocks, seed=2)
        self.receiver_side = ReceiverSide(self)
        self.sender = KvSender(
            layout=self.layout,
            pool=self.source,
            incarnation=1,
            clock=time.monotonic,
            owner=Sends(self._send_to_receiver, lambda result: self._note(self.results, result)),
            settings=self.settings,
        )
        self.receiver = KvReceiver(
            layout=self.receiver_layout or self.layout,
            pool=self.target,
            incarnation=2,
            clock=time.monotonic,
            listen_host="127.0.0.1",
            owner=self.receiver_side,
            settings=self.receiver_settings or self.settings,
        )

    def _next_blocks(self, offer: Offer) -> OfferAccepted:
        """Not those of another session that is under way: `shm` writes to them before it is asked what came of the last."""
        self._given, first = self._given + offer.blocks, self._given
        return OfferAccepted(tuple(block % self.blocks for block in range(first, self._given)))

    def _note(self, where: list[Any], what: object) -> None:
        where.append(what)
        self.changed.set()

    def _send_to_receiver(self, incarnation: int, message: Message, blob: bytes) -> None:
        assert incarnation == 2
        self._note(self.frames, message)
        if self.to_receiver(message):
            self.loop.call_soon(self.receiver.handle, 1, message, blob)

    def _send_to_sender(self, incarnation: int, message: Message, blob: bytes) -> None:
        if incarnation != 1:
            self._note(self.strangers, message)
        elif self.to_sender(message):
            self.loop.call_soon(self.sender.handle, 2, message, blob)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    async def ended(self, sessions: int) -> None:
        await self.until(lambda: len(self.results) >= sessions and len(self.committed) + len(self.failed) >= sessions)

    def transfer(
        self, request_id: str, block_ids: list[int], chunks: int = 1, prompt: tuple[int, ...] = (), tokens: int = 0
    ) -> None:
        """Open, hand over all blocks in `chunks` parts, commit. `tokens` says how many tokens they hold, if not full."""
        size = min(self.layout.block_size, (self.receiver_layout or self.layout).block_size)
        tokens = tokens or len(block_ids) * self.layout.block_size
        self.sender.open(request_id, 1, 2, -(-tokens // size), size)
        cuts = [len(block_ids) * part // chunks for part in range(chunks + 1)]
        for start, end in itertools.pairwise(cuts):
            self.sender.blocks_ready(request_id, 1, start, block_ids[start:end])
        self.sender.commit(request_id, 1, FIRST, prompt)

    async def close(self) -> None:
        await asyncio.gather(self.sender.close(), self.receiver.close())


class ReceiverSide(Receives):
    """It notes what becomes of offers."""

    def __init__(self, ends: Ends) -> None:
        super().__init__(
            ends._send_to_sender,
            lambda peer, offer: ends.accept(peer, offer) if ends.accept else ends._next_blocks(offer),
        )
        self._ends = ends

    def committed(self, peer_incarnation: int, commit: Commit, block_ids: list[int], prompt_tokens: list[int]) -> None:
        self._ends._note(self._ends.committed, (commit, block_ids, prompt_tokens))

    def not_received(self, request_id: str, attempt: int, block_ids: list[int], reason: str) -> None:
        self._ends._note(self._ends.failed, (request_id, attempt, block_ids, reason))


def shuffled(blocks: int, count: int, seed: int) -> list[int]:
    return random.Random(seed).sample(range(blocks), count)


def with_ends(test: Callable[[Ends], Awaitable[None]], **options: object) -> None:
    """Run a test on a loop of its own, and see that both ends shut down."""

    async def main() -> None:
        ends = Ends(**options)  # type: ignore[arg-type]
        try:
            await test(ends)
        finally:
            await ends.close()

    asyncio.run(main())


def meeting_of(ends: Ends) -> asyncio.Future[PairListen]:
    """The next one that the receiver tells of."""
    found: asyncio.Future[PairListen] = ends.loop.create_future()

    def watch(message: Message) -> bool:
        if isinstance(message, PairListen) and not found.done():
            found.set_result(message)
        return True

    ends.to_sender = watch
    return found


async def transfer(ends: Ends, name: str, count: int = 10) -> None:
    """One that must arrive."""
    before = len(ends.results)
    ends.transfer(name, shuffled(64, count, seed=len(name)))
    await ends.until(lambda: len(ends.results) > before and len(ends.committed) > before)
    assert isinstance(ends.results[-1], KvSent), ends.results[-1]
