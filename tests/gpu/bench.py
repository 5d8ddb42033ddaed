"""How fast KV moves between two processes on one GPU, beside a copy within it: `python -m tests.gpu.bench`.

Prints one line of JSON. The other process is `python -m tests.gpu.bench far PORT TRANSPORT SEGMENT_MIB`.
"""

import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kvtransfer.memory.device_copy import DeviceCopier
from kvtransfer.memory.layout import KvLayout
from kvtransfer.memory.pool import PoolRows
from kvtransfer.receiver import KvReceiver
from kvtransfer.sender import KvSender
from kvtransfer.session.limits import KvSettings
from kvtransfer.session.session import Accepted, KvFailed, KvSent
from runtime.settings import gpu_environment
from tests.kvtransfer.ends import FIRST, memory_of, shuffled
from tests.kvtransfer.far_end import FAR_EPOCH, NEAR_EPOCH, Wire

LAYOUT = KvLayout(layers=32, kv_heads=8, head_dim=128, block_size=16, dtype="bfloat16")
"""2 MiB a block: 16 tokens of an 8B model."""
BLOCKS = 512
SESSION_BLOCKS = 128
SESSIONS = 12
SEGMENT_MIB = (8, 64, 256)
ROOT = Path(__file__).parents[2]
WAIT_S = 120.0


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
    """One session after the other; their seconds, from offer to acknowledgement, as JSON."""
    wire = Wire(*await asyncio.open_connection("127.0.0.1", port))
    ended: asyncio.Queue[KvSent | KvFailed] = asyncio.Queue()
    pool = torch.randn(LAYOUT.shape(BLOCKS), dtype=torch.bfloat16, device="cuda")
    torch.cuda.synchronize()
    sender = KvSender(
        layout=LAYOUT,
        pool=pool,
        incarnation=FAR_EPOCH,
        clock=time.monotonic,
        send=wire.send,
        on_result=ended.put_nowait,
        settings=settings(transport, segment_mib),
    )
    pump = asyncio.create_task(wire.pump(lambda message, blob: sender.handle(NEAR_EPOCH, message, blob)))
    seconds = []
    for index in range(SESSIONS):
        began = time.perf_counter()
        sender.open(f"bench-{index}", 1, NEAR_EPOCH, SESSION_BLOCKS)
        sender.blocks_ready(f"bench-{index}", 1, 0, shuffled(BLOCKS, SESSION_BLOCKS, index))
        sender.commit(f"bench-{index}", 1, FIRST, [])
        async with asyncio.timeout(WAIT_S):
            result = await ended.get()
        if isinstance(result, KvFailed):
            raise SystemExit(f"{transport}: {result.reason}")
        seconds.append(time.perf_counter() - began)
    sys.stdout.write(json.dumps(seconds[2:]) + "\n")  # the first ones meet and warm up
    sys.stdout.flush()
    await sender.close()
    wire.close()
    await pump


async def between_processes(transport: str, segment_mib: int, digest: str) -> float:
    """GB/s of sessions of SESSION_BLOCKS scattered blocks, the median."""
    os.environ["CROSSDOCK_TEST_DIGEST"] = digest
    memory = memory_of(transport)
    raw = torch.zeros(BLOCKS * LAYOUT.block_bytes, dtype=torch.uint8)
    if memory is not None:
        raw = memory.allocate(raw.numel())
    pool = raw.view(torch.bfloat16).view(LAYOUT.shape(BLOCKS))
    torch.cuda.synchronize()
    joined: asyncio.Future[Wire] = asyncio.get_running_loop().create_future()
    wires: list[Wire] = []
    receiver = KvReceiver(
        layout=LAYOUT,
        pool=pool,
        incarnation=NEAR_EPOCH,
        clock=time.monotonic,
        send=lambda incarnation, message, blob: wires[0].send(incarnation, message, blob),
        listen_host="127.0.0.1",
        accept=lambda incarnation, offer: Accepted(tuple(shuffled(BLOCKS, offer.blocks, 99))),
        on_committed=lambda *commit: None,
        on_failed=lambda *failure: None,
        settings=settings(transport, segment_mib),
        memory=memory,
    )
    server = await asyncio.start_server(lambda r, w: joined.set_result(Wire(r, w)), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    environment = {name: value for name, value in os.environ.items() if name != "NCCL_HOSTID"}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.gpu.bench", "far", str(port), transport, str(segment_mib)),
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(WAIT_S):
            wires.append(await joined)
            pump = asyncio.create_task(wires[0].pump(lambda message, blob: receiver.handle(FAR_EPOCH, message, blob)))
            output, _ = await process.communicate()
            await pump
    finally:
        server.close()
        if process.returncode is None:
            process.kill()
            await process.wait()
        await receiver.close()
    if process.returncode:
        raise RuntimeError(f"the sender ended with {process.returncode}")
    return SESSION_BLOCKS * LAYOUT.block_bytes / statistics.median(json.loads(output)) / 1e9


def gpu_seconds(work: Callable[[], object], rounds: int = 20) -> float:
    """Of one call, from the device's clock; the median."""
    found = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        work()
        ended.record()
        torch.cuda.synchronize()
        found.append(began.elapsed_time(ended) / 1e3)
    return statistics.median(found[2:])


def within_process() -> dict[str, float]:
    """GB/s of a plain device copy, and of what a `cuda_ipc` sender does, by the wall's clock, for 64 MiB and for 256 MiB."""
    source, target = (torch.zeros(LAYOUT.shape(BLOCKS), dtype=torch.bfloat16, device="cuda") for _ in range(2))
    found = {}
    for blocks in (32, 128):
        size = blocks * LAYOUT.block_bytes
        found[f"copy {size >> 20} MiB"] = size / gpu_seconds(lambda n=blocks: target[:n].copy_(source[:n])) / 1e9
        from_, to = shuffled(BLOCKS, blocks, 1), shuffled(BLOCKS, blocks, 2)
        for digest, every in (("full", 1), ("none", 1024)):
            copier = DeviceCopier(PoolRows(source, LAYOUT), PoolRows(target, LAYOUT), every)
            seconds = []
            for _ in range(20):
                torch.cuda.synchronize()
                began = time.perf_counter()
                copier.copy(from_, to, lambda copied: True)
                seconds.append(time.perf_counter() - began)
            found[f"copier {size >> 20} MiB, digest {digest}"] = size / statistics.median(seconds[2:]) / 1e9
    return found


def measure() -> dict[str, Any]:
    result: dict[str, Any] = {"device": torch.cuda.get_device_name(0), "within_GB_s": within_process(), "pairs": []}
    for transport in ("cuda_ipc", "nccl", "gloo"):
        for segment_mib in SEGMENT_MIB if transport != "gloo" else (8,):
            for digest in ("full", "sampled") if transport != "gloo" else ("full",):
                row = {"transport": transport, "segment_mib": segment_mib, "digest": digest}
                try:
                    row["GB_s"] = asyncio.run(between_processes(transport, segment_mib, digest))
                except (OSError, RuntimeError) as error:  # the others are still worth a figure
                    row["error"] = f"{type(error).__name__}: {error}"
                result["pairs"].append(row)
    return result


if __name__ == "__main__":
    gpu_environment.prepare("127.0.0.1", 40_000)
    if sys.argv[1:2] == ["far"]:
        asyncio.run(far(int(sys.argv[2]), sys.argv[3], int(sys.argv[4])))
    else:
        sys.stdout.write(json.dumps(measure()) + "\n")
