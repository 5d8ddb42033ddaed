"""The tuner's quick model: what another ratio would do to present traffic."""

from dataclasses import replace

import pytest

from tests.tuning.profiles import GPU
from tuning.advise import Slo, Traffic, Workers, advise, erlang_c, neighbours
from tuning.profile import HostCost

SLO = Slo(500.0, 30.0)
LONG_PROMPTS = Traffic(40.0, [1500, 900, 1200] * 20, [100, 150, 200] * 20)
LONG_ANSWERS = Traffic(40.0, [200, 300, 100] * 20, [400, 600, 500] * 20)


def test_prefill_that_is_short_gets_a_worker_and_decode_that_is_short_gets_it_back() -> None:
    found = advise(GPU, LONG_PROMPTS, Workers(3, 5), SLO)
    assert found.present.binds == "prefill compute"
    assert found.best.workers == Workers(4, 4)
    assert found.gain > 0.1
    found = advise(GPU, LONG_ANSWERS, Workers(5, 1), SLO)
    assert found.present.binds.startswith("decode")
    assert found.best.workers == Workers(4, 2)


def test_no_change_is_advised_where_none_helps() -> None:
    found = advise(GPU, Traffic(2.0, [500] * 40, [100] * 40), Workers(3, 5), SLO)
    assert found.best is found.present
    assert (found.present.attainment, found.gain, found.wanted) == (pytest.approx(1.0, abs=0.01), 0.0, Workers(1, 1))


def test_hits_in_the_prefix_cache_count_as_less_to_compute() -> None:
    cold = advise(GPU, LONG_PROMPTS, Workers(3, 5), SLO).present
    warm = advise(GPU, replace(LONG_PROMPTS, hit_rate=0.5), Workers(3, 5), SLO).present
    assert warm.prefill_load < 0.7 * cold.prefill_load
    assert warm.attainment > cold.attainment


def test_a_queue_that_waits_already_costs_attainment() -> None:
    traffic = replace(LONG_PROMPTS, requests_per_s=20.0)
    before = advise(GPU, traffic, Workers(4, 4), SLO).present.attainment
    after = advise(GPU, replace(traffic, waiting_tokens=1_000_000), Workers(4, 4), SLO).present.attainment
    assert after < before - 0.2


def test_wanted_workers_keep_the_slo() -> None:
    wanted = advise(GPU, LONG_PROMPTS, Workers(3, 5), SLO).wanted
    assert advise(GPU, LONG_PROMPTS, wanted, SLO).present.attainment >= SLO.percentile - 0.02
    fewer = Workers(wanted.prefill - 1, wanted.decode)
    assert advise(GPU, LONG_PROMPTS, fewer, SLO).present.attainment < SLO.percentile


def test_silence_is_no_traffic_to_change_workers_for() -> None:
    found = advise(GPU, Traffic(0.0, [], []), Workers(2, 2), SLO)
    assert found.best is found.present
    assert found.gain == 0.0


def test_neighbours_differ_by_one_worker_and_can_serve() -> None:
    assert set(neighbours(Workers(2, 1), False)) == {Workers(1, 2)}
    assert set(neighbours(Workers(1, 1), True)) == {Workers(0, 1, 1), Workers(1, 0, 1)}
    assert set(neighbours(Workers(1, 0, 1), True)) == {Workers(0, 0, 2), Workers(1, 1, 0), Workers(0, 1, 1)}


def test_the_first_chunk_on_a_mixed_worker_waits_for_half_a_step() -> None:
    profile = GPU.replaced(host=HostCost())
    prefill_ms, step_ms = profile.prefill.prompt_ms(256, 0, 256), profile.decode.step_ms(1, 306)
    for share, kept in ((0.4, 0.0), (0.6, 1.0)):
        slo = Slo(prefill_ms + share * step_ms, 1000.0)
        found = advise(profile, Traffic(0.01, [256] * 40, [100] * 40), Workers(0, 0, 1), slo).present
        assert found.ttft_attainment == pytest.approx(kept, abs=0.01)


def test_erlang_c_is_as_in_the_tables() -> None:
    assert erlang_c(1, 0.5) == pytest.approx(0.5)
    assert erlang_c(2, 0.5) == pytest.approx(1 / 3)
    assert erlang_c(10, 0.8) == pytest.approx(0.4092, abs=1e-3)
