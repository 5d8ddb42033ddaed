"""`cuda_ipc` and `nccl` between two real processes on one card: the tests of the CPU transports, and what they have not."""

import asyncio
import subprocess
import sys
import time

import pytest
import torch

from kvtransfer.memory.cuda import Mapping
from kvtransfer.memory.device_copy import DeviceCopier, DeviceDigester, checksum, sub_block_sums
from kvtransfer.memory.pool import PoolRows
from proto.messages import Message
from tests.kvtransfer.ends import announces, filled_pool, same_bytes
from tests.kvtransfer.far_end import BLOCKS, LAYOUT
from tests.kvtransfer.test_device_copy import LAYOUTS
from tests.kvtransfer.test_two_processes import (
    WAIT_S,
    NearReceiver,
    far_process,
    test_far_end_leaves_cleanly,
    test_killed_receiver_is_reported,
    test_killed_sender_costs_open_sessions,
)

__all__ = ["test_far_end_leaves_cleanly", "test_killed_receiver_is_reported", "test_killed_sender_costs_open_sessions"]
pytestmark = pytest.mark.usefixtures("transport")
SURVIVOR_S = 3.0


@pytest.mark.parametrize("segment", [0, 2])
def test_killed_sender_releases_receiver(segment):
    """A sender killed amid a segment releases the receiver within three seconds."""

    async def main() -> None:
        near = NearReceiver()
        amid = asyncio.Event()

        def handle(message: Message, blob: bytes) -> None:
            if announces(message, "endless", segment):
                process.kill()
                amid.set()
            near.receiver.handle(51, message, blob)

        async with far_process("sender") as (process, wire):
            near.wire = wire
            pump = asyncio.create_task(wire.pump(handle))
            async with asyncio.timeout(WAIT_S):
                await amid.wait()
            began = time.monotonic()
            await near.until_known({"endless"})
            assert time.monotonic() - began <= SURVIVOR_S
            await pump
        assert near.receiver.counters["violations"] == 0
        await near.receiver.close()

    asyncio.run(main())


@pytest.mark.parametrize("layout", [*LAYOUTS, LAYOUT], ids=lambda layout: f"{layout.dtype}-{layout.block_bytes}")
def test_gpu_copies_match_cpu_copies(layout):
    """Copies and digests made on a GPU equal those made on the CPU."""
    source, target = filled_pool(layout, 24, 1), filled_pool(layout, 24, 2)
    there = [pool.to("cuda") for pool in (source, target)]
    from_, to = [3, 4, 5, 11, 0, 23], [7, 8, 9, 2, 20, 1]
    digests = [
        DeviceCopier(PoolRows(one, layout), PoolRows(other, layout), 1).copy(from_, to, lambda copied: True)
        for one, other in ((source, target), there)
    ]
    assert digests[0] == digests[1] == DeviceDigester(PoolRows(there[1], layout), 1).digest(to)
    assert same_bytes(there[1], target)


def test_cpu_and_gpu_checksums_are_equal():
    words = torch.randint(-(2**63), 2**63 - 1, (513, 4099), dtype=torch.int64)
    assert checksum([sub_block_sums(words)]) == checksum([sub_block_sums(words.cuda())])


def test_gpu_pool_crosses_through_host():
    """KV packed from a pool on a GPU into host memory spreads unchanged into another GPU pool."""
    pool, target = filled_pool(LAYOUT, BLOCKS, 1), filled_pool(LAYOUT, BLOCKS, 2).cuda()
    rows, other = PoolRows(pool.cuda(), LAYOUT), PoolRows(target, LAYOUT)
    for from_, to in (([5, 9, 2], [1, 4, 0]), ([7, 8], [30, 31])):
        packed = rows.packed(from_, rows.buffer(3))
        assert packed.device.type == "cpu"
        other.spread(to, packed)
        assert same_bytes(target[to], pool[from_])


FAR_POOL = """
import sys
from kvtransfer.memory.cuda import DeviceMemory
memory = DeviceMemory("cuda:0")
memory.allocate(1 << 21).fill_(7)
print(memory.handle.hex(), flush=True)
sys.stdin.read()
"""


def test_pool_of_a_rank_is_mapped():
    """A pool of another process, as that of another rank, is read and written as if it were on this GPU."""
    with subprocess.Popen(
        [sys.executable, "-c", FAR_POOL], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as far:
        assert far.stdout is not None
        mapping = Mapping(bytes.fromhex(far.stdout.readline()), 1 << 21, torch.device("cuda", 0), of_peer=True)
        assert mapping.tensor is not None and int(mapping.tensor.sum()) == 7 << 21
        mapping.tensor[:5].fill_(9)
        assert mapping.tensor.cpu()[:6].tolist() == [9] * 5 + [7]
        mapping.close()
        far.communicate("", timeout=30)
