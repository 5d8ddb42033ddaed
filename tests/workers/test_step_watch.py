"""When a step counts as hung, and what must not be taken for that."""

import math

import pytest

from worker.step_watch import FIRST_OF_ITS_SIZE, TIMES_THE_LONGEST, StepWatch


class Watched:
    def __init__(self, timeout_s: float = 10.0) -> None:
        self.watch, self.now = StepWatch(timeout_s), 1000.0

    def run(self, tokens: int, seconds: float, ends: bool = True) -> float | None:
        """Seconds after which the step was found hung, or None."""
        self.watch.begin(tokens, self.now)
        hung = self.pass_by(seconds)
        if ends:
            self.watch.end(self.now)
        return hung

    def pass_by(self, seconds: float) -> float | None:
        until = self.now + seconds
        while self.now < until:
            self.now += self.watch.look_every_s
            found = self.watch.hung_for(self.now)
            if found is not None:
                return found
        return None


def test_hung_step_is_found_in_time() -> None:
    """A step that does not end is found soon after its time limit."""
    watched = Watched()
    assert watched.run(8, 1.0) is None
    ran_s = watched.run(8, 100.0, ends=False)
    assert ran_s is not None and 10.0 < ran_s <= 10.0 + 2 * watched.watch.look_every_s


def test_larger_step_gets_more_time() -> None:
    """A step larger than any before gets a longer limit, since it may compile."""
    watched = Watched()
    assert watched.run(8, 9.0 * FIRST_OF_ITS_SIZE) is None, "it may compile"
    watched = Watched()
    assert watched.run(8, 0.1) is None
    ran_s = watched.run(9, 500.0)
    assert ran_s is not None and ran_s > 10.0 * FIRST_OF_ITS_SIZE


def test_slow_machine_is_not_hung() -> None:
    """A step several times as long as the longest before is not taken for hung."""
    watched = Watched()
    assert watched.run(256, 50.0) is None
    assert watched.run(256, 49.0 * TIMES_THE_LONGEST) is None


def test_stopped_time_does_not_count() -> None:
    """Time in which the whole process was stopped does not count."""
    watched = Watched()
    assert watched.run(8, 0.1) is None
    watched.watch.begin(8, watched.now)
    watched.now += 3600.0  # nobody looked: SIGSTOP, or the whole machine
    assert watched.watch.hung_for(watched.now) is None
    assert watched.pass_by(9.0) is None
    assert watched.pass_by(9.0) is not None, "and if it goes on hanging, it is found"


def test_short_stops_do_not_count() -> None:
    """Nor does that of stops between two checks, however short they are: 8 s of 24 count."""
    watched = Watched()
    assert watched.run(8, 0.1) is None
    watched.watch.begin(8, watched.now)
    for _ in range(8):
        watched.now += 3.0
        assert watched.watch.hung_for(watched.now) is None
    assert watched.pass_by(3.0) is not None


def test_step_limit_is_capped() -> None:
    """Which is what the watchdog of the process waits for."""
    for earlier_s, longest_s in ((1.0, 100.0), (50.0, 500.0)):
        watched = Watched()
        assert watched.run(8, earlier_s) is None
        assert watched.watch.longest_s == pytest.approx(longest_s, rel=0.1)
        longest_s = watched.watch.longest_s
        ran_s = watched.run(256, 1000.0, ends=False)
        assert ran_s is not None and longest_s < ran_s <= longest_s + 2 * watched.watch.look_every_s
    assert StepWatch(0.0).longest_s == math.inf


def test_idle_watch_finds_nothing() -> None:
    """No hang is found while no step runs."""
    watched = Watched()
    assert watched.run(8, 0.1) is None
    assert watched.pass_by(1000.0) is None
