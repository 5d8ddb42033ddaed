"""The test of the tests: each planted bug is found within a bounded number of seeds, and without one nothing is."""

import pytest

from simulation.run import run
from tests.simulation import planted_service, planted_workers

BUGS = planted_service.BUGS | planted_workers.BUGS

SEEDS = 400
"""Most are found within the first ten."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    BUGS[name](monkeypatch)
    for seed in range(SEEDS):
        failure = run(seed).failure
        if failure is not None:
            assert isinstance(failure, AssertionError | KeyError | IndexError), repr(failure)
            return
    raise AssertionError(f"{name} goes unnoticed in {SEEDS} seeds")


def test_there_are_enough_of_them() -> None:
    assert len(BUGS) >= 20 and all(patch.__doc__ for patch in BUGS.values())
