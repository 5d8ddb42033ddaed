"""The sending process of `python -m benchmarks kv`; takes orders (`remote_peer`).

Run as `python -m benchmarks.kv_peer ADDRESS POOL_BYTES`.
"""

import asyncio
import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
import uvloop

from benchmarks import kv_floor, remote_peer
from benchmarks.remote_replayer import Replayer
from kvtransfer.memory.layout import KvLayout
from kvtransfer.session.limits import KvSettings
from proto import limits
from proto.messages import Hello, Role
from runtime.process import clock

RECEIVER_INCARNATION = 1
PLAIN_TCP = "tcp-plain"  # `tcp` without encryption; `tcp` is measured with it


def settings_of(name: str, segment_bytes: int) -> KvSettings:
    """Returns the settings of either end of this transport."""
    transports = ("tcp",) if name == PLAIN_TCP else (name,)
    return KvSettings(
        transports=transports, segment_bytes=segment_bytes, segment_timeout_ms=30_000, encrypt=name == "tcp"
    )


class Ways:
    """The ways to the other process: for each transport a sender, and a link of its own, so that the other end can distinguish
    them."""

    def __init__(self, address: str, memory: torch.Tensor) -> None:
        self._address = address
        self._memory = memory
        self._ways: dict[str, Replayer] = {}
        self._sessions = 0

    async def set_up(self, layout: dict[str, Any], segment_bytes: int, transports: list[str]) -> dict[str, int]:
        """Sets the senders up; returns the incarnation of each transport's sender."""
        shape = KvLayout(**layout)
        blocks = self._memory.shape[0] // shape.block_bytes
        pool = self._memory[: blocks * shape.block_bytes].view(torch.float32).view(shape.shape(blocks))
        for name in transports:
            if name not in self._ways:
                hello = Hello(limits.PROTOCOL_VERSION, Role.PREFILL, clock.new_incarnation(), name)
                self._ways[name] = Replayer(self._address, hello, RECEIVER_INCARNATION)
                await self._ways[name].start()
            await self._ways[name].set_up(shape, pool, settings_of(name, segment_bytes))
        return {name: self._ways[name].incarnation for name in transports}

    async def session(self, transport: str, block_ids: list[int]) -> tuple[float, float]:
        """Sends one session; returns when it was offered, and the seconds until it was acknowledged."""
        self._sessions += 1
        way = self._ways[transport]
        took_s = await way.session(f"{transport}-{self._sessions}", block_ids)
        return way.offered_at, took_s

    async def close(self) -> None:
        for way in self._ways.values():
            await way.close()


async def main(address: str, pool_bytes: int) -> None:
    memory = torch.from_numpy(filled(pool_bytes))
    ways = Ways(address, memory)
    bare: dict[str, Callable[..., float]] = {
        "bare_tcp": functools.partial(kv_floor.over_tcp, memory),
        "bare_shm": kv_floor.IntoPool(memory).copy,
        "bare_round_trip": kv_floor.round_trip,
    }
    threaded = {name: functools.partial(asyncio.to_thread, order) for name, order in bare.items()}
    await remote_peer.serve({"set_up": ways.set_up, "session": ways.session, **threaded})
    await ways.close()


def filled(size: int) -> Any:
    """Returns memory whose bytes differ and whose pages have all been written."""
    import numpy as np

    memory = np.empty(size, dtype=np.uint8)
    memory.view(np.uint64)[:] = np.arange(size // 8, dtype=np.uint64)
    return memory


if __name__ == "__main__":
    torch.set_num_threads(1)
    uvloop.run(main(sys.argv[1], int(sys.argv[2])))
