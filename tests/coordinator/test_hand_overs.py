"""What hand-overs of KV cost as measured, and how a decode worker that lacks a shared prefix comes to have it."""

import random

import pytest

from scheduler.workers.hand_overs import TAU_S, HandOvers


@pytest.mark.parametrize("block_ms", [0.0, 0.2, 2.0])
def test_time_per_block_is_measured(block_ms: float) -> None:
    """The time per block is told apart from the time that each hand-over takes, within a host and between hosts."""
    rng, hand_overs = random.Random(1), HandOvers(0.5, 0.5)
    for _ in range(300):
        blocks = rng.randrange(1, 60)
        hand_overs.measured("a", "b", blocks, rng.uniform(2, 4) + block_ms * blocks)
        hand_overs.measured("a", "a", blocks, 1.0)
    assert hand_overs.block_s("b", "a") == pytest.approx(block_ms / 1000, rel=0.15, abs=4e-5)
    assert hand_overs.block_s("b", "b") < 4e-5


def test_hand_overs_of_one_size_count_in_full() -> None:
    """While all hand-overs have one size, their time is ascribed to the blocks."""
    hand_overs = HandOvers(0.5, 0.5)
    for _ in range(20):
        hand_overs.measured("a", "a", 10, 5.0)
    assert hand_overs.block_s("a", "a") == pytest.approx(0.0005)


def test_forgone_load_is_spent_once() -> None:
    """A worker's credit is what was forgone lately, and pays for blocks only once."""
    hand_overs = HandOvers(0.0, 0.0)
    for _ in range(4):
        hand_overs.forgo(7, 0.25, 10.0)
    assert hand_overs.credit_s(7, 10.0) == 1.0 and hand_overs.credit_s(8, 10.0) == 0.0
    assert hand_overs.credit_s(7, 10.0 + TAU_S) == pytest.approx(0.37, abs=0.01)
    hand_overs.spend(7, 0.75, 10.0)
    assert hand_overs.credit_s(7, 10.0) == pytest.approx(0.25)
    hand_overs.spend(7, 0.75, 10.0)
    assert hand_overs.credit_s(7, 10.0) == 0.0
