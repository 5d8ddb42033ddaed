"""`python -m benchmarks kv`: KV between two real processes, by every transport, beside what this machine can do at all.

Floors, for S bytes:
- `shm`: the sender's copy reads S and writes S, as memcpy does; its digests were made when the KV was. The receiver's copy
  into its pool reads and writes S again and digests it on the way, on another core at the same time. `bare shm` has no second
  copy: the sender writes to the pool itself, which a server does not allow. Its stores do not read their target first
  (`process.STREAMED_COPIES`). The same holds for a memcpy of very large pieces, which is therefore faster than one of small
  pieces.
- A session of one block: each of its four messages passes two I/O threads of ZeroMQ from loop to loop, and the data plane
  wakes four more threads. So one thread wakes the next 16 times, against twice in a bare round trip between two processes.
- `tcp-plain`: S crosses a socket (a copy in the kernel at each end), and the receiver digests it: a read more than a raw
  socket.
- `tcp`: likewise, and S is encrypted and decrypted.
All figures of a row are medians of rounds in which everything is measured once, in turn, on cold sources.
"""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import torch
import uvloop
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from benchmarks import kv_floor
from benchmarks.kv_peer import PLAIN_TCP, RECEIVER_INCARNATION, filled, settings_of
from benchmarks.remote_peer import Far
from benchmarks.settings import KvBenchSettings
from kvtransfer.memory.digests import Digester
from kvtransfer.memory.layout import KvLayout
from kvtransfer.memory.pool import PoolRows
from kvtransfer.memory.shared import SharedMemory
from kvtransfer.ports import ReceiverOwner
from kvtransfer.receiver import KvReceiver
from kvtransfer.session.session import OfferAccepted
from kvtransfer.transports.registry import TRANSPORTS, suited
from launcher import tables
from launcher.http.streams import BenchFailed
from launcher.reports import console_for, write_json
from proto import limits
from proto.kv import Commit, Offer
from proto.messages import Hello, Message, Role
from runtime.link.server import LinkServer, LinkSettings, Peer

_LAYER_KIB = 8  # K and V of 16 tokens of one head of 64 float32 numbers
_SMALL_SESSIONS = 60
_LARGE_BYTES, _SMALL_TOTAL_BYTES = 4 << 20, 16 << 20
_BARE = {"shm": "bare shm"}
_SOCKET = "socket"
_BESIDE = (
    {"shm/mem": ("shm", "memcpy")}
    | {f"{name}/socket": (name, _SOCKET) for name in ("tcp", "tcp-plain")}
    | {f"{name}/bare": (name, _BARE[name]) for name in _BARE}
)
"""The ratios of a row."""
_SEGMENTS_MAX = 1000
_COMMIT, _ACKNOWLEDGEMENT, _ROUND_TRIP = "commit", "acknowledgement", "round trip"


