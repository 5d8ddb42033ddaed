"""The order in which lines of batches run, and how a file becomes lines."""

from collections import Counter

import pytest

from gateway.batches.line_queue import LineQueue
from gateway.batches.lines import LineCutter
from gateway.http.errors import ApiError


def drain(queue: LineQueue, now: float) -> list[tuple[str, int]]:
    found = []
    while (one := queue.next(now)) is not None:
        found.append(one)
    return found


def test_tenants_take_turns_oldest_batch_first() -> None:
    """Tenants take turns with their lines, each with its oldest batch first."""
    queue = LineQueue(6)
    queue.add("a1", "acme", range(100))
    queue.add("a2", "acme", range(100))
    queue.add("b1", "bell", range(2))
    assert drain(queue, 0.0) == [("a1", 0), ("b1", 0), ("a1", 1), ("b1", 1), ("a1", 2), ("a1", 3)]
    queue.answered("b1")
    assert not queue.is_done("b1")
    queue.answered("b1")
    assert queue.is_done("b1")
    assert Counter(batch for batch, _ in drain(queue, 0.0)) == {"a1": 2}


def test_later_tenant_gets_every_second_slot() -> None:
    """A later tenant gets every second slot that becomes free until both have equal shares."""
    queue = LineQueue(4)
    queue.add("a", "acme", range(100))
    drain(queue, 0.0)
    queue.add("b", "bell", range(100))
    got = []
    for _ in range(8):
        queue.answered("a")
        got += drain(queue, 0.0)
        queue.answered(got[-1][0])
        got += drain(queue, 0.0)
        if queue._batches["a"].running == 0:
            break
    assert {"a", "b"} == {batch for batch, _ in got[-2:]}


def test_refused_line_is_retried_alone() -> None:
    """A refused line runs again first and alone while its batch waits and other batches go on."""
    queue = LineQueue(8)
    queue.add("a", "acme", range(20))
    queue.add("b", "acme", range(1))
    assert [line for _, line in drain(queue, 0.0)] == list(range(8))
    for line in range(7, -1, -1):
        queue.put_back("a", line, 10.0)
    assert drain(queue, 9.9) == [("b", 0)], "another batch of the tenant goes on"
    assert drain(queue, 10.0) == [("a", 0)], "one line, to see whether there is room"
    queue.answered("a")
    assert drain(queue, 10.0) == [("a", 1), ("a", 2)]
    queue.answered("a")
    queue.answered("a")
    assert len(drain(queue, 10.0)) == 7, "all that the queue has beside b"


def test_removed_batch_frees_its_slots() -> None:
    """A removed batch leaves no running lines behind and can be added again."""
    queue = LineQueue(4)
    queue.add("a", "acme", range(20))
    drain(queue, 0.0)
    queue.remove("a")
    assert queue.running == 0 and "a" not in queue and queue.next(0.0) is None
    queue.add("a", "acme", [7])
    assert drain(queue, 0.0) == [("a", 7)]


@pytest.mark.parametrize("size", [1, 2, 5, 100])
def test_line_cutting_ignores_piece_sizes(size: int) -> None:
    """A file gives the same lines whatever the sizes of its pieces."""
    content = b"one\r\n\n  \nlonger line\n\nlast"
    cutter = LineCutter(20)
    found = [line for at in range(0, len(content), size) for line in cutter.feed(content[at : at + size])]
    found += cutter.end()
    assert b"".join(data for _, _, data in found) == content
    assert [number for number, is_request, _ in found if is_request] == [1, 4, 6]
    assert (cutter.lines, cutter.requests) == (6, 3)


def test_too_long_line_is_refused_early() -> None:
    """Too long a line is refused before its end has arrived."""
    cutter = LineCutter(20)
    assert [number for number, _, _ in cutter.feed(b"x\n" * 3)] == [1, 2, 3]
    assert not list(cutter.feed(b"12345678" * 2))
    with pytest.raises(ApiError, match="Line 4 "):
        list(cutter.feed(b"12345678"))
