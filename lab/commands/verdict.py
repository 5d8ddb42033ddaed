"""The verdict of `crossdock tune check`, in two sentences: which ratio was best live, and how far predictions were off.
Pure."""

from collections.abc import Mapping, Sequence
from math import sqrt
from typing import Any, Final, NamedTuple

_Z: Final = 1.645  # standard deviations, within which 90 % of a normal distribution lie
Row = Mapping[str, Any]


class Verdict(NamedTuple):
    held: bool  # no other ratio kept the SLO for more requests than chance explains
    words: str


def verdict(rows: Sequence[Row], recommended: str) -> Verdict:
    """Judges the runs. If the recommended ratio ran, at least one of `rows` is of it."""
    judged = [row for row in rows if row["attainment"]["measured"] is not None]
    if not judged:
        return Verdict(False, "No request was judged, so nothing is known.")
    best = max(judged, key=lambda row: (row["attainment"]["measured"], row["ratio"] == recommended))
    chosen = next((row for row in judged if row["ratio"] == recommended), None)
    if chosen is None:
        words = f"{_served(best)} was best live; the recommendation, {recommended}, was not run."
        return Verdict(False, f"{words} {_off(judged)}")
    less = best["attainment"]["measured"] - chosen["attainment"]["measured"]
    held = less <= _chance(best, chosen)
    if best is chosen:
        words = f"{_served(best)} was best live, as recommended."
    elif held:
        words = f"{_served(best)} was best live; the recommendation, {_served(chosen)}, held: chance explains the difference."
    else:
        words = f"{_served(best)} was best live; the recommendation, {_served(chosen)}, did not hold."
        expected = max(judged, key=lambda row: (row["attainment"]["predicted"], row is best))
        if expected is best:
            words += " The traffic that was sent differs: for it, the prediction had that ratio first, too."
    return Verdict(held, f"{words} {_off(judged)}")


def _served(row: Row) -> str:
    return f"{row['ratio']} with {row['attainment']['measured']:.1%} of requests within the SLO"


def _off(rows: Sequence[Row]) -> str:
    """How far the predictions were off, and in which direction."""
    points = [100 * row["attainment"]["error"] for row in rows]
    mean = sum(points) / len(points)
    most = max(rows, key=lambda row: abs(row["attainment"]["error"]))
    way = "too high" if mean > 0 else "too low"
    said = f"Predicted shares were {abs(mean):.1f} points {way} on average"
    if len(rows) > 1:
        said += f", most for {most['ratio']} ({100 * most['attainment']['error']:+.1f})"
    return said.replace("-", "−") + "."


def _chance(one: Row, other: Row) -> float:
    """Returns the difference that chance alone makes between the shares of two runs of equal ratios with these numbers of
    requests."""
    variance = 0.0
    for row in (one, other):
        share, count = row["attainment"]["measured"], max(row["requests"], 1)
        share = min(max(share, 1 / (2 * count)), 1 - 1 / (2 * count))  # no run would repeat exactly
        variance += share * (1 - share) / count
    return _Z * sqrt(variance)
