"""`shm` between two real processes: what a sender that is killed or stopped amid a segment does to the receiver's blocks, and
that nothing is left of it."""

import asyncio
import gc
import os
import signal
import socket
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from proto.messages import Message
from tests.kvtransfer import ends, far_end
from tests.kvtransfer.ends import announces
from tests.kvtransfer.test_two_processes import WAIT_S, NearReceiver, far_process

pytestmark = pytest.mark.cluster

INCARNATION = 41


@pytest.fixture(autouse=True)
def only_shm(monkeypatch):
    monkeypatch.setattr(ends, "TRANSPORT", "shm")


def what_is_open() -> tuple[Counter[str], list[str], list[str]]:
    """(descriptors of the kinds that pairs use, mappings of their memory, their threads) of this process."""
    gc.collect()
    descriptors: Counter[str] = Counter()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(entry)
            if target.startswith("socket"):
                with socket.socket(fileno=os.dup(int(entry.name))) as one:
                    target = one.type.name
        except OSError:
            continue  # that of the listing itself
        descriptors[target] += any(kind in target for kind in ("crossdock-kv", "eventfd", "SEQPACKET"))
    maps = [
        line.split(maxsplit=5)[5] for line in Path("/proc/self/maps").read_text().splitlines() if "crossdock-kv" in line
    ]
    return +descriptors, sorted(maps), [t.name for t in threading.enumerate() if t.name.startswith("kv-")]


async def amid_a_segment(near: NearReceiver, attempt: int, strike: int, at: int) -> tuple[object, object]:
    """Serve a far sender, and strike it with a signal when it has announced segment `at` of `endless`, before anything of
    it was granted. Returns its process's context, to be left, and the process."""
    struck = asyncio.Event()
    context = far_process("sender", attempt)
    process, wire = await context.__aenter__()

    def handle(message: Message, blob: bytes) -> None:
        if announces(message, "endless", at):
            os.kill(process.pid, strike)
            struck.set()
        near.receiver.handle(INCARNATION + attempt, message, blob)

    near.wire = wire
    near.pump = asyncio.create_task(wire.pump(handle))  # type: ignore[attr-defined]
    async with asyncio.timeout(WAIT_S):
        await struck.wait()
    return context, process


def test_killed_sender_leaves_nothing():
    """A killed sender's session fails within two seconds, and leaves no descriptor, mapping or thread."""

    async def main() -> None:
        near = NearReceiver()
        before = what_is_open()
        for attempt in (1, 2):
            context, process = await amid_a_segment(near, attempt, signal.SIGKILL, at=2)
            began = time.monotonic()
            await process.wait()  # type: ignore[attr-defined]
            await near.until_known({"endless"})  # no word of it from anybody: the connection has ended
            assert time.monotonic() - began < 2.0
            assert near.failed["endless"][1].startswith("pair 1, shm: the peer is gone")
            await context.__aexit__(None, None, None)  # type: ignore[attr-defined]
            await near.pump  # type: ignore[attr-defined]
            await near.receiver._all_down.wait()
            near.free, near.failed, near.arrived = list(range(far_end.BLOCKS)), {}, {}
            assert what_is_open() == before
        assert not [name for name in os.listdir("/dev/shm") if "crossdock" in name]
        await near.receiver.close()

    asyncio.run(main())


def test_stopped_sender_writes_nothing_later():
    """It maps a window alone: its blocks are free again while it stands still, and may be another's when it wakes."""

    async def main() -> None:
        near = NearReceiver()
        context, process = await amid_a_segment(near, 1, signal.SIGSTOP, at=2)
        near.receiver.peer_lost(INCARNATION + 1, "no heartbeat")
        await near.until_known({"endless"})
        block_ids, _ = near.failed["endless"]
        assert block_ids
        near.pool[block_ids] = 0.5
        others = near.pool.clone()
        os.kill(process.pid, signal.SIGCONT)  # type: ignore[attr-defined]
        await context.__aexit__(None, None, None)  # type: ignore[attr-defined]  # it has found out, and ended
        assert ends.same_bytes(near.pool, others)
        await near.receiver.close()
        assert what_is_open()[2] == []

    asyncio.run(main())
