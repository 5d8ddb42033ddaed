"""How fast KV moves between two processes on one GPU, beside a copy within it: `python -m tools.gpu.bench`.

The other process is `python -m tools.gpu.bench far PORT TRANSPORT SEGMENT_MIB`.
"""

import asyncio
import json
import os
import statistics
import sys
import time

import torch

from kvtransfer.memory.device_copy import DeviceCopier
from kvtransfer.memory.layout import KvLayout
from kvtransfer.memory.pool import PoolRows
from kvtransfer.receiver import KvReceiver
from kvtransfer.sender import KvSender
from kvtransfer.session.limits import KvSettings
from kvtransfer.session.session import KvFailed, KvSent, OfferAccepted
from runtime.settings import gpu_environment
from tests.kvtransfer import ends
from tests.kvtransfer.ends import FIRST, memory_of, shuffled
from tests.kvtransfer.far_end import FAR_INCARNATION, NEAR_INCARNATION, Wire, far_module
from tests.kvtransfer.owners import Receives, Sends
from tools.gpu.device import DTYPE, memory, seconds_of, synchronize
from tools.gpu.record import DEVICE, ON_GPU, attempt

LAYOUT = (
    KvLayout(layers=32, kv_heads=8, head_dim=128, block_size=16, dtype="bfloat16")
    if ON_GPU
    else KvLayout(layers=2, kv_heads=2, head_dim=16, block_size=16, dtype="float32")
)
"""2 MiB a block: 16 tokens of an 8B model."""
BLOCKS = 512
SESSION_BLOCKS = 128
SESSIONS = 12
SEGMENT_MIB = (64, 8, 256)
TRANSPORTS = ("cuda_ipc", "nccl", "tcp") if ON_GPU else ("tcp",)
WAIT_S = 40.0


def settings(transport: str, segment_mib: int) -> KvSettings:
    every = 16 if os.environ.get("CROSSDOCK_TEST_DIGEST") == "sampled" else 1
    return KvSettings(
        transports=(transport,),
        segment_bytes=segment_mib << 20,
        segment_timeout_ms=10_000,
        rendezvous_timeout_ms=40_000,
        digest_every=every,
    )


async def far(port: int, transport: str, segment_mib: int) -> None:
    """Sends one session after the other, and prints their seconds from offer to acknowledgement as JSON."""
    wire = Wire(*await asyncio.open_connection("127.0.0.1", port))
    ended: asyncio.Queue[KvSent | KvFailed] = asyncio.Queue()
    pool = torch.randn(LAYOUT.shape(BLOCKS), dtype=DTYPE, device=DEVICE)
    synchronize()
    sender = KvSender(
        layout=LAYOUT,
        pool=pool,
        incarnation=FAR_INCARNATION,
        clock=time.monotonic,
        owner=Sends(wire.send, ended.put_nowait),
        settings=settings(transport, segment_mib),
    )
    pump = asyncio.create_task(wire.pump(lambda message, blob: sender.handle(NEAR_INCARNATION, message, blob)))
    seconds = []
    for index in range(SESSIONS):
        began = time.perf_counter()
        sender.open(f"bench-{index}", 1, NEAR_INCARNATION, SESSION_BLOCKS)
        sender.blocks_ready(f"bench-{index}", 1, 0, shuffled(BLOCKS, SESSION_BLOCKS, index))
        sender.commit(f"bench-{index}", 1, FIRST, [])
        async with asyncio.timeout(WAIT_S):
            result = await ended.get()
        if isinstance(result, KvFailed):
            raise SystemExit(f"{transport}: {result.reason}")
        seconds.append(time.perf_counter() - began)
    sys.stdout.write(json.dumps(seconds) + "\n")
    sys.stdout.flush()
    await sender.close()
    wire.close()
    await pump


