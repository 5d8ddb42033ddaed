"""The other process of the two-process tests: `python -m tests.kvtransfer.far_end sender|receiver PORT ATTEMPT`.

It speaks to the near end over one TCP connection, and leaves when its standard input is closed.
"""

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import IO

import torch

import tests.kvtransfer.gloo  # noqa: F401 - a stand-in for NCCL
from kvtransfer.memory.layout import KvLayout
from kvtransfer.receiver import KvReceiver
from kvtransfer.sender import KvSender
from kvtransfer.session.limits import KvSettings
from kvtransfer.session.session import KvFailed, KvSent, OfferAccepted
from proto.codec import WITH_BLOB, decode, encode
from proto.messages import Message
from runtime.settings import gpu_environment
from tests.kvtransfer.ends import FIRST, ON_GPU, filled_pool, memory_of, pool_in, settings_for, shuffled
from tests.kvtransfer.owners import Receives, Sends

LAYOUT = KvLayout(layers=2, kv_heads=4, head_dim=64, block_size=16, dtype="float32")  # 64 KiB per block
BLOCKS = 512
TRANSPORT = os.environ.get("CROSSDOCK_TEST_TRANSPORT", "gloo")
SETTINGS = settings_for(
    TRANSPORT,
    KvSettings(
        segment_bytes=1 << 20, segment_timeout_ms=5_000, rendezvous_timeout_ms=30_000, window_segments=2, window_bytes=1
    ),
)
"""With so small a window `endless` is announced bit by bit."""
NEAR_INCARNATION = 1
FAR_INCARNATION = 2
SOURCE_SEED = 11

TRANSFERS = {"one block": 1, "one segment": 16, "a few": 40, "many": 130}
"""Blocks of each request that the far sender hands over; when all are, it streams `endless` and never commits it."""
ENDLESS_BLOCKS = 300
ROOT = Path(__file__).parents[2]


def request_ids() -> dict[str, list[int]]:
    """The sender's blocks of each request."""
    return {
        name.replace(" ", "-"): shuffled(BLOCKS, count, seed=count)
        if count != 40
        else [*range(100, 130), *shuffled(100, 10, 3)]
        for name, count in TRANSFERS.items()
    }


class Wire:
    """Frames of proto over a TCP stream, each with its length before it, to a handler on the loop."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    def send(self, incarnation: int, message: Message, blob: bytes) -> None:
        frames = [encode(message), blob] if isinstance(message, WITH_BLOB) else [encode(message)]
        self._writer.write(bytes([len(frames)]) + b"".join(len(f).to_bytes(4, "little") + f for f in frames))

    async def pump(self, handle: Callable[[Message, bytes], None]) -> None:
        """Until the other end closes or is killed."""
        try:
            while True:
                (count,) = await self._reader.readexactly(1)
                frames = []
                for _ in range(count):
                    length = int.from_bytes(await self._reader.readexactly(4), "little")
                    frames.append(await self._reader.readexactly(length))
                handle(*decode(frames))
        except (asyncio.IncompleteReadError, ConnectionError):
            return

    def close(self) -> None:
        self._writer.close()


@asynccontextmanager
async def far_module(
    module: str, role: str, *arguments: str, wait_s: float, **variables: str
) -> AsyncIterator[tuple[asyncio.subprocess.Process, Wire]]:
    """`python -m MODULE ROLE PORT ARGUMENT...` beside this process, and the wire to it. Raises AssertionError where it does not
    connect: with its words, and at once if it has ended."""
    connected: asyncio.Future[Wire] = asyncio.get_running_loop().create_future()
    server = await asyncio.start_server(lambda *streams: connected.set_result(Wire(*streams)), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    environment = {
        **{name: value for name, value in os.environ.items() if name != "NCCL_HOSTID"},  # each process has its own
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        **variables,
    }
    with tempfile.TemporaryFile() as words:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", module, role, str(port), *arguments),
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=words,
        )
        ended = asyncio.create_task(process.wait())
        try:
            await asyncio.wait((connected, ended), timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
            if not connected.done():
                text = said(words)
                raise AssertionError(
                    f"the far end has not connected; its status is {process.returncode}\n{text[-1000:]}"
                )
            wire = connected.result()
            yield process, wire
            wire.close()
        finally:
            server.close()
            if process.returncode is None:
                process.kill()
            await ended
            sys.stderr.write(said(words))


def said(words: IO[bytes]) -> str:
    words.seek(0)
    return words.read().decode(errors="replace")


async def main(role: str, port: int, attempt: int) -> None:
    wire = Wire(*await asyncio.open_connection("127.0.0.1", port))
    end: KvSender | KvReceiver
    unfinished = list(TRANSFERS)

    def on_result(result: KvSent | KvFailed) -> None:
        if isinstance(result, KvSent):
            unfinished.pop()
        if isinstance(result, KvSent) and not unfinished and isinstance(end, KvSender):
            end.open("endless", attempt, NEAR_INCARNATION, ENDLESS_BLOCKS)
            end.blocks_ready("endless", attempt, 0, shuffled(BLOCKS, ENDLESS_BLOCKS, 9))

    device = "cuda" if TRANSPORT in ON_GPU else "cpu"
    if role == "sender":
        end = KvSender(
            layout=LAYOUT,
            pool=filled_pool(LAYOUT, BLOCKS, SOURCE_SEED).to(device),
            incarnation=FAR_INCARNATION,
            clock=time.monotonic,
            owner=Sends(wire.send, on_result),
            settings=SETTINGS,
        )
        for request_id, ids in request_ids().items():
            end.open(request_id, attempt, NEAR_INCARNATION, len(ids))
            for start in range(0, len(ids), 50):
                end.blocks_ready(request_id, attempt, start, ids[start : start + 50])
            end.commit(request_id, attempt, FIRST, [])
    else:
        memory = memory_of(TRANSPORT)
        end = KvReceiver(
            layout=LAYOUT,
            pool=pool_in(memory, LAYOUT, BLOCKS, 12),
            memory=memory,
            incarnation=FAR_INCARNATION,
            clock=time.monotonic,
            listen_host="127.0.0.1",
            owner=Receives(wire.send, lambda incarnation, offer: OfferAccepted(tuple(range(offer.blocks)))),
            settings=SETTINGS,
        )
    pump = asyncio.create_task(wire.pump(lambda message, blob: end.handle(NEAR_INCARNATION, message, blob)))
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await end.close()
    wire.close()
    await pump


if __name__ == "__main__":
    if TRANSPORT in ON_GPU:
        gpu_environment.prepare("127.0.0.1", SETTINGS.rendezvous_timeout_ms)
    torch.set_num_threads(1)
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
