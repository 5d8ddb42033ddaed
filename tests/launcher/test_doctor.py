"""The rules of `crossdock doctor`: each fault is named from its figures, and a healthy cluster gets no finding.

`doctor/NAME.json` is what a real cluster with that fault showed: see `tests/e2e/doctor_faults.py`.
"""

from itertools import chain, repeat
from pathlib import Path

import msgspec
import pytest
import uvloop

from launcher.doctor import collect, rules, vllm
from launcher.doctor.causes import CAUSES
from launcher.doctor.snapshot import ProcessMetrics, Sample, Snapshot, readings
from proto.messages import Role
from proto.status import AutopilotStatus, ClassStatus, StatusReport, TenantStatus, TrafficStatus, WorkerStatus

SAVED = sorted((Path(__file__).parent / "doctor").glob("*.json"))
NOW = 1_000_000.0
CORE = "crossdock_coordinator_"


def _worker(name: str, used: int = 10) -> WorkerStatus:
    return WorkerStatus(name, Role(name.partition("-")[0]), "tiny", f"host-{name}", 7, 100, used, 1, 1, 1_000)


WORKERS = tuple(_worker(name) for name in ("decode-0", "decode-1", "prefill-0", "prefill-1"))


def _readings(*rows: tuple[float, float, str]) -> list[Sample]:
    """Rows of (now, grew, labels as "key=value")."""
    return [Sample(dict(part.split("=") for part in labels.split()), now, grew) for now, grew, labels in rows]


def _process(name: str, **series: list[Sample]) -> ProcessMetrics:
    usual = {
        "process_max_fds": _readings((20_000, 0, "")),
        "process_open_fds": _readings((40, 0, "")),
        "process_start_time_seconds": _readings((NOW - 10_000, 0, "")),
    }
    return ProcessMetrics(name, usual | series)


def _busy(
    name: str, step_ms: float = 10.0, size: float = 8.0, steps: int = 100, age_s: float = 10_000.0
) -> ProcessMetrics:
    """A worker that has computed so many steps in ten seconds."""
    role = name.partition("-")[0]
    times, sizes = (
        f"crossdock_{role}_step_seconds",
        f"crossdock_{role}_step_{'tokens' if role == 'prefill' else 'sequences'}",
    )
    bounds = (0.005, 0.02, 0.05, 0.2)
    series = {
        f"{times}_count": _readings((steps, steps, "")),
        f"{times}_sum": _readings((steps, steps * step_ms / 1000, "")),
        f"{times}_bucket": _readings(*((0, steps * (step_ms / 1000 <= bound), f"le={bound}") for bound in bounds)),
        f"{sizes}_count": _readings((steps, steps, "")),
        f"{sizes}_sum": _readings((0, steps * size, "")),
    }
    return _process(name, **series, process_start_time_seconds=_readings((NOW - age_s, 0, "")))


def _stopped(name: str) -> ProcessMetrics:
    """A decode worker that something stops for 0.3 s after three quick steps each time."""
    quick, (buckets, times) = _busy(name), ("crossdock_decode_step_seconds_bucket", "crossdock_decode_step_seconds_sum")
    slow = {
        buckets: _readings((0, 0, "le=0.005"), (0, 75, "le=0.02"), (0, 75, "le=0.2"), (0, 100, "le=+Inf")),
        times: _readings((9, 8.3, "")),
    }
    return msgspec.structs.replace(quick, series=quick.series | slow)


def _core(**series: list[Sample]) -> ProcessMetrics:
    usual = {"requests_admitted_total": _readings((100, 10, ""))}
    return _process("coordinator", **{CORE + name: rows for name, rows in (usual | series).items()})


HEALTHY = Snapshot(
    10.0,
    NOW,
    StatusReport(WORKERS, ("gateway-0",), 0, {"decoding": 4}, {"finished": 90}, {}),
    (_core(), _process("gateway-0"), *(_busy(worker.name) for worker in WORKERS)),
)


