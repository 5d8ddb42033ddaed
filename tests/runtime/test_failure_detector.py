"""Who is silent for too long, and who is only slow: both ends as they are driven, with time as a number."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.link.failure_detector import FailureDetector

HEARTBEAT_MS = 500
SLOW_S = 1.4
NOTICED_S = 2.0
EVER_S = 60.0


def lost_at(
    heard: list[float], source: random.Random, late_s: float, stalls: list[tuple[float, float]]
) -> float | None:
    """When a peer whose words arrive at `heard` is taken for lost. We wake up to `late_s` late, not at all in a stall, and read
    what has arrived only after having looked."""
    now, read = 0.0, 0.0
    failure_detector = FailureDetector(HEARTBEAT_MS, now)
    while now < EVER_S:
        pause = failure_detector.pause_s([read], now)
        assert 0.0 < pause <= failure_detector.beat_s
        before, now = now, now + pause + source.uniform(0.0, late_s)
        for start, end in stalls:
            if before <= end and start <= now:
                now = max(now, end)
        stalled = any(start <= now <= end + 1e-9 for start, end in stalls)
        # On time, the loop read all that came before this wake-up; after a stall it reads it only now.
        arrived = max((at for at in heard if at <= (before if stalled else now)), default=0.0)
        read = max(read, arrived)
        if failure_detector.look(now) and failure_detector.is_lost(read, now):
            return now
        read = max(read, max((at for at in heard if at <= now), default=0.0))
    return None


def words(source: random.Random, stopped_at: float, resumed_at: float) -> list[float]:
    """When the peer's heartbeats arrive: one each beat, each a little late, none while it is stopped."""
    at, found = 0.0, [0.0]
    while at < EVER_S:
        at += HEARTBEAT_MS / 2000 + source.uniform(0.0, 0.01)
        if stopped_at <= at < resumed_at:
            at = resumed_at
        if at < EVER_S:
            found.append(at + source.uniform(0.0, 0.02))
    return found


@given(seed=st.integers(0, 1 << 32), stopped_at=st.floats(0.5, 20.0), slow_s=st.floats(0.0, SLOW_S))
@settings(max_examples=150, deadline=None)
def test_slow_peer_is_not_lost(seed: int, stopped_at: float, slow_s: float) -> None:
    """A peer that is silent for a short time and then heard again is not lost."""
    source = random.Random(seed)
    heard = words(source, stopped_at, stopped_at + slow_s)
    assert lost_at([*heard, EVER_S], source, 0.02, []) is None


@given(seed=st.integers(0, 1 << 32), stopped_at=st.floats(0.5, 20.0))
@settings(max_examples=150, deadline=None)
def test_stopped_peer_is_noticed(seed: int, stopped_at: float) -> None:
    """A peer that stops is noticed within the time limit, but not before it may count as slow."""
    source = random.Random(seed)
    at = lost_at(words(source, stopped_at, 2 * EVER_S), source, 0.02, [])
    assert at is not None and stopped_at + SLOW_S < at <= stopped_at + NOTICED_S


@given(seed=st.integers(0, 1 << 32), stalls=st.lists(st.tuples(st.floats(0.5, 50.0), st.floats(0.0, 8.0)), max_size=4))
@settings(max_examples=150, deadline=None)
def test_own_pauses_do_not_count(seed: int, stalls: list[tuple[float, float]]) -> None:
    """Pauses of the observing process do not make a peer lost."""
    source = random.Random(seed)
    heard = words(source, 2 * EVER_S, 2 * EVER_S)
    assert lost_at(heard, source, 0.02, [(start, start + length) for start, length in stalls]) is None


def test_constant_lateness_is_no_excuse() -> None:
    """A stopped peer is noticed in time by a process that is always a little late."""
    source = random.Random(1)
    at = lost_at(words(source, 5.0, 2 * EVER_S), source, 0.1, [])
    assert at is not None and at < 5.0 + 2.5
