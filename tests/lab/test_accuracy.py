"""How far the autopilot's model is from what was measured, with a clock of our own."""

import pytest

from lab.accuracy import Accuracy, measured, predicted
from lab.advise import Traffic, Workers
from proto.status import TrafficStatus
from tests.lab.driving import Phase, drive
from tests.lab.test_autopilot import PROFILE, SLO

RATIO = Workers(2, 2)


def status(ttft_ms: float, tpot_ms: float, waiting_tokens: int = 0) -> TrafficStatus:
    """Two minutes of a request each second, all alike."""
    ages = tuple(1000.0 * age for age in range(119, -1, -1))
    count = len(ages)
    return TrafficStatus(
        "m", ages, (1,) * count, (3000,) * count, (0,) * count, (100,) * count, waiting_tokens,
        (ttft_ms,) * count, (tpot_ms,) * count,
    )  # fmt: skip


def watched(
    accuracy: Accuracy, seen: TrafficStatus, until_s: int, workers: Workers | None = RATIO, begin: int = 0
) -> None:
    for now in range(begin, until_s, 2):
        accuracy.look(workers, seen, float(now))


def test_errors_are_relative() -> None:
    """Errors of TTFT and TPOT are relative, and that of the SLO share is a difference in points."""
    traffic = Traffic(1.0, [3000] * 30, [100] * 30, arrival_cv=0.0)
    guess = predicted(PROFILE, traffic, RATIO, SLO)
    assert guess.ttft_p50_ms and guess.tpot_p90_ms and guess.slo_share == pytest.approx(1.0, abs=0.01)
    accuracy = Accuracy(PROFILE, SLO)
    watched(accuracy, status(2 * guess.ttft_p50_ms, guess.tpot_p90_ms), 62)
    error = accuracy.error(62.0)
    assert error.comparisons == 1 and error.ttft_p50 == pytest.approx(0.5, abs=0.02)
    assert error.tpot_p90 == pytest.approx(0.0, abs=0.01) and error.slo_share == pytest.approx(0.0, abs=0.01)
    slow = Accuracy(PROFILE, SLO)
    watched(slow, status(SLO.ttft_ms + 1, guess.tpot_p90_ms), 62)
    assert slow.error(62.0).slo_share == pytest.approx(1.0, abs=0.01)


def test_errors_cover_one_hour() -> None:
    """Comparisons of the past hour are kept and no older ones."""
    accuracy = Accuracy(PROFILE, SLO)
    watched(accuracy, status(300.0, 40.0), 7_200)
    assert 115 <= accuracy.error(7_200.0).comparisons <= 120
    assert accuracy.error(7_200.0 + 1_800).comparisons in range(59, 62)
    assert accuracy.error(20_000.0).comparisons == 0 and accuracy.error(20_000.0).ttft_p50 is None


def test_ratio_change_discards_comparison() -> None:
    """Nothing is compared across a change of the ratio."""
    accuracy = Accuracy(PROFILE, SLO)
    watched(accuracy, status(300.0, 40.0), 50)
    accuracy.look(None, status(300.0, 40.0), 50.0)
    watched(accuracy, status(300.0, 40.0), 110, Workers(3, 1), 52)
    assert accuracy.error(110.0).comparisons == 0
    watched(accuracy, status(300.0, 40.0), 120, Workers(3, 1), 110)
    assert accuracy.error(120.0).comparisons == 1


def test_small_samples_give_no_error() -> None:
    """Too few requests, or an older coordinator's report, give no comparison."""
    accuracy = Accuracy(PROFILE, SLO)
    watched(accuracy, TrafficStatus("m", (40_000.0,) * 7, *((1,) * 7,) * 4, 0, (5.0,) * 7, (5.0,) * 7), 100)
    watched(accuracy, TrafficStatus("m", (40_000.0,) * 9, *((1,) * 9,) * 4, 0), 200, RATIO, 100)
    assert accuracy.error(200.0).comparisons == 0


def test_tokenless_requests_are_left_out() -> None:
    """A request that ended without a token is left out, and one that still waits counts as late."""
    ages = (40_000.0,) * 4
    seen = TrafficStatus("m", ages, *((1,) * 4,) * 4, 0, (0.0, 40_000.0, 100.0, 200.0), (0.0, 0.0, 50.0, 70.0))
    found = measured(seen, range(4), SLO)
    assert found.ttft_p90_ms == 40_000.0 and found.ttft_p50_ms == 200.0
    assert found.slo_share == pytest.approx(1 / 3), "one waits, and one has too slow tokens"


def test_true_profile_has_small_errors() -> None:
    """Errors are small in a virtual cluster whose steps take what the profile says."""
    accuracy = Accuracy(PROFILE, SLO)
    drive([Phase(100, 2.0, 4000, 150)], PROFILE, SLO, 2, 2, accuracy=accuracy)
    error = accuracy.error(100.0)
    assert error.comparisons >= 2
    for value in (error.ttft_p50, error.ttft_p90, error.tpot_p90, error.slo_share):
        assert value is not None and value < 0.15, error
