"""A hundred thousand frames that are almost messages at each port of a cluster: it goes on, and others do not notice."""

import pytest

from tools.fuzz import attack_all

FRAMES, SEED = 100_000, 6


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_ports_survive_random_frames() -> None:
    """Each port survives a hundred thousand random frames without a fault."""
    outcomes = attack_all(FRAMES, SEED, lambda _text: None)
    assert {one.name for one in outcomes} == {"control", "token", "KV"}
    for one in outcomes:
        assert not one.fault and one.counts["sent"] == FRAMES and one.counts["Refused"] > FRAMES / 10, one
