"""The wall clock for deleting what is old."""

from runtime.process.clock import SETTLE_S, SettledTime


def test_jump_is_believed_after_a_while() -> None:
    """At first, and after a jump forward, the time is not known for `SETTLE_S`; slow corrections change nothing."""
    time, jump_s = SettledTime(), 1e6
    assert time.at(1e9, 0.0) is None
    assert time.at(1e9 + SETTLE_S - 1, SETTLE_S - 1) is None
    assert time.at(1e9 + SETTLE_S, SETTLE_S) == 1e9 + SETTLE_S
    assert time.at(1e9 + SETTLE_S + 11, SETTLE_S + 10) is not None, "a second in ten is no jump"
    assert time.at(1e9 + jump_s, SETTLE_S + 20) is None
    assert time.at(1e9 + SETTLE_S + 30, SETTLE_S + 30) is None, "set right again"
    assert time.at(1e9 + 2 * SETTLE_S + 20, 2 * SETTLE_S + 20) is not None
