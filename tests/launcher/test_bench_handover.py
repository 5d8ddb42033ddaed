"""The figures of `python -m benchmarks handover`, from arrivals that are known."""

import pytest

from benchmarks.handover import Handover, figures
from launcher.http.streams import ClientStream


def test_handover_figures_relate_exposed_time() -> None:
    """Hand-over figures relate the exposed KV time to TTFT, and the second gap to the steady gap."""
    first = ClientStream(10.0, [12.0, 12.15, 12.25, 12.35, 12.45], prompt_tokens=1400, ended_at=12.5)
    second = ClientStream(20.0, [24.0, 24.3, 24.4, 24.5, 24.6], prompt_tokens=1400, ended_at=24.7)
    found = figures([Handover(first, 0.02, 10 << 20), Handover(second, 0.2, 10 << 20)])
    assert found["steady_gap_p50_ms"] == pytest.approx(100)
    assert found["exposed_share_of_ttft_p50"] == pytest.approx(0.01) and found["exposed_share_of_ttft_max"] == 0.05
    assert found["second_over_steady_p50"] == pytest.approx(1.5) and found["second_over_steady_max"] == pytest.approx(
        3.0
    )
    assert (found["ttft_p50_ms"], found["prompt_tokens_mean"], found["kv_mib_mean"]) == (2000.0, 1400, 10)
