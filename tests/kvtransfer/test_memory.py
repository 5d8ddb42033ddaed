"""Memory that a pool lies in: it leaves nothing behind, and its pages are there before they are written to."""

import asyncio
import mmap
import os
import resource
import threading
import time

import pytest

from kvtransfer.memory import MADV_POPULATE_WRITE, Pages, SharedMemory, map_shared
from kvtransfer.session import Accepted
from proto.kv import Accept
from proto.messages import Message
from tests.kvtransfer.ends import LAYOUT, WAIT_S, Ends, with_ends

MIB = 1 << 20


@pytest.fixture
def provides() -> None:
    mapped = mmap.mmap(-1, mmap.PAGESIZE)
    try:
        mapped.madvise(MADV_POPULATE_WRITE)
    except OSError:
        pytest.skip("this kernel provides pages one by one only")


def taken(memory: SharedMemory) -> int:
    """Bytes that the kernel has provided."""
    return os.fstat(memory.descriptor).st_blocks * 512


def test_the_memory_cannot_be_cut_short_and_is_nowhere_to_be_found():
    names = set(os.listdir("/dev/shm"))
    memory = SharedMemory()
    memory.allocate(1 << 20)
    with pytest.raises(PermissionError):
        os.ftruncate(memory.descriptor, 0)
    memory.provide([0, 3], 4096)
    assert set(os.listdir("/dev/shm")) == names
    memory.close()


def test_a_sender_copies_to_pages_that_it_has_mapped_all_at_once(provides):
    memory = SharedMemory()
    memory.allocate(4 << 20).fill_(1)
    mapped = map_shared(memory.descriptor, 4 << 20)
    Pages(mapped).provide([0, 1, 3, 2], 1 << 20)
    faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    for start in range(0, 4 << 20, mmap.PAGESIZE):
        mapped[start] = 2
    assert resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - faults < 100  # of 1024 pages
    memory.close()


def test_blocks_that_are_expected_have_their_pages_soon(provides):
    memory = SharedMemory()
    memory.allocate(64 * MIB)
    memory.expect(range(3, 35), MIB)
    memory.expect([40, 63], MIB)
    until = time.monotonic() + WAIT_S
    while taken(memory) < 34 * MIB and time.monotonic() < until:
        time.sleep(0.01)
    assert taken(memory) == 34 * MIB
    memory.close()


def test_memory_that_is_closed_waits_for_nothing_expected():
    memory = SharedMemory()
    memory.allocate(64 * MIB)
    for _ in range(100):
        memory.expect(range(64), MIB)
    memory.close()
    assert memory.descriptor == -1
    assert not [thread for thread in threading.enumerate() if thread.name == "pool-pages"]


def test_an_accepted_offer_has_the_pages_of_its_blocks_before_any_kv_comes(provides):
    """But for those that it has the KV of."""

    accepted = asyncio.Event()

    async def test(ends: Ends) -> None:
        expected: list[tuple[list[int], int]] = []
        ends.memory.expect = lambda block_ids, block_bytes: expected.append((list(block_ids), block_bytes))  # type: ignore[method-assign]
        ends.accept = lambda epoch, offer: "not now"
        ends.sender.open("refused", 1, 2, 2)
        await ends.until(lambda: len(ends.results) == 1)
        assert not expected
        ends.accept = lambda epoch, offer: Accepted((7, 5, 6), 1)
        ends.sender.open("r", 1, 2, 3)
        async with asyncio.timeout(WAIT_S):
            await accepted.wait()
        assert expected == [([5, 6], LAYOUT.block_bytes)]

    def watch(message: Message) -> bool:
        if isinstance(message, Accept):
            accepted.set()
        return True

    with_ends(test, to_sender=watch)
