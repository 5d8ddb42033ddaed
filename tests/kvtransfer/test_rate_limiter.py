"""How fast KV is taken in while streams run."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.rate_limiter import ByteBucket, Lane, RateLimiter
from kvtransfer.session.limits import KvSettings
from proto.kv import Announce
from tests.kvtransfer.ends import Ends, with_ends

RATE, BURST = 1_000.0, 4_000
SIZES = st.lists(st.tuples(st.integers(1, 3_000), st.floats(0.0, 5.0)), min_size=1, max_size=60)


@given(SIZES)
def test_intake_keeps_to_rate_and_burst(pieces: list[tuple[int, float]]) -> None:
    """In any stretch of time, up to the piece that overdraws; and nothing waits that has room."""
    bucket, now = ByteBucket(RATE, BURST), 0.0
    begun: list[tuple[float, int]] = []
    for size, pause_s in pieces:
        now += pause_s
        wait_s = bucket.wait_s(now)
        assert wait_s <= 3_000 / RATE
        now += wait_s
        assert bucket.wait_s(now) <= 1e-9
        bucket.take(size)
        begun.append((now, size))
    for first, (start, _) in enumerate(begun):
        for last in range(first, len(begun)):
            end, final = begun[last]
            between = sum(size for _, size in begun[first : last + 1])
            assert between <= BURST + (end - start) * RATE + final + 1e-3


@given(st.lists(st.tuples(st.integers(1, 100_000), st.floats(0.0, 1.0), st.booleans()), min_size=1, max_size=60))
def test_bucket_debt_is_bounded(pieces: list[tuple[int, float, bool]]) -> None:
    """The wait after any piece is at most the time for one burst and that piece."""
    bucket, now = ByteBucket(RATE, BURST), 0.0
    for size, pause_s, is_patient in pieces:
        now += pause_s
        if is_patient:
            now += bucket.wait_s(now)
        bucket.take(size)
        assert bucket.wait_s(now) <= (BURST + size) / RATE + 1e-9


@given(st.lists(st.integers(1, 1 << 30), min_size=1, max_size=40), st.integers(1, BURST))
def test_idle_intake_costs_nothing_later(idle: list[int], size: int) -> None:
    """Gigabytes that crossed while no stream ran: the first piece after them begins at once, and so does a whole burst."""

    async def main() -> None:
        busy, begun = False, 0
        rate_limiter, lane = RateLimiter(ByteBucket(RATE, BURST), 60.0, lambda: 0.0, lambda: busy), Lane()

        def begin() -> None:
            nonlocal begun
            begun += 1

        for each in idle:
            rate_limiter.start(lane, lambda each=each: each, begin)  # type: ignore[misc]
        assert begun == len(idle)
        busy = True
        for _ in range(BURST // size):
            rate_limiter.start(lane, lambda: size, begin)
        assert begun == len(idle) + BURST // size

    asyncio.run(main())


def run_pace(pieces: int, *, busy: bool, wait_max_s: float = 60.0) -> tuple[list[int], float]:
    """The order in which they begin, and the seconds it took them, on a loop of their own."""

    async def main() -> tuple[list[int], float]:
        loop = asyncio.get_running_loop()
        begun: list[int] = []
        done = asyncio.Event()

        def begin(number: int) -> None:
            begun.append(number)
            if len(begun) == pieces:
                done.set()

        rate_limiter = RateLimiter(ByteBucket(10_000.0, 1), wait_max_s, loop.time, lambda: busy)
        began, lane = loop.time(), Lane()
        for number in range(pieces):
            rate_limiter.start(lane, lambda: 1_000, lambda number=number: begin(number))  # type: ignore[misc]
        async with asyncio.timeout(30):
            await done.wait()
        return begun, loop.time() - began

    return asyncio.run(main())


def test_busy_intake_is_held_back() -> None:
    """Pieces are held back to the rate while streams run, and begin in order."""
    begun, took_s = run_pace(5, busy=True)
    assert begun == [0, 1, 2, 3, 4]
    assert took_s >= 0.38  # 4 kB at 10 kB/s; the first goes at once


def test_idle_intake_is_not_held_back() -> None:
    """Pieces are not held back to the rate while no stream runs."""
    begun, took_s = run_pace(200, busy=False)
    assert begun == list(range(200)) and took_s < 15.0  # 20 s at that rate


def test_hold_time_is_bounded() -> None:
    """A piece is held back no longer than its sender waits for it."""
    begun, took_s = run_pace(50, busy=True, wait_max_s=0.05)
    assert begun == list(range(50)) and took_s < 4.5  # 5 s at that rate


def test_simultaneous_pieces_keep_the_rate() -> None:
    """Each waits from when the one before it began: of all that came at once only the first may be late by then."""
    begun, took_s = run_pace(8, busy=True, wait_max_s=0.2)
    assert begun == list(range(8)) and took_s >= 0.68


def test_unwanted_pieces_are_not_held_back() -> None:
    """Pieces that became unwanted are not held back, though other pieces take turns in between."""

    async def main() -> None:
        loop, lane, done = asyncio.get_running_loop(), Lane(), asyncio.Event()
        wanted = 1_000
        rate_limiter, other = RateLimiter(ByteBucket(5_000.0, 1), 60.0, loop.time, lambda: True), Lane()
        for _ in range(500):
            rate_limiter.start(other, lambda: 1_000, lambda: None)  # its turns come in between
        for _ in range(500):
            rate_limiter.start(lane, lambda: wanted, lambda: None)
        rate_limiter.start(lane, lambda: wanted, done.set)
        wanted = 0
        async with asyncio.timeout(20):  # 100 s at that rate
            await done.wait()

    asyncio.run(main())


def test_pairs_take_turns() -> None:
    """A pair with one piece begins it after at most two pieces of a pair with many."""

    async def main() -> list[str]:
        begun: list[str] = []
        done = asyncio.Event()
        rate_limiter, lanes = (
            RateLimiter(ByteBucket(20_000.0, 1), 60.0, asyncio.get_running_loop().time, lambda: True),
            (Lane(), Lane()),
        )
        for number in range(20):
            rate_limiter.start(lanes[0], lambda: 1_000, lambda number=number: begun.append(f"many {number}"))  # type: ignore[misc]
        rate_limiter.start(lanes[1], lambda: 1_000, lambda: begun.append("one"))
        rate_limiter.start(lanes[0], lambda: 1_000, done.set)
        async with asyncio.timeout(30):
            await done.wait()
        return begun

    begun = asyncio.run(main())
    assert begun.index("one") <= 2, begun
    assert [name for name in begun if name != "one"] == [f"many {number}" for number in range(20)]


@pytest.mark.parametrize("transport", ["shm", "gloo", "tcp"])
def test_narrow_bucket_still_delivers(transport: str) -> None:
    """Transfers arrive through a narrow bucket, and one of them can be given up."""
    settings = KvSettings(
        transports=(transport,), segment_bytes=1, bytes_per_s=1 << 19, burst_bytes=1, segment_timeout_ms=20_000
    )

    async def body(ends: Ends) -> None:
        for name, first in (("r1", 0), ("r2", 20), ("r3", 40)):
            ends.transfer(name, list(range(first, first + 10)))
        await ends.until(lambda: len(ends.committed) >= 1)
        ends.receiver.abort("r3", 1, "not wanted")
        await ends.ended(3)
        assert {commit.request_id for commit, _, _ in ends.committed} == {"r1", "r2"}, ends.failed
        assert [failure[0] for failure in ends.failed] == ["r3"]

    with_ends(body, settings=settings)


@pytest.mark.parametrize("transport", ["shm", "gloo", "tcp"])
def test_abort_returns_blocks_at_once(transport: str) -> None:
    """Its segments would take a second each, and the other session's would wait for them."""
    settings = KvSettings(
        transports=(transport,), segment_bytes=1, bytes_per_s=1, burst_bytes=1, segment_timeout_ms=4_000,
        window_segments=64,
    )  # fmt: skip

    async def body(ends: Ends) -> None:
        ends.transfer("given up", list(range(40)))
        await ends.until(lambda: any(isinstance(frame, Announce) for frame in ends.frames))
        ends.receiver.abort("given up", 1, "not wanted")
        ends.transfer("wanted", [50])
        async with asyncio.timeout(10):
            await ends.ended(2)
        assert [commit.request_id for commit, _, _ in ends.committed] == ["wanted"]

    with_ends(body, settings=settings)
