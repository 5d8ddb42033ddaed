"""Queue keys by class of KV demand."""

import random

import pytest

from scheduler.waiting.queue_keys import Demand, bound_key, class_key, classes_without_room, is_class, smallest


@pytest.mark.parametrize("seed", range(5))
def test_demand_class_spans_half_octave(seed: int) -> None:
    """A demand class spans half an octave, and its smallest demand is no more than any in it."""
    rnd = random.Random(seed)
    for _ in range(2000):
        demand = Demand(int(2 ** rnd.uniform(0, 24)), rnd.randint(1, 128))
        key = class_key(demand)
        least = smallest(key)
        assert is_class(key)
        assert least.tokens <= demand.tokens <= max(1.5 * least.tokens, 2)
        assert least.choices <= demand.choices < 2 * least.choices
        assert class_key(least) == key or demand.tokens <= 2


def test_class_keys_are_few_and_distinct() -> None:
    """Demand classes have few queue keys, which differ from those of workers."""
    classes = {class_key(Demand(tokens, 1)) for tokens in range(1, 200_000, 7)}
    assert len(classes) <= 35
    assert not any(is_class(bound_key(incarnation)) or is_class(incarnation) for incarnation in (1, 10, 1 << 40))
    assert len({bound_key(incarnation) for incarnation in range(100)}) == 100


@pytest.mark.parametrize("seed", range(5))
def test_closed_classes_need_no_less(seed: int) -> None:
    """Demand classes closed by a refused demand need no less than it in any respect."""
    rnd = random.Random(seed)
    demands = [Demand(int(2 ** rnd.uniform(0, 17)), rnd.choice([1, 1, 2, 3, 8])) for _ in range(300)]
    classes = {class_key(demand) for demand in demands}
    for refused in demands[:50]:
        shut = set(classes_without_room(refused, classes))
        for demand in demands:
            if class_key(demand) in shut:
                assert demand.tokens >= refused.tokens and demand.choices >= refused.choices
            elif demand.tokens >= 1.5 * refused.tokens and demand.choices >= 2 * refused.choices:
                raise AssertionError((refused, demand))
