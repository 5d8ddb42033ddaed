"""A few rounds of `faults`, which says what must hold. `scripts/kv_faults --rounds 200` runs as many of each as you like."""

import asyncio

import pytest

from tools.kv_faults import FAULTS, KILLS, MESSAGES, STOPS, TRANSPORTS, run

pytestmark = pytest.mark.cluster

QUICK = (
    "sender_killed_mid_segment",
    "receiver_killed_before_commit",
    "corrupt",
    "wrong_length",
    "duplicate",
    "reorder",
)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_fault_costs_its_own_transfer_and_nothing_else(transport: str) -> None:
    tallies = asyncio.run(run(transport, QUICK, rounds=1, seed=7))
    assert {fault: tally.rounds for fault, tally in tallies.items()} == dict.fromkeys(QUICK, 1)
    assert not any(tallies[fault].first_attempts_arrived for fault in ("corrupt", "wrong_length"))
    assert tallies["duplicate"].first_attempts_arrived


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("faults", [KILLS, MESSAGES, STOPS], ids=["kills", "messages", "stops"])
def test_every_fault_many_times(faults: tuple[str, ...], transport: str, seed: int) -> None:
    tallies = asyncio.run(run(transport, faults, rounds=5, seed=seed))
    assert tallies.keys() == set(faults) <= set(FAULTS)
