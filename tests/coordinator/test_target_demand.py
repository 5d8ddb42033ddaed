"""Decode workers by classes of targets: a class in need gets one that another can spare, and nothing goes back and forth."""

import random

import pytest

from scheduler.fairness.target_demand import TargetLoad, who_gives

STRICT, LAX, NONE = 21, 28, 0


def test_spare_worker_goes_to_need() -> None:
    """A class gives a worker that its others can do without, and keeps the last one that has a load."""
    demands = {STRICT: TargetLoad(1, 1.0), LAX: TargetLoad(3, 1.5)}
    assert who_gives([STRICT], demands, {}) == (STRICT, LAX)
    assert who_gives([STRICT], demands | {LAX: TargetLoad(2, 1.5)}, {}) is None
    assert who_gives([STRICT], demands | {LAX: TargetLoad(1, 0.1)}, {}) is None
    assert who_gives([STRICT], demands | {LAX: TargetLoad(1, 0.0)}, {}) == (STRICT, LAX)


def test_class_in_need_has_one_worker() -> None:
    """A class without a worker gets one of two, whatever the weights."""
    assert who_gives([STRICT, LAX], {LAX: TargetLoad(2, 2.0)}, {LAX: 9.0, STRICT: 1.0}) == (STRICT, LAX)
    assert who_gives([STRICT, LAX], {LAX: TargetLoad(1, 1.0)}, {}) is None


@pytest.mark.parametrize(("weights", "workers"), [({}, {4}), ({STRICT: 3.0}, {6}), ({LAX: 3.0}, {2})])
def test_overload_divides_by_weight(weights: dict[int, float], workers: set[int]) -> None:
    """Where all classes need more than there is, each has its share by weight."""
    held = {STRICT: 8, LAX: 0}
    for _ in range(20):
        given = who_gives(
            [STRICT, LAX], {one: TargetLoad(count, count) for one, count in held.items() if count}, weights
        )
        if given is None:
            break
        held[given[0]], held[given[1]] = held[given[0]] + 1, held[given[1]] - 1
    assert {held[STRICT]} == workers


@pytest.mark.parametrize("seed", range(20))
def test_assignment_comes_to_rest(seed: int) -> None:
    """With demands that stay the same, workers change their class a few times at most."""
    source = random.Random(seed)
    needs = {one: source.uniform(0.0, 6.0) for one in (STRICT, LAX, NONE)}
    weights = {one: source.choice([1.0, 2.0, 8.0]) for one in needs}
    held = {STRICT: 8, LAX: 0, NONE: 0}
    for changes in range(40):
        demands = {one: TargetLoad(count, min(needs[one], count)) for one, count in held.items() if count}
        given = who_gives([one for one in held if needs[one] > held[one]], demands, weights)
        if given is None:
            assert changes <= 16
            return
        held[given[0]], held[given[1]] = held[given[0]] + 1, held[given[1]] - 1
    raise AssertionError(held)
