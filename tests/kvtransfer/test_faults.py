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
def test_fault_costs_its_own_transfer_only(transport: str) -> None:
    """A fault on any transport costs its own transfer and nothing else."""
    tallies = asyncio.run(run(transport, QUICK, rounds=1, seed=7))
    assert {fault: tally.rounds for fault, tally in tallies.items()} == dict.fromkeys(QUICK, 1)
    assert not any(tallies[fault].first_attempts_arrived for fault in ("corrupt", "wrong_length"))
    assert tallies["duplicate"].first_attempts_arrived


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("faults", [KILLS, MESSAGES, STOPS], ids=["kills", "messages", "stops"])
def test_repeated_faults_do_no_harm(faults: tuple[str, ...], transport: str, seed: int) -> None:
    """Five rounds of every kill, message fault or stop pass on each transport."""
    tallies = asyncio.run(run(transport, faults, rounds=5, seed=seed))
    assert tallies.keys() == set(faults) <= set(FAULTS)
