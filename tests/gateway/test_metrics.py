"""What the times of one stream come to: TTFT, gaps, time per token, and whether its tenant's SLO was met."""

import pytest

from gateway.metrics import GatewayMetrics, StreamTimes
from gateway.streams.types import FailKind, Failure
from runtime.metrics.tenant_labels import TENANTS_MAX
from runtime.tenancy.tenants import ClassTargets, TenantsError, parse

SLO = ClassTargets(1000.0, 100.0)


def stream(metrics: GatewayMetrics) -> StreamTimes:
    metrics.slo_of = lambda tenant: SLO if tenant == "acme" else ClassTargets()
    return StreamTimes(metrics, "acme", 10, 0.0)


def read(metrics: GatewayMetrics, name: str, label: str = "model") -> dict[str, float]:
    """The series that are not zero, by the value of one label."""
    families = metrics.registry.restricted_registry([f"crossdock_gateway_{name}"]).collect()
    return {one.labels[label]: one.value for family in families for one in family.samples if one.value}


def results(metrics: GatewayMetrics) -> dict[str, float]:
    return read(metrics, "slo_streams_total", "result")


@pytest.mark.parametrize(
    ("first_s", "gaps_s", "result"),
    [
        (0.9, [0.09] * 50, "met"),
        (1.1, [0.01] * 50, "ttft"),
        (0.9, [0.09] * 49 + [0.2], "itl"),
        (0.9, [0.09] * 199 + [0.2] * 2, "met"),  # one gap in a hundred may be longer
        (0.9, [0.09] * 198 + [0.2] * 3, "itl"),
        (0.9, [], "met"),
    ],
)
def test_stream_is_judged_against_its_slo(first_s: float, gaps_s: list[float], result: str) -> None:
    """Each stream is counted by whether its TTFT and gaps keep the SLO."""
    metrics = GatewayMetrics("m")
    times, now = stream(metrics), first_s
    times.delivered(0, 1, 4, now)
    for gap_s in gaps_s:
        now += gap_s
        times.delivered(0, 1, 0, now)
    times.ended(None, now)
    assert results(metrics) == {result: 1.0}
    assert read(metrics, "time_to_first_token_seconds_sum") == {"m": pytest.approx(first_s)}
    if gaps_s:
        assert read(metrics, "inter_token_latency_seconds_count") == {"m": len(gaps_s)}
        assert read(metrics, "time_per_output_token_seconds_sum") == {"m": pytest.approx(sum(gaps_s) / len(gaps_s))}
    assert read(metrics, "cached_prompt_tokens_total") == {"m": 4.0}


def test_failures_and_rejections_are_counted() -> None:
    """Rejected, failed and abandoned streams are counted by outcome, without a time per token."""
    metrics = GatewayMetrics("m")
    stream(metrics).ended(Failure(FailKind.REJECTED, "full"), 1.0)
    stream(metrics).ended(Failure(FailKind.INTERRUPTED, "lost"), 1.0)
    stream(metrics).left()
    StreamTimes(metrics, "nobody", 1, 0.0).ended(None, 1.0)
    assert results(metrics) == {"rejected": 1.0, "failed": 1.0}
    ends = {"rejected": 1.0, "interrupted": 1.0, "left": 1.0, "ok": 1.0}
    assert read(metrics, "streams_total", "outcome") == ends
    assert read(metrics, "time_per_output_token_seconds_count") == {}
    assert read(metrics, "stream_duration_seconds_count") == {"m": 1.0}


def test_tenant_series_follow_recent_service() -> None:
    """The tenants with series of their own are those served lately, not the first to come."""
    metrics = GatewayMetrics("m")
    metrics.slo_of = lambda tenant: SLO
    for now in (100.0, 200.0, 300.0):
        for number in range(TENANTS_MAX + 1):
            times = StreamTimes(metrics, f"t{number}", 1, now)
            times.delivered(0, 1 + number, 0, now)
            times.ended(None, now)
    known = read(metrics, "slo_streams_total", "tenant")
    assert f"t{TENANTS_MAX}" in known and "t0" not in known


def test_time_per_token_counts_each_choice() -> None:
    """Time per token is the time since the first token, shared by the later tokens of each choice."""
    metrics = GatewayMetrics("m")
    times = stream(metrics)
    times.delivered(0, 1, 0, 1.0)
    times.delivered(1, 1, 0, 1.0)
    times.delivered(0, 4, 0, 3.0)
    times.delivered(1, 4, 0, 3.0)
    times.ended(None, 3.0)
    assert read(metrics, "time_per_output_token_seconds_sum") == {"m": pytest.approx(0.5)}


def test_slo_comes_from_the_tenants_file() -> None:
    """SLO targets are read from the tenants file, and users inherit those of their organisation."""
    file = parse(
        "[tenants.acme]\nslo_ttft_ms = 500.0\nslo_itl_ms = 50.0\n[tenants.acme.users.ann]\nslo_itl_ms = 20.0\n"
        "[tenants.lab]\n"
    )
    policies = file.policies
    assert policies["acme"].slo == ClassTargets(500.0, 50.0) and policies["acme/ann"].slo == ClassTargets(500.0, 20.0)
    assert not policies["lab"].slo.given
    with pytest.raises(TenantsError, match=r"tenants\.acme\.slo_ttft_ms: must be > 0"):
        parse("[tenants.acme]\nslo_ttft_ms = 0.0\n")
