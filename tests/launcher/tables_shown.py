"""What `test_tables` shows in each table: large figures and long names."""

from typing import Any

from coordinator.event_log.felt import Felt, FeltRequest
from coordinator.event_log.reasons import By, OtherTurn
from coordinator.event_log.timeline import ChunkSent, Entry, Passed, Placed, RequestEnded, Submitted
from launcher.bench import ratio as bench_ratio
from launcher.cluster.plan import PlannedProcess
from launcher.load.figures import LoadSlo, figures
from launcher.load.records import RequestRecord
from launcher.tables import Table
from proto.messages import Role
from proto.policy import ArmStatus, PolicyAnswer, PolicyVersion, RevisionStatus
from proto.status import PairStatus, StatusReport, WorkerStatus
from runtime.settings.roles import GatewaySettings
from runtime.tenancy.tenants import parse

REQUEST = "chatcmpl-5da27501d5a2f5cf04e182c7d37908d3"
TENANT = "research-department/recommendations"

# --- what runs ----------------------------------------------------------------------------------------------------------

REPORT = StatusReport(
    tuple(
        WorkerStatus(f"{role}-{n}", role, f"meta-llama/Llama-3.{n}-70B", f"node-{n}.example.org", 1_234_567, 1 << 17,
                     99_999, 256, 2, 10 ** (9 + n), draining=n == 1)
        for role in (Role.PREFILL, Role.DECODE) for n in range(2)
    ),
    ("gateway-0",), 4, {"decoding": 2}, {"finished": 9}, {"protocol_errors": 1},
    (PairStatus("prefill-0", "decode-0", "tcp", "shm: another host, user or namespace"),),
)  # fmt: skip
REVISIONS = [
    RevisionStatus(f"meta-llama/Llama-3.{n}-70B", f"2026-11-2{n}", 99, 99, n == 0, n == 1, 0.25, True, (TENANT,), 99_999,
                   99_999, 1_234_567, 1_230_000, 4_567, 1.5e9)
    for n in range(2)
]  # fmt: skip
USAGE: list[dict[str, Any]] = [
    {
        "day": f"2026-11-{day}", "tenant": tenant, "requests": 1_234_567, "open": 1, "charged_tokens": 98_765_432_109,
        "prompt_tokens": 87_654_321_098, "cached_tokens": 76_543_210_987, "output_tokens": 11_111_111_011,
        "queue_ms_mean": 123_456.7, "prefill_ms_mean": 4_321.0, "transfer_ms_mean": None, "decode_ms_mean": 65_432.1,
        "outcomes": {"finished": 1_230_000, "cancelled": 4_000, "failed": 566, "open": 1},
    }
    for day in (21, 22) for tenant in ("acme", TENANT)
]  # fmt: skip
_LIMITS = (
    "limits = { requests_per_min = 6000, tokens_per_min = 2000000, tokens_per_day = 20000000, kv_blocks = 100000 }"
)
POLICIES = PolicyAnswer(
    refusal="", active=98, trial=99, share=0.1, organisations=("acme", "research-department"),
    versions=tuple(
        PolicyVersion(number, "5da27501d5a2", source, 8.64e9, 10_000)
        for number, source in ((98, "version 97 with other options"), (99, "trial"))
    ),
    arms=tuple(ArmStatus(arm, 1_234_567, 1_234_566, 1_200_000, 1.2e10, 1.2e8) for arm in ("active", "candidate")),
)  # fmt: skip
TENANTS = parse(
    f'[tenants.acme]\npriority_class = "batch"\npriority_classes = ["interactive", "standard", "batch"]\n{_LIMITS}\n'
    f"[tenants.research-department]\nborrow = true\n[tenants.research-department.users.recommendations]\n{_LIMITS}\n"
)
_GATEWAY = GatewaySettings(name="gateway-on-node-0", model="/var/lib/" + "models/" * 4 + "tiny")
PLANNED = [PlannedProcess("gateway", 0, _GATEWAY, {"OMP_NUM_THREADS": "1"}, (0, 1))] * 2
FELT = Felt(0.0, 2)
FELT.requests = FELT.unfinished = 1_234_567
WORST = [
    FeltRequest(REQUEST, TENANT, "interactive", 123_456, 1_234.567, 9_876.543, 9_876.543, 123.456, 9_876.5, "finished"),
    FeltRequest(
        REQUEST, TENANT, "interactive", 123_456, 1_234.567, 9_876.543, None, 0.0, 9_876.5, "rejected", "queue_full"
    ),
]
STORY: list[Entry] = [
    Submitted(0.0, 1, "standard", TENANT, 123_456, 16, 2, 0),
    Passed(
        1.0, 2.2, 3, OtherTurn(By(REQUEST, "standard", "lab"), "organisation", "lab", "acme", 2.0, 9.0), (REQUEST,), 1
    ),
    Placed(2.276, "prefill-0 + decode-0", 33, 0, False),
    Placed(2.276, "decode-0", 33, 1344, False, 0.0, 0.451, 12.913),
    ChunkSent(2.276, "prefill-0", 4, 0, 96, 502, 1),
    RequestEnded(15.131, "finished", "", 0.0, None),
]

