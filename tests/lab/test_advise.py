"""The autopilot's quick model: what a ratio of workers does for present traffic."""

from dataclasses import replace

import pytest

from lab.advise import QueueingModel, Slo, Traffic, Workers, erlang_c
from lab.profile import HostCost
from tests.lab.profiles import GPU

SLO = Slo(500.0, 30.0)
LONG_PROMPTS = Traffic(40.0, [1500, 900, 1200] * 20, [100, 150, 200] * 20)
LONG_ANSWERS = Traffic(40.0, [200, 300, 100] * 20, [400, 600, 500] * 20)


def test_short_role_gains_most() -> None:
    """One worker more of the role with too few serves more."""
    prompts, answers = QueueingModel(GPU, LONG_PROMPTS, SLO), QueueingModel(GPU, LONG_ANSWERS, SLO)
    assert prompts.estimate(Workers(4, 4)).goodput > 1.1 * prompts.estimate(Workers(3, 5)).goodput
    assert answers.estimate(Workers(4, 2)).goodput > answers.estimate(Workers(5, 1)).goodput


def test_little_traffic_keeps_the_slo() -> None:
    """Any ratio serves little traffic, for which one worker of each role is enough."""
    model = QueueingModel(GPU, Traffic(2.0, [500] * 40, [100] * 40), SLO)
    found = model.estimate(Workers(3, 5))
    assert (found.attainment, model.wanted()) == (pytest.approx(1.0, abs=0.01), Workers(1, 1))
    assert QueueingModel(GPU, Traffic(0.0, [], []), SLO).estimate(Workers(2, 2)).goodput == 0.0


def test_cache_hits_lower_prefill_load() -> None:
    """A higher hit rate lowers the prefill load and raises the attainment."""
    cold = QueueingModel(GPU, LONG_PROMPTS, SLO).estimate(Workers(3, 5))
    warm = QueueingModel(GPU, replace(LONG_PROMPTS, hit_rate=0.5), SLO).estimate(Workers(3, 5))
    assert warm.prefill_load < 0.7 * cold.prefill_load
    assert warm.attainment > cold.attainment


def test_present_queue_lowers_attainment() -> None:
    """Prompt tokens that wait already lower the predicted attainment."""
    traffic = replace(LONG_PROMPTS, requests_per_s=20.0)
    before = QueueingModel(GPU, traffic, SLO).estimate(Workers(4, 4)).attainment
    after = QueueingModel(GPU, replace(traffic, waiting_tokens=1_000_000), SLO).estimate(Workers(4, 4)).attainment
    assert after < before - 0.2


def test_wanted_workers_keep_the_slo() -> None:
    """The wanted ratio keeps the SLO, and one prefill worker fewer does not."""
    wanted = QueueingModel(GPU, LONG_PROMPTS, SLO).wanted()
    assert QueueingModel(GPU, LONG_PROMPTS, SLO).estimate(wanted).attainment >= SLO.percentile - 0.02
    fewer = Workers(wanted.prefill - 1, wanted.decode)
    assert QueueingModel(GPU, LONG_PROMPTS, SLO).estimate(fewer).attainment < SLO.percentile


def test_mixed_first_chunk_waits_half_step() -> None:
    """The first chunk on a mixed worker waits for half a decode step."""
    profile = GPU.replaced(host=HostCost())
    prefill_ms, step_ms = profile.prefill.prompt_ms(256, 0, 256), profile.decode.step_ms(1, 306)
    for share, kept in ((0.4, 0.0), (0.6, 1.0)):
        slo = Slo(prefill_ms + share * step_ms, 1000.0)
        found = QueueingModel(profile, Traffic(0.01, [256] * 40, [100] * 40), slo).estimate(Workers(0, 0, 1))
        assert found.ttft_attainment == pytest.approx(kept, abs=0.01)


def test_erlang_c_matches_known_values() -> None:
    assert erlang_c(1, 0.5) == pytest.approx(0.5)
    assert erlang_c(2, 0.5) == pytest.approx(1 / 3)
    assert erlang_c(10, 0.8) == pytest.approx(0.4092, abs=1e-3)