class Near(ReceiverOwner):
    """The receiving process; it also sends orders to the other process."""

    def __init__(self, settings: KvBenchSettings) -> None:
        self.settings = settings
        self.random = Random(settings.seed)
        self.session_bytes = settings.session_mib << 20
        pool_bytes = self.session_bytes + (256 << 20)  # room for a source or target that is not in a cache
        self.memory = SharedMemory(pool_bytes)  # for the bare copy: the other process writes to this memory
        self.pool = self.memory.tensor.fill_(1)
        self.source = torch.from_numpy(filled(pool_bytes))
        self.receivers: dict[str, KvReceiver] = {}
        self.peers: dict[int, Peer] = {}
        self.targets: tuple[int, ...] = ()
        self.committed_at = 0.0
        hello = Hello(version=limits.PROTOCOL_VERSION, role=Role.DECODE, incarnation=RECEIVER_INCARNATION, name="bench")
        self.server = LinkServer(
            bind="tcp://127.0.0.1:0",
            hello=hello,
            accept=lambda hello: None,
            on_up=lambda peer: self.peers.update({peer.incarnation: peer}),
            on_message=self._on_message,
            on_down=lambda peer, reason: None,
            settings=LinkSettings(heartbeat_ms=10_000),
        )

    def _on_message(self, peer: Peer, message: Message, blob: bytes) -> None:
        self.receivers[peer.hello.name].handle(peer.incarnation, message, blob)

    def send(self, peer_incarnation: int, message: Message, blob: bytes) -> None:
        self.peers[peer_incarnation].send(message, blob)

    def offered(self, peer_incarnation: int, offer: Offer) -> OfferAccepted:
        return OfferAccepted(self.targets[: offer.blocks])

    def committed(self, peer_incarnation: int, commit: Commit, block_ids: list[int], prompt_tokens: list[int]) -> None:
        self.committed_at = time.monotonic()

    def not_received(self, request_id: str, attempt: int, block_ids: list[int], reason: str) -> None:
        return

    async def start(self) -> None:
        address = await self.server.start()
        self.far = Far("benchmarks.kv_peer", address, str(self.pool.shape[0]))
        await self.far.start()
        self.bare = kv_floor.Near(self.memory, self.pool, self.far)

    async def close(self) -> None:
        for receiver in self.receivers.values():
            await receiver.close()
        await self.far.close()
        await self.server.close()
        self.memory.close()

    async def set_up(self, layout: KvLayout, segment_bytes: int) -> None:
        for receiver in self.receivers.values():
            await receiver.close()
        rows = self.pool[: self.pool.shape[0] // layout.block_bytes * layout.block_bytes]
        for name in self.settings.transports:
            self.receivers[name] = KvReceiver(
                layout=layout,
                pool=rows.view(torch.float32).view(layout.shape(rows.shape[0] // layout.block_bytes)),
                incarnation=RECEIVER_INCARNATION,
                clock=time.monotonic,
                listen_host="127.0.0.1",
                owner=self,
                settings=settings_of(name, segment_bytes),
            )
        shape = {name: getattr(layout, name) for name in layout.__dataclass_fields__}
        await self.far.order("set_up", layout=shape, segment_bytes=segment_bytes, transports=self.settings.transports)

    # --- measurements: GB/s of `total` bytes in pieces of `size` ---

    def starts(self, size: int, total: int) -> list[int]:
        """Returns where consecutive pieces in the pool begin, from a random place on."""
        first = self.random.randrange(0, (self.pool.shape[0] - total) // 4096 + 1) * 4096
        return list(range(first, first + total, size))

    def memcpy(self, size: int, total: int) -> float:
        to, from_ = self.pool.numpy(), self.source.numpy()
        targets, sources = self.starts(size, total), self.starts(size, total)
        began = time.perf_counter()
        for target, source in zip(targets, sources, strict=True):
            np.copyto(to[target : target + size], from_[source : source + size])
        return total / (time.perf_counter() - began) / 1e9

    def digest(self, size: int, total: int, layout: KvLayout) -> float:
        """Measures the work of `shm`'s receiver without another process."""
        used = self.source.shape[0] // layout.block_bytes * layout.block_bytes
        digester = Digester(PoolRows.of_bytes(self.source[:used], layout, 1))
        blocks, count = self.blocks(total, layout), max(1, size // layout.block_bytes)
        began = time.perf_counter()
        for start in range(0, len(blocks), count):
            digester.digest(blocks[start : start + count])
        return total / (time.perf_counter() - began) / 1e9

    def blocks(self, total: int, layout: KvLayout) -> list[int]:
        count, there = total // layout.block_bytes, self.pool.shape[0] // layout.block_bytes
        if self.settings.scattered:
            return self.random.sample(range(there), count)
        first = self.random.randrange(there - count + 1)
        return list(range(first, first + count))

    async def kv(self, transport: str, total: int, layout: KvLayout) -> tuple[float, float]:
        """Returns the seconds of one session: from the offer to the commit, and from the offer to the acknowledgement."""
        self.targets = tuple(self.blocks(total, layout))
        offered_at, took = await self.far.order("session", transport=transport, block_ids=self.blocks(total, layout))
        return self.committed_at - offered_at, took

    async def touch(self, transport: str, size: int, layout: KvLayout) -> None:
        """Uses every block of the pools once. A pair maps a page when it first meets it, and in a server that has run for a
        while all pages are mapped."""
        there, most = self.pool.shape[0] // layout.block_bytes, _SEGMENTS_MAX * (size // layout.block_bytes)
        for first in range(0, there, most):
            self.targets = tuple(range(first, min(first + most, there)))
            await self.far.order("session", transport=transport, block_ids=self.targets)


async def _row(near: Near, size: int, layout: KvLayout, done: Callable[[], None]) -> dict[str, Any]:
    """Measures everything about segments of one size, in rounds."""
    settings = near.settings
    most = near.session_bytes if size >= _LARGE_BYTES else _SMALL_TOTAL_BYTES
    total = most // max(size, layout.block_bytes) * max(size, layout.block_bytes)
    await near.set_up(layout, size)
    for transport in settings.transports:
        await near.touch(transport, size, layout)
    found: dict[str, list[float]] = {}

    def note(name: str, gb_per_s: float) -> None:
        found.setdefault(name, []).append(gb_per_s)

    for number in range(settings.rounds + 1):
        figures = {"memcpy": near.memcpy(size, total), "digest": near.digest(size, total, layout)}
        for transport in settings.transports:
            _, took_s = await near.kv(transport, total, layout)
            figures[transport] = total / took_s / 1e9
        for name, took_s in (await _bare(near, size, total, layout)).items():
            figures[name] = total / took_s / 1e9
        for name, figure in figures.items():
            if number:  # the first round warms up
                note(name, figure)
        done()
    medians = {name: statistics.median(values) for name, values in found.items()}
    ratios = {
        name: statistics.median(a / b for a, b in zip(found[one], found[other], strict=True))
        for name, (one, other) in _BESIDE.items()
        if one in found
    }
    return {"segment_bytes": size, "block_bytes": layout.block_bytes, "total_bytes": total} | {
        "gb_per_s": medians,
        "ratio": ratios,
        "rounds": found,
    }


async def _bare(near: Near, size: int, total: int, layout: KvLayout) -> dict[str, float]:
    """Returns the seconds for the same bytes without crossdock."""
    found = {_SOCKET: await near.bare.tcp(size, near.starts(size, total))}
    if "shm" in near.settings.transports:
        block_bytes, sources, targets = layout.block_bytes, near.starts(size, total), near.starts(size, total)
        found[_BARE["shm"]] = await near.bare.shm(size, block_bytes, sources, targets)
    return found


async def _overheads(near: Near, layout: KvLayout) -> dict[str, dict[str, float]]:
    """Returns the median ms of a session of one block without the copy of that block, by the event that ends it and the
    transport; and the median ms of a bare round trip."""
    await near.set_up(layout, layout.block_bytes)
    took: dict[tuple[str, str], list[float]] = defaultdict(list)
    for _ in range(_SMALL_SESSIONS):
        copy_s = layout.block_bytes / near.memcpy(layout.block_bytes, layout.block_bytes) / 1e9
        for transport in near.settings.transports:
            committed_s, acknowledged_s = await near.kv(transport, layout.block_bytes, layout)
            took[_COMMIT, transport].append(committed_s - copy_s)
            took[_ACKNOWLEDGEMENT, transport].append(acknowledged_s - copy_s)
        took[_ROUND_TRIP, _SOCKET].append(await near.bare.round_trip())
    found: dict[str, dict[str, float]] = defaultdict(dict)
    for (what, transport), values in took.items():
        found[what][transport] = statistics.median(values) * 1e3
    return found


async def measure(settings: KvBenchSettings, console: Console) -> dict[str, Any]:
    cases = [
        (size << 10, KvLayout(block // _LAYER_KIB, 1, 64, 16, "float32"))
        for block in settings.block_kib
        for size in settings.segment_kib
        if size % block == 0
    ]
    if not cases:
        raise BenchFailed("no segment size is a multiple of a block size")
    near = Near(settings)
    await near.start()
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    try:
        overheads = await _overheads(near, cases[0][1])  # before there is a progress bar: drawing it uses a core
        with Progress(*columns, console=console) as progress:
            bar = progress.add_task("KV transfers", total=len(cases) * (settings.rounds + 1))
            rows = [await _row(near, size, layout, lambda: progress.advance(bar)) for size, layout in cases]
    finally:
        await near.close()
    return {"rows": rows, "overhead_ms_p50": overheads}


def run(settings: KvBenchSettings) -> int:
    """Raises `BenchFailed`."""
    there = (*suited(tuple(TRANSPORTS), "cpu"), PLAIN_TCP)
    if unknown := set(settings.transports) - set(there):
        raise BenchFailed(f"--transports: there is no {', '.join(sorted(unknown))}; there are {', '.join(there)}")
    console = console_for(settings)
    torch.set_num_threads(1)
    result = uvloop.run(measure(settings, console))
    show(result, settings, console)
    write_json(settings, result | {"settings": settings.model_dump()})
    return 0


def _size(size: int) -> str:
    return f"{size >> 20} MiB" if size >> 20 and not size % (1 << 20) else f"{size >> 10} KiB"


def show(result: dict[str, Any], settings: KvBenchSettings, console: Console) -> None:
    bare = [_BARE[name] for name in settings.transports if name in _BARE]
    names = ["memcpy", "digest", *settings.transports, _SOCKET, *bare]
    ratios = [ratio for ratio, (one, _) in _BESIDE.items() if one in settings.transports]
    title = "GB/s, medians (digest: of cold blocks, in one thread; socket: raw TCP; bare: without crossdock's part)"
    columns = (heading.replace("/", " / ") for heading in (*names, *ratios))
    table = tables.Table(title, "segment", "block", *columns, keys=2)
    for row in result["rows"]:
        table.row(
            *(_size(row[what]) for what in ("segment_bytes", "block_bytes")),
            *(f"{row['gb_per_s'][name]:.2f}" for name in names),
            *(f"{row['ratio'][name]:.2f}" for name in ratios),
        )
    table.show(console)
    overheads = result["overhead_ms_p50"]
    commit, acknowledgement = overheads[_COMMIT], overheads[_ACKNOWLEDGEMENT]
    words = ", ".join(f"{name} {commit[name]:.2f} ({acknowledgement[name]:.2f})" for name in settings.transports)
    console.print(
        f"A session of one block, offer to commit (to acknowledgement) less the copy, p50 in ms: {words}; a bare round trip"
        f" between the two processes: {overheads[_ROUND_TRIP][_SOCKET]:.3f}"
    )