# --- benches ------------------------------------------------------------------------------------------------------------


def _record(index: int, tenant: str) -> RequestRecord:
    return RequestRecord(
        index, tenant, due_s=index, prompt_asked=100, output_asked=10, sent_s=index, first_s=index + 234.5,
        gaps_ms=[123_456.0] * 9, ended_s=index + 999.0, tokens=10, prompt_tokens=100, outcome="ok",
        priority=("interactive", "batch")[index % 2],
    )  # fmt: skip


FIGURES = figures(
    [_record(n, ("acme", TENANT)[n % 2]) for n in range(20)], {"acme": 1.0, TENANT: 2.0}, LoadSlo(1e3, 1e2, 0)
)
RATIOS = [bench_ratio.row(name, FIGURES) | {"fails": ["ttft", "answer", "tpot"]} for name in ("1P1D", "2P1D", "10P12D")]
DIFFERENCES = {
    "model": ("meta-llama/Llama-3.1-70B", "–"),
    "rate": (0.25, 1.0),
    "tenant": ([], ["acme:1:2.5", "lab:1:3"]),
}
COMPARED = [
    {"figure": f"{name} {what}, ms", "a": 123_456.7, "b": 9.123, "ratio": 0.123, "low": 0.101, "high": 12.345,
     "means_something": what == "p50"}
    for name in ("TTFT", "within the limits of A") for what in ("mean", "p50")
]  # fmt: skip
_TAILS = {"p50": 1234.5, "p90": 12_345.6, "p99": 99_999.9, "max": 123_456.7, "count": 123_456}
_TURNS = {
    "requests": 123_456, "ttft_ms": _TAILS, "itl_ms": _TAILS, "goodput": {"attainment": 0.9876, "requests_per_s": 123.45}
}  # fmt: skip
AGENTS: dict[str, Any] = {
    "turns": 123_456, "ok": 123_455, "seconds": 86_400.0, "turns_per_s": 123.45, "cached_share": 0.987,
    "goodput": _TURNS["goodput"], "ttft_first_ms": _TAILS, "ttft_later_ms": _TAILS, "gaps_ms": _TAILS,
    "errors": {"http_503": "no capacity"},
    "fairness": {"tenants": {"an-organisation/with-a-user": _TURNS, "lab": _TURNS}},
}  # fmt: skip
_KIND = dict.fromkeys(("streams", "tokens", "errors", "lost", "repeated", "changed", "cut_off"), 1234567)
CONTINUITY: dict[str, Any] = {
    "compared": "token ids", "kills": 12_345, "streams": {"greedy": _KIND, "seeded": _KIND}, "errors": {"http_503: busy": 12},
    "failed_kills": ["no process"], "requests": 16, "unsteady_requests": 2, "changed_without_kill": 3,
    "interrupted_streams": 1_234, "longest_gap_undisturbed_s": _TAILS, "longest_gap_s": _TAILS,
    "new_request_s": _TAILS, "all_go_on_s": _TAILS,
}  # fmt: skip
_GAPS = {f"{rank}_ms": 123_456.7 for rank in ("p50", "p95", "p99", "max")} | {
    "gaps": 1_234_567,
    "tokens_per_s": 99_999.9,
}
ISOLATION: dict[str, Any] = {
    "alone": _GAPS,
    "loaded": _GAPS,
    "long_prompts": {"finished": 12, "prompt_tokens_mean": 123_456.0, "ttft_p50_s": 99.0, "ttft_max_s": 999.0},
}
_GROUP = {
    "offered": 1_234_567, "finished": 1_234_567, "ended_otherwise": {"rejected": 99_999, "expired": 99_999},
    "rejected": {"tenant_queue": 99_999}, "goodput_per_s": 12_345.67, "goodput_share": 1.0,
    "ttft_ms": {"p50": 123_456.0, "p90": 123_456.0, "p99": 123_456.0}, "tpot_ms": None, "prefill_share": 1.0,
    "decode_share": 1.0, "useful_share": 1.0, "rejections_per_request": 123.45, "interruptions": 123_456,
}  # fmt: skip
LOADED: dict[str, Any] = {
    "seed": 1,
    "duration_s": 86_400.0,
    "all": _GROUP,
    "tenants": [{"tenant": TENANT, "priority_class": "interactive"} | _GROUP],
    "classes": {"interactive": _GROUP},
    "traffic": {"chat": _GROUP, "summaries-of-long-documents": _GROUP},
}

