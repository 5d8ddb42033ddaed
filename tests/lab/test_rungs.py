"""The rungs of the search, with plays whose outcome is a formula: what each ratio serves is known."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

from lab.advise import Slo, Workers
from lab.goals import Goals
from lab.play.outcome import PlayedOutcome
from lab.play.plays import Play
from lab.play.request import Sent
from lab.search import FULL, QUICK, Effort, Space, search
from tests.lab.profiles import GPU

REQUESTS = 8000


def serves(workers: Workers) -> float:
    """Requests per second that these workers serve."""
    return 1.1 * workers.mixed + min(2.0 * workers.prefill, 3.0 * workers.decode)


def played(function: Callable[[Play], PlayedOutcome], plays: Sequence[Play]) -> Iterator[PlayedOutcome]:
    for play in plays:
        at_s = np.array([one.at_s for one in play.sent])
        per_s = 1 / float(np.median(np.diff(at_s)))
        served = np.random.default_rng(5).random(len(at_s)) < 1.15 - 0.25 * per_s / serves(play.workers)
        none = np.zeros(len(at_s))
        yield PlayedOutcome(
            at_s, np.where(served, 100.0, 9000.0), none + 10, none, none, none + 100, none + 10, none,
            ("standard",) * len(at_s), (), 1.0, 0.5, 0.5, 3.0, 0.1,
        )  # fmt: skip


@pytest.mark.parametrize("effort", [FULL, QUICK], ids=["full", "quick"])
@pytest.mark.parametrize("per_s", [6.0, 9.0, 40.0])
def test_no_other_ratio_serves_more(per_s: float, effort: Effort) -> None:
    """The recommended ratio serves within 5 % as much as the best one, and says up to which load it keeps the SLO."""
    sent = [Sent(number / per_s, 100, 10) for number in range(REQUESTS)]
    found = search(GPU, sent, Goals(Slo(1000.0, 50.0)), Space(8), effort=effort, each=played)
    best = found.best.candidate.workers
    most = max(serves(one) for total in range(1, 9) for one in Space(8).layouts(total))
    assert serves(best) > 0.95 * most
    assert found.headroom == pytest.approx(serves(best) / per_s, rel=0.15)
    assert found.best.requests == pytest.approx(REQUESTS if effort is FULL else QUICK.whole, rel=0.01)
    for other in found.ranked[1:]:
        assert serves(other.candidate.workers) < 1.05 * serves(best)


def test_fewest_of_equal_ratios_are_chosen() -> None:
    """Where several numbers of workers serve everything, the smallest is recommended."""
    sent = [Sent(float(number), 100, 10) for number in range(REQUESTS)]
    best = search(GPU, sent, Goals(Slo(1000.0, 50.0)), Space(8), each=played).best
    assert best.candidate.workers.total == 2
