"""Whatever valid messages peers send, in whatever state: no core fails. `scripts/fuzz` runs more seeds."""

import pytest

from tests.fuzz_cores import RUNS

SEEDS = {"coordinator": 40, "keeper": 25, "prefill": 25, "decode": 25, "transfers": 100}
EVENTS = 200


@pytest.mark.parametrize("core", RUNS)
def test_valid_messages_never_break_a_core(core: str) -> None:
    """No core fails, whichever valid messages it gets."""
    for seed in range(SEEDS[core]):
        assert RUNS[core](seed, EVENTS) is None
