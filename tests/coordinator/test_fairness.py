"""What is told of fairness and of the last requests."""

import pytest

from coordinator.accounting.billing import Closed
from coordinator.events import Limits
from coordinator.reporting.recent import RECENT_REQUESTS, RecentTimes
from coordinator.reporting.status import ServedTenant, evenness, jain
from scheduler.waiting.queue import WaitQueue


def test_jain_of_equal_shares_is_one() -> None:
    """Jain's index is one for equal shares, and lower for unequal ones."""
    assert jain([]) == jain([0.0, 0.0]) == 1.0
    assert jain([3.0, 3.0, 3.0]) == pytest.approx(1.0)
    assert jain([1.0, 0.0, 0.0, 0.0]) == pytest.approx(0.25)


def test_only_waiting_organisations_compared() -> None:
    """Only organisations that wait are compared, by weight and within their priority class."""
    queue = WaitQueue(Limits(weights={"standard/big": 3.0}))
    found = [
        ServedTenant(("standard", "big", "ann"), 10.0, 2),
        ServedTenant(("standard", "big", "bob"), 20.0, 0),  # its organisation waits
        ServedTenant(("standard", "small", ""), 10.0, 1),
        ServedTenant(("standard", "content", ""), 500.0, 0),
        ServedTenant(("batch", "lone", ""), 7.0, 1),
    ]
    assert evenness(queue, found) == {"standard": pytest.approx(1.0), "batch": pytest.approx(1.0)}
    assert found[0].tenant == "big/ann" and found[2].tenant == "small"
    starved = [*found, ServedTenant(("standard", "starved", ""), 0.0, 4)]
    assert evenness(queue, starved)["standard"] == pytest.approx(2 / 3)


def test_recent_times_skip_cancelled() -> None:
    """Recent times leave out cancelled requests and forget the oldest."""
    recent = RecentTimes()
    assert recent.figures() == {}
    closed = Closed("r", "cancelled", 1, 1, 0, 1, 9e9, 9e9, 0.0, 0.0)
    recent.add(closed)
    assert recent.figures() == {}
    recent.add(Closed("r", "finished", 1, 1, 0, 1, 5.0, 100.0, 0.0, 0.0))
    assert recent.figures()["ttft_p50_ms"] == 105.0 and "tpot_p50_ms" not in recent.figures()
    for _ in range(RECENT_REQUESTS):
        recent.add(Closed("r", "finished", 1, 1, 0, 11, 1.0, 2.0, 50.0, 50.0))
    figures = recent.figures()
    assert figures["requests"] == RECENT_REQUESTS and figures["ttft_p99_ms"] == 3.0 and figures["tpot_p50_ms"] == 10.0


def test_recent_rates_are_per_second() -> None:
    """Rates are those of the last minute, of the uptime if that is shorter, or of as many requests as are kept."""
    recent = RecentTimes()
    assert recent.rates(now=3.0, started=1.0)["requests_per_s"] == 0.0
    for number in range(120):
        recent.add(Closed("r", "finished", 1, 10, 0, 5, 1.0, 2.0, 0.0, 0.0), ("acme", "m", "c"), now=100.0 + number)
    assert recent.rates(now=220.0, started=0.0)["requests_per_s"] == pytest.approx(1.0)
    assert recent.rates(now=220.0, started=0.0)["prompt_tokens_per_s"] == pytest.approx(10.0)
    assert recent.rates(now=220.0, started=210.0)["output_tokens_per_s"] == pytest.approx(5.0)
    for number in range(RECENT_REQUESTS):
        recent.add(Closed("r", "finished", 1, 10, 0, 5, 7.0, 2.0, 0.0, 0.0), ("lab", "m", "c"), now=300.0 + number / 64)
    assert recent.rates(now=304.0, started=0.0)["requests_per_s"] == pytest.approx(64.0, rel=0.01)
    assert recent.ttft_of_tenants() == {"lab": (9.0, 9.0)}
