"""The sending process of `crossdock bench kv`: `python -m launcher.bench_kv_far ADDRESS POOL_BYTES`; takes orders (`far`)."""

import asyncio
import functools
import socket
import statistics
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import uvloop

from kvtransfer import rendezvous
from kvtransfer.layout import KvLayout
from kvtransfer.settings import KvSettings
from launcher import far
from launcher.kv_replayer import Replayer
from proto import limits
from proto.messages import Hello, Role
from runtime import clock

RECEIVER_EPOCH = 1
_ROUND_TRIPS, _TIMEOUT_S = 5, 30.0


class Ways:
    """One for each transport: a link of its own, so that the other end can tell them apart, and a sender."""

    def __init__(self, address: str, memory: torch.Tensor) -> None:
        self._address = address
        self._memory = memory
        self._ways: dict[str, Replayer] = {}
        self._sessions = 0

    async def set_up(self, layout: dict[str, Any], segment_bytes: int, transports: list[str]) -> dict[str, int]:
        """Returns the epoch of each transport's sender."""
        shape = KvLayout(**layout)
        blocks = self._memory.shape[0] // shape.block_bytes
        pool = self._memory[: blocks * shape.block_bytes].view(torch.float32).view(shape.shape(blocks))
        for name in transports:
            if name not in self._ways:
                hello = Hello(limits.PROTOCOL_VERSION, Role.PREFILL, clock.new_epoch(), name)
                self._ways[name] = Replayer(self._address, hello, RECEIVER_EPOCH)
                await self._ways[name].start()
            settings = KvSettings(transports=(name,), segment_bytes=segment_bytes, segment_timeout_ms=30_000)
            await self._ways[name].set_up(shape, pool, settings)
        return {name: self._ways[name].epoch for name in transports}

    async def session(self, transport: str, block_ids: list[int]) -> tuple[float, float]:
        """When it was offered, and the seconds until it was acknowledged."""
        self._sessions += 1
        way = self._ways[transport]
        took_s = await way.session(f"{transport}-{self._sessions}", block_ids)
        return way.offered_at, took_s

    async def tcp(self, **order: Any) -> float:
        return await asyncio.to_thread(functools.partial(over_tcp, self._memory, **order))

    async def round_trip(self, port: int) -> float:
        return await asyncio.to_thread(tcp_round_trip, port)

    async def gloo(self, **order: Any) -> float:
        return await asyncio.to_thread(functools.partial(over_gloo, self._memory, **order))

    async def close(self) -> None:
        for way in self._ways.values():
            await way.close()


def over_tcp(memory: torch.Tensor, port: int, size: int, starts: list[int]) -> float:
    """Raw: Python's socket calls, from the pool into the other end's buffer; until its last byte is known to be there."""
    raw: Any = memory.numpy()
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.recv(1)
        began = time.perf_counter()
        for start in starts:
            connection.sendall(raw[start : start + size])
        connection.recv(1)
        return time.perf_counter() - began


def tcp_round_trip(port: int) -> float:
    """The median of some, in seconds."""
    with socket.create_connection(("127.0.0.1", port), timeout=_TIMEOUT_S) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        took = []
        for _ in range(_ROUND_TRIPS):
            began = time.perf_counter()
            connection.sendall(b"!")
            connection.recv(1)
            took.append(time.perf_counter() - began)
    return statistics.median(took)


def over_gloo(memory: torch.Tensor, port: int, secret: str, size: int, starts: list[int]) -> float:
    """Bare: gloo's send alone, no announcements, digests or copies to blocks."""
    group = rendezvous.connect(rendezvous.gloo_group, "127.0.0.1", port, secret, 30.0)
    limit = timedelta(seconds=30)
    answer = torch.zeros(1, dtype=torch.uint8)
    group.recv([answer], rendezvous.RECEIVER_RANK, 1 << 20).wait(limit)
    began = time.perf_counter()
    for tag, start in enumerate(starts):
        group.send([memory[start : start + size]], rendezvous.RECEIVER_RANK, tag).wait(limit)
    group.recv([answer], rendezvous.RECEIVER_RANK, 1 << 21).wait(limit)
    return time.perf_counter() - began


async def main(address: str, pool_bytes: int) -> None:
    ways = Ways(address, torch.from_numpy(filled(pool_bytes)))
    orders = (ways.set_up, ways.session, ways.tcp, ways.gloo, ways.round_trip)
    await far.serve({order.__name__: order for order in orders})
    await ways.close()


def filled(size: int) -> Any:
    """Bytes that are not all alike, every page of them written."""
    import numpy as np

    memory = np.empty(size, dtype=np.uint8)
    memory.view(np.uint64)[:] = np.arange(size // 8, dtype=np.uint64)
    return memory


if __name__ == "__main__":
    torch.set_num_threads(1)
    uvloop.run(main(sys.argv[1], int(sys.argv[2])))