# --- the ratio lab ------------------------------------------------------------------------------------------------------

RANKED: list[dict[str, Any]] = [
    {
        "workers": workers, "step_tokens": 2048, "probability": 0.92, "goodput_requests_per_s": 1_234.56, "attainment": 1.0,
        "good_per_cost": 1_234_567.0, "ttft_ms": {"p50": 12_345.0, "p90": 123_456.0}, "tpot_ms": {"p90": 1_234.5},
        "prefill_busy": 0.987, "link_busy": 0.123, "decode_busy": 0.123, "binds": binds,
        "load_kept": 0.987, "seqs_max": 0, "simulated_requests": 19_366,
    }
    for workers, binds in (("128P384D", "prefill compute"), ("512M", ""))
]  # fmt: skip
TUNED: dict[str, Any] = {
    "settings": {"workers": 2, "cards": 0, "layouts": ""},
    "what_if_requests": 4_800,
    "by_workers": [
        {
            "workers": workers, "total": total, "mixed": mixed, "attainment": 0.9, "simulated_requests": 600,
            "goodput_requests_per_s": 1_234.56, "goodput_low": 1_200.0, "goodput_high": 1_300.0,
        }
        for workers, total, mixed in (("1P1D", 2, 0), ("1M", 1, 1), ("2M", 2, 2))
    ],
    "what_if": [{"load": 1.5, "goodput_requests_per_s": 1_234.56, "attainment": 0.987}],
}  # fmt: skip
_FORETOLD = {"predicted": 12_345.6, "measured": 12_345.7, "error": -0.123}
CHECKED: dict[str, Any] = {
    "ratio": "128P384D",
    "requests": 1_234_567,
    "ttft_ms": {"p50": _FORETOLD, "p90": _FORETOLD},
    "attainment": {"predicted": 0.9, "measured": 0.95, "error": 5.0},
    "goodput_per_s": {"predicted": 123.4, "measured": 123.5, "error": 5.0},
}

OPTIONS: list[dict[str, Any]] = [
    {"option": "--heartbeat-ms", "value": 1_000, "source": "default"},
    {"option": "--otlp-endpoint", "value": "http://collector.example:4318", "source": "environment"},
]


def model_table(table: Table) -> Table:
    table.row("HuggingFaceTB/SmolLM2-135M-Instruct@main", "538", "/models/smollm2")
    return table
