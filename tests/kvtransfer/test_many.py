"""Random layouts over every transport; 1 to 100 segments; several sessions at once, over one pair and over four."""

import asyncio
import random
import time
from dataclasses import dataclass, field
from functools import partial

import pytest

from kvtransfer.memory.layout import KvLayout
from kvtransfer.receiver import KvReceiver
from kvtransfer.sender import KvSender
from kvtransfer.session.limits import KvSettings
from kvtransfer.session.session import KvFailed, KvSent, OfferAccepted
from proto.kv import Offer
from proto.messages import Message
from tests.kvtransfer import ends
from tests.kvtransfer.ends import FIRST, WAIT_S, filled_pool, same_bytes
from tests.kvtransfer.owners import Receives, Sends

pytestmark = pytest.mark.usefixtures("transport")
BLOCKS = 128
SEEDS = 4


def random_layout(rng: random.Random) -> KvLayout:
    dtype = rng.choice(["float32", "bfloat16", "float16", "float8_e4m3fn"])
    sizes = [rng.randint(1, most) for most in (4, 3, 40, 16)]
    return KvLayout(*sizes, dtype=dtype)  # type: ignore[arg-type]


@dataclass
class Mesh:
    """Two senders and two receivers, all on one loop: four pairs."""

    layout: KvLayout
    segment_blocks: int
    targets: dict[tuple[int, str], tuple[list[int], int]] = field(default_factory=dict)
    """By receiver and request: target blocks, and how many of the first are there already."""
    results: dict[str, KvSent | KvFailed] = field(default_factory=dict)

    def __post_init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.changed = asyncio.Event()
        size = self.segment_blocks * self.layout.block_bytes
        settings = ends.settings_for(ends.TRANSPORT, KvSettings(segment_bytes=size, rendezvous_timeout_ms=30_000))
        common = {"layout": self.layout, "clock": time.monotonic, "settings": settings}
        self.sources = {incarnation: filled_pool(self.layout, BLOCKS, incarnation) for incarnation in (1, 2)}
        self.pools = {incarnation: filled_pool(self.layout, BLOCKS, incarnation) for incarnation in (11, 12)}

        def wire(here: int) -> object:
            def send(to: int, message: Message, blob: bytes) -> None:
                loop.call_soon((self.receivers if to > 10 else self.senders)[to].handle, here, message, blob)

            return send

        self.senders = {
            incarnation: KvSender(
                pool=pool,
                incarnation=incarnation,
                owner=Sends(wire(incarnation), self._ended),  # type: ignore[arg-type]
                **common,  # type: ignore[arg-type]
            )  # type: ignore[arg-type]
            for incarnation, pool in self.sources.items()
        }
        self.receivers = {
            incarnation: KvReceiver(
                pool=pool,
                incarnation=incarnation,
                listen_host="127.0.0.1",
                owner=Receives(wire(incarnation), partial(self._accepted, incarnation)),  # type: ignore[arg-type]
                **common,  # type: ignore[arg-type]
            )
            for incarnation, pool in self.pools.items()
        }

    def _accepted(self, incarnation: int, _: int, offer: Offer) -> OfferAccepted:
        blocks, cached = self.targets[(incarnation, offer.request_id)]
        return OfferAccepted(tuple(blocks), cached)

    def _ended(self, result: KvSent | KvFailed) -> None:
        self.results[result.request_id] = result
        self.changed.set()

    async def until(self, count: int) -> None:
        async with asyncio.timeout(WAIT_S):
            while len(self.results) < count:
                self.changed.clear()
                await self.changed.wait()

    async def close(self) -> None:
        await asyncio.gather(*(end.close() for end in (*self.senders.values(), *self.receivers.values())))  # type: ignore[attr-defined]


@pytest.mark.parametrize("seed", range(SEEDS))
def test_concurrent_sessions_arrive_intact(seed):
    """Sessions over four pairs at once arrive byte for byte and write to no other blocks."""

    async def main() -> None:
        rng = random.Random(f"many {seed}")
        mesh = Mesh(random_layout(rng), rng.choice([1, 1, 2, 5]))
        before = {incarnation: pool.clone() for incarnation, pool in mesh.pools.items()}
        free = {incarnation: rng.sample(range(BLOCKS), BLOCKS) for incarnation in mesh.pools}
        asked: dict[str, tuple[int, int, list[int]]] = {}
        for number in range(12):
            sender, receiver = rng.choice([1, 2]), rng.choice([11, 12])
            count = min(100 if number == 0 else rng.randint(1, 12), len(free[receiver]))
            if not count:
                continue
            name = f"r{number}"
            taken, free[receiver] = free[receiver][:count], free[receiver][count:]
            start = rng.randrange(BLOCKS - count + 1)
            ids = rng.sample(range(BLOCKS), count) if rng.random() < 0.6 else list(range(start, start + count))
            targets = sorted(taken) if rng.random() < 0.4 else taken
            mesh.targets[(receiver, name)] = targets, rng.choice([0, rng.randint(0, count)])
            asked[name] = sender, receiver, ids
            mesh.senders[sender].open(name, 1, receiver, count)
            cut = rng.randint(0, count)
            mesh.senders[sender].blocks_ready(name, 1, 0, ids[:cut])
            mesh.senders[sender].blocks_ready(name, 1, cut, ids[cut:])
            mesh.senders[sender].commit(name, 1, FIRST, ())
        await mesh.until(len(asked))
        assert all(isinstance(result, KvSent) for result in mesh.results.values()), (seed, mesh.results)
        for name, (sender, receiver, ids) in asked.items():
            targets, cached = mesh.targets[(receiver, name)]
            pool, source = mesh.pools[receiver], mesh.sources[sender]
            assert same_bytes(pool[targets[cached:]], source[ids[cached:]]), (seed, name)
            assert same_bytes(pool[targets[:cached]], before[receiver][targets[:cached]]), (seed, name)
        for incarnation, untouched in free.items():
            assert same_bytes(mesh.pools[incarnation][untouched], before[incarnation][untouched]), seed
        await mesh.close()

    asyncio.run(main())
