"""The tuner's quick model: what another ratio would do to present traffic."""

from dataclasses import replace

import pytest

from tests.tuning.profiles import GPU
from tuning.advise import Slo, Traffic, Workers, advise, erlang_c, neighbours
from tuning.profile import HostCost

SLO = Slo(500.0, 30.0)
LONG_PROMPTS = Traffic(40.0, [1500, 900, 1200] * 20, [100, 150, 200] * 20)
LONG_ANSWERS = Traffic(40.0, [200, 300, 100] * 20, [400, 600, 500] * 20)


def test_scarce_role_gets_a_worker() -> None:
    """The advised ratio moves a worker to the role that binds, prefill or decode."""
    found = advise(GPU, LONG_PROMPTS, Workers(3, 5), SLO)
    assert found.present.binds == "prefill compute"
    assert found.best.workers == Workers(4, 4)
    assert found.gain > 0.1
    found = advise(GPU, LONG_ANSWERS, Workers(5, 1), SLO)
    assert found.present.binds.startswith("decode")
    assert found.best.workers == Workers(4, 2)


def test_useless_change_is_not_advised() -> None:
    """The present ratio is advised where no change helps."""
    found = advise(GPU, Traffic(2.0, [500] * 40, [100] * 40), Workers(3, 5), SLO)
    assert found.best is found.present
    assert (found.present.attainment, found.gain, found.wanted) == (pytest.approx(1.0, abs=0.01), 0.0, Workers(1, 1))


def test_cache_hits_lower_prefill_load() -> None:
    """A higher hit rate lowers the prefill load and raises the attainment."""
    cold = advise(GPU, LONG_PROMPTS, Workers(3, 5), SLO).present
    warm = advise(GPU, replace(LONG_PROMPTS, hit_rate=0.5), Workers(3, 5), SLO).present
    assert warm.prefill_load < 0.7 * cold.prefill_load
    assert warm.attainment > cold.attainment


def test_present_queue_lowers_attainment() -> None:
    """Prompt tokens that wait already lower the predicted attainment."""
    traffic = replace(LONG_PROMPTS, requests_per_s=20.0)
    before = advise(GPU, traffic, Workers(4, 4), SLO).present.attainment
    after = advise(GPU, replace(traffic, waiting_tokens=1_000_000), Workers(4, 4), SLO).present.attainment
    assert after < before - 0.2


def test_wanted_workers_keep_the_slo() -> None:
    """The wanted ratio keeps the SLO, and one prefill worker fewer does not."""
    wanted = advise(GPU, LONG_PROMPTS, Workers(3, 5), SLO).wanted
    assert advise(GPU, LONG_PROMPTS, wanted, SLO).present.attainment >= SLO.percentile - 0.02
    fewer = Workers(wanted.prefill - 1, wanted.decode)
    assert advise(GPU, LONG_PROMPTS, fewer, SLO).present.attainment < SLO.percentile


def test_no_traffic_changes_nothing() -> None:
    """The present ratio is advised when there is no traffic."""
    found = advise(GPU, Traffic(0.0, [], []), Workers(2, 2), SLO)
    assert found.best is found.present
    assert found.gain == 0.0


def test_neighbours_change_one_role() -> None:
    """Neighbours of a ratio change the role of one worker and can still serve."""
    assert set(neighbours(Workers(2, 1), False)) == {Workers(1, 2)}
    assert set(neighbours(Workers(1, 1), True)) == {Workers(0, 1, 1), Workers(1, 0, 1)}
    assert set(neighbours(Workers(1, 0, 1), True)) == {Workers(0, 0, 2), Workers(1, 1, 0), Workers(0, 1, 1)}


def test_mixed_first_chunk_waits_half_step() -> None:
    """The first chunk on a mixed worker waits for half a decode step."""
    profile = GPU.replaced(host=HostCost())
    prefill_ms, step_ms = profile.prefill.prompt_ms(256, 0, 256), profile.decode.step_ms(1, 306)
    for share, kept in ((0.4, 0.0), (0.6, 1.0)):
        slo = Slo(prefill_ms + share * step_ms, 1000.0)
        found = advise(profile, Traffic(0.01, [256] * 40, [100] * 40), Workers(0, 0, 1), slo).present
        assert found.ttft_attainment == pytest.approx(kept, abs=0.01)


def test_erlang_c_matches_known_values() -> None:
    assert erlang_c(1, 0.5) == pytest.approx(0.5)
    assert erlang_c(2, 0.5) == pytest.approx(1 / 3)
    assert erlang_c(10, 0.8) == pytest.approx(0.4092, abs=1e-3)
