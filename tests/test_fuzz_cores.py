"""Whatever valid messages peers send, in whatever state: no core fails. `scripts/fuzz` runs more seeds."""

import pytest

from tests.fuzz_cores import RUNS

SEEDS = {"coordinator": 40, "keeper": 25, "prefill": 25, "decode": 25, "transfers": 100}
EVENTS = 200


@pytest.mark.parametrize("core", RUNS)
def test_no_valid_message_makes_a_core_fail(core: str) -> None:
    for seed in range(SEEDS[core]):
        assert RUNS[core](seed, EVENTS) is None