def _sick(*changed: ProcessMetrics, restarts: tuple[str, ...] = (), **report: object) -> Snapshot:
    """The healthy cluster, but for these processes and these fields of its report."""
    others = [one for one in HEALTHY.processes if one.name not in [new.name for new in changed]]
    return msgspec.structs.replace(
        HEALTHY,
        processes=(*others, *changed),
        restarts=restarts,
        report=msgspec.structs.replace(HEALTHY.report, **report),
    )


def _both(role: str, step_ms: float = 10.0, steps: int = 100) -> list[ProcessMetrics]:
    return [_busy(f"{role}-{number}", step_ms, steps=steps) for number in (0, 1)]


def _gateway(**series: list[Sample]) -> Snapshot:
    return _sick(_process("gateway-0", **series))


def _restarted(age_s: float, before: int, after: int) -> Snapshot:
    """A decode-0 was started so long ago; prompts of 2,000 tokens had so many cached before, and after."""
    ages_ms = (70_000.0, 50_000.0, 40_000.0, 20_000.0, 10_000.0)
    cached = (0, before, before, after, after)
    traffic = TrafficStatus("tiny", ages_ms, (1, 2, 2, 2, 2), (2_000,) * 5, cached, (9,) * 5, 0)
    return _sick(_busy("decode-0", age_s=age_s), traffic=(traffic,))


