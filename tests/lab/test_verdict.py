"""What `crossdock tune check` concludes."""

from typing import Any

import pytest

from lab.commands.verdict import verdict


def row(ratio: str, measured: float | None, predicted: float = 0.9, requests: int = 100) -> dict[str, Any]:
    error = None if measured is None else predicted - measured
    share = {"predicted": predicted, "measured": measured, "error": error}
    return {"ratio": ratio, "requests": requests, "attainment": share}


@pytest.mark.parametrize(
    ("rows", "held", "words"),
    [
        (
            [row("2M", 0.96), row("1P1D", 0.6)],
            True,
            "2M with 96.0% of requests within the SLO was best live, as recommended.",
        ),
        (
            [row("2M", 0.6), row("1P1D", 0.9)],
            False,
            "the recommendation, 2M with 60.0% of requests within the SLO, did not hold",
        ),
        ([row("2M", 0.9), row("1P1D", 0.94)], True, "held: chance explains the difference"),
        ([row("2M", 0.9, requests=5000), row("1P1D", 0.94, requests=5000)], False, "did not hold"),
        ([row("2M", 1.0, requests=8), row("1P1D", 1.0, requests=8)], True, "2M with 100.0% of requests"),
        ([row("1P1D", 0.9)], False, "the recommendation, 2M, was not run"),
        ([row("2M", None)], False, "No request was judged"),
    ],
)
def test_verdict_names_the_best_ratio(rows: list[dict[str, Any]], held: bool, words: str) -> None:
    """The verdict names the best measured ratio or the lack of one, and says if the recommendation held."""
    found = verdict(rows, "2M")
    assert found.held is held and words in found.words


def test_sent_traffic_prediction_counts() -> None:
    """The verdict says if the prediction for the traffic that was sent had the best measured ratio first."""
    rows = [row("1P1D", 0.6, predicted=0.84), row("2M", 0.95, predicted=0.9)]
    found = verdict(rows, "1P1D")
    assert not found.held and "for it, the prediction had that ratio first, too" in found.words
    assert "prediction had" not in verdict([row("1P1D", 0.6, 0.9), row("2M", 0.95, 0.84)], "1P1D").words


def test_prediction_error_has_a_direction() -> None:
    """The verdict says whether predicted shares were too high or too low, and by how much."""
    found = verdict([row("2M", 0.5, 0.9), row("1P1D", 0.8, 0.7)], "2M")
    assert found.words.endswith("Predicted shares were 15.0 points too high on average, most for 2M (+40.0).")
    assert verdict([row("2M", 0.9, 0.8)], "2M").words.endswith("Predicted shares were 10.0 points too low on average.")
