"""Queue keys by class of KV demand."""

import random

import pytest

from coordinator.waiting.queue_keys import (
    Demand,
    bound_key,
    class_key,
    classes_without_room,
    is_class,
    smallest,
)


@pytest.mark.parametrize("seed", range(5))
def test_a_class_holds_half_an_octave_and_its_smallest_demand_is_no_more_than_any_in_it(seed: int) -> None:
    rnd = random.Random(seed)
    for _ in range(2000):
        demand = Demand(int(2 ** rnd.uniform(0, 24)), rnd.randint(1, 128))
        key = class_key(demand)
        least = smallest(key)
        assert is_class(key)
        assert least.tokens <= demand.tokens <= max(1.5 * least.tokens, 2)
        assert least.choices <= demand.choices < 2 * least.choices
        assert class_key(least) == key or demand.tokens <= 2


def test_keys_are_few_and_differ_from_those_of_workers() -> None:
    classes = {class_key(Demand(tokens, 1)) for tokens in range(1, 200_000, 7)}
    assert len(classes) <= 35
    assert not any(is_class(bound_key(incarnation)) or is_class(incarnation) for incarnation in (1, 10, 1 << 40))
    assert len({bound_key(incarnation) for incarnation in range(100)}) == 100


@pytest.mark.parametrize("seed", range(5))
def test_what_one_demand_closes_needs_no_less_in_any_respect(seed: int) -> None:
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
