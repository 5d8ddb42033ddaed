"""The sending process of `crossdock bench kv`: `python -m launcher.bench_kv_far ADDRESS POOL_BYTES`.

Orders come as lines of JSON on standard input, and each is answered by one on standard output. It leaves when its input ends.
"""

import asyncio
import functools
import json
import socket
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import uvloop

from kvtransfer import rendezvous
from kvtransfer.layout import KvLayout
from kvtransfer.sender import KvSender
from kvtransfer.session import KvFailed, KvSent
from kvtransfer.settings import KvSettings
from proto import limits
from proto.kv import FirstToken
from proto.messages import Hello, Message, Role
from runtime import clock
from runtime.link import LinkClient, LinkSettings, Peer

RECEIVER_EPOCH = 1


class Way:
    """One transport: a link of its own, so that the other end can tell them apart, and a sender."""

    def __init__(self, address: str, name: str) -> None:
        self.name = name
        self.epoch = clock.new_epoch()
        self.peer: Peer | None = None
        self.up = asyncio.Event()
        self.sender: KvSender | None = None
        self.done: asyncio.Future[KvSent | KvFailed] | None = None
        self.sessions = 0
        hello = Hello(version=limits.PROTOCOL_VERSION, role=Role.PREFILL, epoch=self.epoch, name=name)
        self.link = LinkClient(
            address=address,
            hello=hello,
            on_up=lambda peer, welcome: self._on_up(peer),
            on_message=lambda peer, message, blob: self._on_message(message, blob),
            on_down=lambda peer, reason: None,
            settings=LinkSettings(heartbeat_ms=10_000),
        )

    def _on_up(self, peer: Peer) -> None:
        self.peer = peer
        self.up.set()

    def _on_message(self, message: Message, blob: bytes) -> None:
        if self.sender is not None:
            self.sender.handle(RECEIVER_EPOCH, message, blob)

    def _send(self, epoch: int, message: Message, blob: bytes) -> None:
        assert self.peer is not None
        self.peer.send(message, blob)

    def _on_result(self, result: KvSent | KvFailed) -> None:
        assert self.done is not None
        self.done.set_result(result)

    async def set_up(self, layout: KvLayout, memory: torch.Tensor, segment_bytes: int) -> None:
        if self.sender is not None:
            await self.sender.close()
        blocks = memory.shape[0] // layout.block_bytes
        pool = memory[: blocks * layout.block_bytes].view(torch.float32).view(layout.shape(blocks))
        self.sender = KvSender(
            layout=layout,
            pool=pool,
            epoch=self.epoch,
            clock=time.monotonic,
            send=self._send,
            on_result=self._on_result,
            settings=KvSettings(transports=(self.name,), segment_bytes=segment_bytes, segment_timeout_ms=30_000),
        )

    async def session(self, block_ids: list[int]) -> float:
        """Seconds from the offer to the acknowledgement of a session whose blocks are all ready."""
        assert self.sender is not None
        self.sessions += 1
        name = f"{self.name}-{self.sessions}"
        self.done = asyncio.get_running_loop().create_future()
        began = time.perf_counter()
        self.sender.open(name, 1, RECEIVER_EPOCH, len(block_ids))
        self.sender.blocks_ready(name, 1, 0, block_ids)
        self.sender.commit(name, 1, (FirstToken(0, 1),), ())
        result = await self.done
        if isinstance(result, KvFailed):
            raise RuntimeError(f"a transfer failed: {result.reason}")
        return time.perf_counter() - began


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
    memory = torch.from_numpy(filled(pool_bytes))
    ways: dict[str, Way] = {}
    orders = asyncio.StreamReader(limit=1 << 24)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin)
    while line := await orders.readline():
        order = json.loads(line)
        what = order.pop("do")
        answer: Any
        if what == "set_up":
            for name in order["transports"]:
                if name not in ways:
                    ways[name] = Way(address, name)
                    await ways[name].link.start()
                    await ways[name].up.wait()
                await ways[name].set_up(KvLayout(**order["layout"]), memory, order["segment_bytes"])
            answer = {name: ways[name].epoch for name in order["transports"]}
        elif what == "session":
            answer = await ways[order["transport"]].session(order["block_ids"])
        else:
            raw: Callable[..., float] = over_tcp if what == "tcp" else over_gloo
            answer = await loop.run_in_executor(None, functools.partial(raw, memory, **order))
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    for way in ways.values():
        if way.sender is not None:
            await way.sender.close()
        await way.link.close()


def filled(size: int) -> Any:
    """Bytes that are not all alike, every page of them written."""
    import numpy as np

    memory = np.empty(size, dtype=np.uint8)
    memory.view(np.uint64)[:] = np.arange(size // 8, dtype=np.uint64)
    return memory


if __name__ == "__main__":
    torch.set_num_threads(1)
    uvloop.run(main(sys.argv[1], int(sys.argv[2])))