async def between_processes(transport: str, segment_mib: int, digest: str) -> dict[str, float]:
    """Returns the median GB/s of sessions of SESSION_BLOCKS scattered blocks, and the seconds of the first one, in which the
    two processes meet."""
    os.environ["CROSSDOCK_TEST_DIGEST"] = digest
    pool_memory = memory_of(transport)
    raw = torch.zeros(BLOCKS * LAYOUT.block_bytes, dtype=torch.uint8)
    if pool_memory is not None:
        raw = pool_memory.allocate(raw.numel())
    elif ON_GPU:
        raw = raw.to(DEVICE)
    pool = raw.view(DTYPE).view(LAYOUT.shape(BLOCKS))
    synchronize()
    wires: list[Wire] = []
    receiver = KvReceiver(
        layout=LAYOUT,
        pool=pool,
        incarnation=NEAR_INCARNATION,
        clock=time.monotonic,
        listen_host="127.0.0.1",
        owner=Receives(
            lambda incarnation, message, blob: wires[0].send(incarnation, message, blob),
            lambda incarnation, offer: OfferAccepted(tuple(shuffled(BLOCKS, offer.blocks, 99))),
        ),
        settings=settings(transport, segment_mib),
        memory=pool_memory,
    )
    try:
        arguments = ("far", transport, str(segment_mib))
        async with far_module("tools.gpu.bench", *arguments, wait_s=WAIT_S) as (process, wire), asyncio.timeout(WAIT_S):
            wires.append(wire)
            pump = asyncio.create_task(wire.pump(lambda message, blob: receiver.handle(FAR_INCARNATION, message, blob)))
            output, _ = await process.communicate()
            await pump
    finally:
        await receiver.close()
    if process.returncode:
        raise RuntimeError(f"the sender ended with {process.returncode}")
    seconds = json.loads(output)  # the first two meet and warm up
    gb = SESSION_BLOCKS * LAYOUT.block_bytes / 1e9
    return {"GB_s": gb / statistics.median(seconds[2:]), "slowest_GB_s": gb / max(seconds[2:]), "first_s": seconds[0]}


def within_process() -> dict[str, float]:
    """GB/s of a plain device copy, and of what a `cuda_ipc` sender does, by the wall's clock, for 64 MiB and for 256 MiB."""
    source, target = (torch.zeros(LAYOUT.shape(BLOCKS), dtype=DTYPE, device=DEVICE) for _ in range(2))
    found = {}
    for blocks in (32, 128):
        size = blocks * LAYOUT.block_bytes
        found[f"copy {size >> 20} MiB"] = size / seconds_of(lambda n=blocks: target[:n].copy_(source[:n])) / 1e9
        from_, to = shuffled(BLOCKS, blocks, 1), shuffled(BLOCKS, blocks, 2)
        for digest, every in (("full", 1), ("none", 1024)):
            copier = DeviceCopier(PoolRows(source, LAYOUT), PoolRows(target, LAYOUT), every)
            seconds = []
            for _ in range(20):
                synchronize()
                began = time.perf_counter()
                copier.copy(from_, to, lambda copied: True)
                seconds.append(time.perf_counter() - began)
            found[f"copier {size >> 20} MiB, digest {digest}"] = size / statistics.median(seconds[2:]) / 1e9
    return found


def measure() -> None:
    attempt("kv", "within a process, GB/s", within_process)
    every = [(one, mib, digest) for mib in SEGMENT_MIB for digest in ("full", "sampled") for one in ends.ON_GPU]
    first = [(one, SEGMENT_MIB[0] if one in ends.ON_GPU else 8, "full") for one in TRANSPORTS]
    for of in dict.fromkeys([*first, *(every if ON_GPU else [])]):
        name = "{}, segments of {} MiB, digest {}".format(*of)
        attempt("kv", name, lambda of=of: asyncio.run(between_processes(*of)) | {"memory": memory()})


if __name__ == "__main__":
    gpu_environment.prepare("127.0.0.1", 40_000)
    if sys.argv[1:2] == ["far"]:
        asyncio.run(far(int(sys.argv[2]), sys.argv[3], int(sys.argv[4])))
    else:
        measure()