PILOT = AutopilotStatus("tiny", "advise", "2P2D", "1P3D", "long answers")
FAULTS: dict[str, tuple[str, str, Snapshot]] = {
    "slow decode worker": ("slow_worker", "decode-1", _sick(_busy("decode-1", 40.0))),
    "stopped decode worker": ("slow_worker", "decode-1", _sick(_stopped("decode-1"))),
    "slow worker with more sequences": ("slow_worker", "decode-1", _sick(_busy("decode-1", 60.0, size=16.0))),
    "slow prefill worker": ("slow_worker", "prefill-0", _sick(_busy("prefill-0", 60.0, steps=20))),
    "worker left out": ("failing_worker", "decode-1", _sick(circuit_open=("decode-1: 3 attempts failed in a row",))),
    "worker fails at times": (
        "failing_worker",
        "decode-1",
        _sick(_process("decode-1", crossdock_decode_steps_failed_total=_readings((3, 3, "")))),
    ),
    "process restarts": ("restarting_process", "decode-1", _sick(restarts=("decode-1: 4 restarts in the last 10 min",))),
    "no decode worker": ("no_worker", "decode", _sick(workers=WORKERS[2:])),
    "pair left out": ("broken_pair", "prefill-0 → decode-1", _sick(circuit_open=("prefill-0 → decode-1: 3 transfers",))),
    "connections break": (
        "broken_pair",
        "gateway-0 → others",
        _sick(
            _process(
                "gateway-0",
                crossdock_kv_pairs_broken_total=_readings((4, 4, "direction=sent")),
                crossdock_kv_transfers_failed_total=_readings((5, 5, "direction=sent")),
            )
        ),
    ),
    "one of several connections breaks": (
        "broken_pair",
        "others → decode-0",
        _sick(
            _process(
                "prefill-0",
                crossdock_kv_pairs_broken_total=_readings((4, 4, "direction=sent")),
                crossdock_kv_transfers_failed_total=_readings((5, 5, "direction=sent")),
                crossdock_kv_transfers_total=_readings((99, 99, "direction=sent")),
            ),
            _process(
                "decode-0",
                crossdock_kv_pairs_broken_total=_readings((4, 4, "direction=received")),
                crossdock_kv_transfers_failed_total=_readings((5, 5, "direction=received")),
                crossdock_kv_transfers_total=_readings((7, 7, "direction=received")),
            ),
        ),
    ),
    "full decode KV": (
        "full_kv",
        "decode",
        _sick(_core(decode_batches=_readings((2, 0, "limit=no_decode_kv"))), *_both("prefill", 60.0), queued=9),
    ),
    "decode KV in use": ("full_kv", "decode", _sick(workers=(*WORKERS[2:], _worker("decode-0", 93)), queued=9)),
    "full prefill KV": (
        "full_kv",
        "prefill",
        _sick(_core(prefill_steps_total=_readings((9, 9, "limit=no_room_in_prefill"), (1, 1, "limit=full"))), queued=9),
    ),
    "ratio by the autopilot": ("wrong_ratio", "1P3D instead of 2P2D", _sick(autopilots=(PILOT,))),
    "too few prefill workers": (
        "wrong_ratio",
        "too few prefill workers",
        _sick(*_both("prefill", 95.0), *_both("decode", steps=10), queued=9),
    ),
    "too few decode workers": (
        "wrong_ratio",
        "too few decode workers",
        _sick(*_both("prefill", steps=10), _core(decode_batches=_readings((2, 0, "limit=no_decode_sequences"))), queued=9),
    ),
    "cold cache": ("cold_cache", "decode-0", _restarted(age_s=30.0, before=1_500, after=200)),
    "lost sessions": ("lost_sessions", "", _sick(_core(leases_total=_readings((5, 5, "outcome=broken"))))),
    "hot tenant": (
        "hot_tenant",
        "acme",
        _sick(tenants=(TenantStatus("acme", 0.5, 30), TenantStatus("lab", 0.5, 2)), queued=32),
    ),
    "small quota": (
        "small_quota",
        "acme",
        _sick(_core(tenant_over_quota_total=_readings((9, 9, "tenant=acme limit=requests_per_min")))),
    ),
    "impossible target": (
        "impossible_target",
        "standard",
        _sick(_busy("decode-0", size=1.0), classes=(ClassStatus("standard", 0.0, 4.0, 0.9, 9, 9, 1),)),
    ),
    "clock skew": ("clock_skew", "host-decode-0", _sick(msgspec.structs.replace(_busy("decode-0"), clock_ahead_s=-90.0))),
    "low descriptor limit": ("few_descriptors", "gateway-0", _gateway(process_max_fds=_readings((256, 0, "")))),
    "no descriptors left": (
        "few_descriptors",
        "gateway-0",
        _gateway(process_open_fds=_readings((19_000, 0, ""))),
    ),
    "throttled CPU": ("throttled_cpu", "decode-0", _sick(msgspec.structs.replace(_busy("decode-0"), throttled_share=0.3))),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_doctor_names_the_cause(fault: str) -> None:
    """Each fault gives one finding, which names its cause, the place, evidence and what to change."""
    cause, where, seen = FAULTS[fault]
    (found,) = rules.diagnose(seen)
    assert (found.cause, found.where) == (cause, where)
    assert all(found.evidence) and where in found.what + found.change + cause
    assert set(found.as_dict()) == {"cause", "where", "confidence", "evidence", "what", "change"}


def _healthy_but_loaded() -> list[Snapshot]:
    quota = _readings((9, 9, "tenant=acme limit=requests_per_min"))
    return [
        HEALTHY,
        # A larger batch takes longer; a slow first step is no slow worker; a quota may refuse where the cluster is full.
        _sick(_busy("decode-1", 40.0, size=30.0)),
        _sick(_busy("decode-1", 40.0, steps=2)),
        _sick(_core(tenant_over_quota_total=quota), workers=(*WORKERS[2:], _worker("decode-0", 80)), queued=3),
        _sick(classes=(ClassStatus("standard", 500.0, 50.0, 0.9, 9, 9, 9),)),
        _sick(tenants=(TenantStatus("acme", 1.0, 30),), queued=30),
        _restarted(age_s=30.0, before=1_500, after=1_400),
        _restarted(age_s=30.0, before=100, after=0),
        _restarted(age_s=700.0, before=1_500, after=200),
        _sick(_core(leases_total=_readings((9, 9, "outcome=found"), (2, 2, "outcome=broken")))),
    ]


@pytest.mark.parametrize("seen", _healthy_but_loaded())
def test_healthy_cluster_gets_no_finding(seen: Snapshot) -> None:
    assert rules.diagnose(seen) == []


@pytest.mark.parametrize("path", SAVED, ids=lambda path: path.stem)
def test_real_fault_is_named(path: Path) -> None:
    """From what a real cluster showed while it had a fault, that fault is named; a healthy one gets no finding."""
    found = {one.cause for one in rules.diagnose(msgspec.json.decode(path.read_bytes(), type=Snapshot))}
    assert found == set() if path.stem == "healthy" else path.stem in found


def test_counters_grow_from_restarts() -> None:
    """A counter's growth is that since the first reading, or since its process was started again."""
    before = [("a_total", {"x": "1"}, 5.0), ("b_total", {}, 9.0)]
    after = [("a_total", {"x": "1"}, 8.0), ("a_total", {"x": "2"}, 2.0), ("b_total", {}, 4.0)]
    found = ProcessMetrics("p", readings(before, after))
    assert [one.grew for one in found.readings("a_total")] == [3.0, 2.0]
    assert found.grew("a_total", x=1) == 3.0 and found.now("a_total") == 10.0 and found.grew("b_total") == 4.0


def test_silent_stopped_worker_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that its CPU limit stops too much to show metrics, and that is lost meanwhile, is still named."""
    looks = chain([HEALTHY.report], repeat(msgspec.structs.replace(HEALTHY.report, workers=WORKERS[1:])))
    periods = iter([(100, 10), (200, 100)])

    async def ask(*_: object) -> StatusReport:
        return next(looks)

    async def scrape_all(*_: object) -> dict[str, collect.Page]:
        return {}

    def throttled(report: StatusReport) -> dict[str, tuple[int, int]]:
        return {one.name: next(periods) for one in report.workers if one.name == "decode-0"}

    monkeypatch.setattr(collect, "ask", ask)
    monkeypatch.setattr(collect, "_scrape_all", scrape_all)
    monkeypatch.setattr(collect, "_throttled", throttled)
    (found,) = rules.diagnose(uvloop.run(collect.cluster("tcp://127.0.0.1:1", None, 0.0)))
    assert (found.cause, found.where) == ("throttled_cpu", "decode-0") and "90%" in found.evidence[0]


def test_waiting_is_that_of_most_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The requests of a tenant that waited are the median of several looks, so that one moment neither hides nor makes a
    fault."""
    waiting = iter([0, 0, 30, 20, 25, 0])

    async def ask(*_: object) -> StatusReport:
        tenants = (TenantStatus("acme", 0.5, next(waiting)), TenantStatus("lab", 0.5, 0))
        return msgspec.structs.replace(HEALTHY.report, tenants=tenants)

    monkeypatch.setattr(collect, "ask", ask)
    seen = uvloop.run(collect.cluster("tcp://127.0.0.1:1", None, 0.0))
    assert [(one.name, one.waiting) for one in seen.report.tenants] == [("acme", 20), ("lab", 0)]


def _vllm(**series: list[Sample]) -> list[str]:
    named = {f"vllm:{name}": rows for name, rows in series.items()}
    return [one.cause for one in vllm.diagnose(ProcessMetrics("http://h:8000", named))]


def test_vllm_metrics_name_the_cause() -> None:
    """A vLLM server's metrics tell a full KV cache, a full batch and a cold prefix cache from a healthy server."""
    waits, runs = _readings((9, 0, "engine=0")), _readings((4, 0, "engine=0"))
    asked, hits = _readings((9_000, 3_000, "")), _readings((3_100, 100, ""))
    assert _vllm(num_requests_running=runs, kv_cache_usage_perc=_readings((0.95, 0, ""))) == []
    assert _vllm(num_requests_waiting=waits, kv_cache_usage_perc=_readings((0.95, 0, ""))) == ["vllm_full_kv"]
    assert _vllm(num_preemptions_total=_readings((3, 3, ""))) == ["vllm_full_kv"]
    assert _vllm(num_requests_waiting=waits, num_requests_running=runs) == ["vllm_full_batch"]
    assert _vllm(prefix_cache_queries_total=asked, prefix_cache_hits_total=hits) == ["vllm_cold_cache"]


def test_every_cause_has_a_fault() -> None:
    """Each cause that `doctor` can name is tried here."""
    tried = {cause for cause, _, _ in FAULTS.values()} | {"vllm_full_kv", "vllm_full_batch", "vllm_cold_cache"}
    assert tried == set(CAUSES)
