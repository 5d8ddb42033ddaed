"""When room that is held comes free, by how long it has been held."""

from itertools import pairwise

import pytest

from scheduler.waiting.releases import AGES, Releases


def test_cohorts_end_together() -> None:
    """Work that was placed together comes free together: a request just before the gap waits for all of it."""
    releases = Releases()
    for cycle in range(40):
        began = 10.0 * cycle
        cohorts = [releases.take(100, began) for _ in range(10)]
        for cohort in cohorts:
            releases.give_back(100, cohort, 10.0, began + 10.0)
    began = 400.0
    for _ in range(10):
        releases.take(100, began)
    assert releases.wait_s(100, began + 1.0) == pytest.approx(9.0, abs=1.0), "a mean rate would say 1 s"


def test_waits_grow_with_the_work() -> None:
    """More work waits longer, within what is held and beyond it."""
    releases = Releases()
    for number in range(400):
        cohort = releases.take(100, 0.1 * number)
        releases.give_back(100, cohort, 2.0, 0.1 * number + 2.0)
    held = [releases.take(100, 45.0 + 0.1 * number) for number in range(20)]
    waits = [releases.wait_s(work, 47.0) for work in range(100, 4000, 100)]
    assert held and all(one <= other for one, other in pairwise(waits)) and waits[-1] > 2.0


def test_intervals_keep_up_with_ages() -> None:
    """However much longer work is held than before, few intervals cover its mean time: a wait is projected in bounded time."""
    releases = Releases()
    for held_s in (0.1, 1e6, 0.1, 1e9):
        releases.give_back(100, releases.take(100, 0.0), held_s, held_s)
        assert releases.mean_s <= AGES / 4 * releases.width_s
