"""Memory that two processes share: it leaves nothing behind, and its size is for good; and room in a window."""

import os
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.memory.shared import SharedMemory
from kvtransfer.transports.shm import WindowRing


def test_shared_memory_is_sealed_and_unnamed():
    """Shared memory cannot be truncated and has no name in /dev/shm."""
    names = set(os.listdir("/dev/shm"))
    memory = SharedMemory(1 << 20)
    with pytest.raises(PermissionError):
        os.ftruncate(memory.descriptor, 0)
    assert set(os.listdir("/dev/shm")) == names
    memory.close()
    memory.tensor.fill_(7)  # the mapping stays
    assert memory.descriptor == -1


@given(
    st.integers(1, 20), st.lists(st.tuples(st.sampled_from(["take", "back", "undo"]), st.integers(1, 20)), max_size=200)
)
def test_window_stretches_never_overlap(sub_blocks: int, moves: list[tuple[str, int]]) -> None:
    """And where none is held, whatever is no longer than the ring has room."""
    ring, held = WindowRing(sub_blocks), deque[range]()
    for move, count in moves:
        if move == "take":
            first = ring.take(count)
            if first is None:
                assert held or count > sub_blocks
                continue
            taken = range(first, first + count)
            assert taken.start >= 0 and taken.stop <= sub_blocks
            assert not any(set(taken) & set(other) for other in held)
            held.append(taken)
        elif held and move == "back":
            ring.give_back()
            held.popleft()
        elif held:
            ring.take_back()
            held.pop()
