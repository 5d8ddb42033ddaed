"""`python -m tools.metrics [FILE]`: the reference of all metrics, made from what the processes export."""

import sys
from collections.abc import Iterable
from pathlib import Path

from coordinator.core import Core
from coordinator.reporting.metrics import CoordinatorMetrics
from decode_worker.batch import RunningBatch
from decode_worker.metrics import DecodeMetrics
from decode_worker.requests import AttemptTable
from engine.kv.allocator import BlockAllocator
from gateway.metrics import BatchMetrics, GatewayMetrics
from lab.commands import autopilot
from launcher.local import supervisor_metrics
from prefill_worker.metrics import PrefillMetrics
from prefill_worker.prompts import PromptTable
from runtime.metrics.common import link_counters
from runtime.metrics.registry import Family, MetricsRegistry

UNITS = ("seconds", "bytes", "tokens", "ratio")
ELSEWHERE = (
    ("crossdock_gateway_time_to_first_token_seconds", "time_to_first_token_seconds", "time_to_first_token_seconds",
     "dynamo_frontend_time_to_first_token_seconds", ""),
    ("crossdock_gateway_inter_token_latency_seconds", "inter_token_latency_seconds", "inter_token_latency_seconds",
     "dynamo_frontend_inter_token_latency_seconds", ""),
    ("crossdock_gateway_time_per_output_token_seconds", "request_time_per_output_token_seconds", "", "", ""),
    ("crossdock_gateway_stream_duration_seconds", "e2e_request_latency_seconds", "e2e_request_latency_seconds",
     "dynamo_frontend_request_duration_seconds", "request_duration_seconds"),
    ("crossdock_gateway_requests_total", "request_success_total", "num_requests_total",
     "dynamo_frontend_requests_total", "request_total"),
    ("crossdock_gateway_active_streams", "num_requests_running", "num_running_reqs",
     "dynamo_frontend_inflight_requests", ""),
    ("crossdock_gateway_output_tokens_total", "generation_tokens_total", "generation_tokens_total",
     "dynamo_frontend_output_tokens_total", ""),
    ("crossdock_gateway_prompt_tokens_total", "prompt_tokens_total", "prompt_tokens_total", "", ""),
    ("crossdock_coordinator_requests, state queued", "num_requests_waiting", "num_queue_reqs",
     "dynamo_frontend_queued_requests", "flow_control_queue_size"),
    ("crossdock_coordinator_phase_seconds, phase queue", "request_queue_time_seconds", "queue_time_seconds", "",
     "flow_control_request_queue_duration_seconds"),
    ("…, phase prefill", "request_prefill_time_seconds", "", "", ""),
    ("…, phase transfer", "", "kv_transfer_latency_ms", "", ""),
    ("…, phase decode", "request_decode_time_seconds", "", "", ""),
    ("crossdock_coordinator_interruptions_total, reason preempted", "num_preemptions_total", "total_retracted_reqs", "", ""),
    ("crossdock_coordinator_interruptions_total, reasons of loss", "", "", "dynamo_frontend_model_migration_total", ""),
    ("crossdock_kv_blocks, held / all", "kv_cache_usage_perc", "token_usage",
     "dynamo_component_kvstats_gpu_cache_usage_percent", "average_kv_cache_utilization"),
    ("crossdock_prefix_cache_queried_tokens_total", "prefix_cache_queries_total", "", "", ""),
    ("crossdock_prefix_cache_hit_tokens_total", "prefix_cache_hits_total", "cached_tokens_total", "", ""),
    ("crossdock_kv_bytes_total", "nixl_bytes_transferred", "kv_transfer_total_mb", "", ""),
    ("crossdock_kv_transfers_failed_total", "nixl_num_failed_transfers_total", "num_transfer_failed_reqs_total", "", ""),
    ("crossdock_prefill_step_tokens", "iteration_tokens_total", "", "", ""),
)  # fmt: skip
"""Our names, and what comes nearest elsewhere."""

_HEAD = """\
# Metrics

With this page you find the metric for a question, and what it is called in vLLM and Dynamo. Made by
`python -m tools.metrics docs/metrics.md` from what the processes export; a test fails when it is stale.

Each process has a metrics port (`--metrics`). It is on loopback unless you give another address, because everyone who
reaches it can read it. It serves `/metrics`, `/health`, `/live` (200 only while the process makes progress) and
`/ready` (200 only while it can serve). `crossdock status` shows the addresses. A gateway's metrics are at `/metrics` of
its API, too, for those who may use the API, unless there are several tenants or `--no-api-metrics` is given. The
coordinator also serves `/targets`, which lists all processes for Prometheus. `crossdock serve` and `crossdock up` have
metrics of their own, on the port after those of their processes:

```yaml
scrape_configs:
  - job_name: crossdock
    http_sd_configs: [{url: "http://127.0.0.1:9400/targets"}]     # crossdock serve --metrics 9400
    static_configs: [{targets: ["127.0.0.1:9404"]}]               # crossdock serve itself: after a gateway and two workers
```

`scripts/metrics/grafana-dashboard.json` and `scripts/metrics/alerts.yaml` use these names.

Units are seconds, bytes, tokens and ratios. Counters end in `_total`; a histogram has `_bucket`, `_sum` and `_count`. Labels
have names that the operator chose or values from short lists, but no text of a client, no key and no id of a request. `tenant`
has a series for each of the 50 tenants with the most service lately, and `(other)` for the rest. All processes also export
`process_cpu_seconds_total`, `process_resident_memory_bytes` and other figures of the operating system. A mixed worker exports
the metrics of a prefill and of a decode worker; each of its series has the label `role` as well.
"""
_ROLES = {"coordinator": "Coordinator", "gateway": "Gateway", "prefill": "Prefill worker", "decode": "Decode worker",
          "supervisor": "`crossdock serve` and `up`", "autopilot": "`crossdock autopilot`"}  # fmt: skip


def _gateway() -> MetricsRegistry:
    registry = GatewayMetrics().registry
    BatchMetrics(registry)
    return registry


def registries() -> dict[str, MetricsRegistry]:
    """Returns the metrics that each role exports, from processes that have done nothing."""
    found = {
        "coordinator": CoordinatorMetrics(Core().state, lambda: 0.0).registry,
        "gateway": _gateway(),
        "prefill": PrefillMetrics(PromptTable(BlockAllocator(1), 1), [], {}, int).registry,
        "decode": DecodeMetrics(AttemptTable[None](BlockAllocator(1), 1, RunningBatch()), {}).registry,
    }
    for role, registry in found.items():
        registry.introduce(name=role)
        link_counters(registry, {}, None if role == "coordinator" else bool)
    found["supervisor"] = supervisor_metrics.registry_of(list)
    found["autopilot"] = autopilot.registry_of(autopilot.Seen())
    for role in ("supervisor", "autopilot"):
        found[role].introduce(name=role)
    return found


def families() -> dict[str, Family]:
    """Returns the families by exported name."""
    return {family.exported: family for registry in registries().values() for family in registry.families}


def text() -> str:
    """Returns the page in Markdown."""
    roles: dict[Family, list[str]] = {}
    for role, registry in registries().items():
        for family in registry.families:
            roles.setdefault(family, []).append(role)
    parts = [_HEAD]
    for role, title in _ROLES.items():
        own = [family for family, where in roles.items() if where == [role]]
        parts.append(f"## {title}\n\n{_table(own)}")
    shared = [family for family, where in roles.items() if len(where) > 1]
    parts.append(f"## Several roles\n\n{_table(shared, {f: ', '.join(roles[f]) for f in shared})}")
    head = (
        "| crossdock | vLLM (`vllm:`) | SGLang (`sglang:`) | Dynamo | llm-d (`llm_d_epp_`) |\n|---|---|---|---|---|\n"
    )
    rows = "".join("| " + " | ".join(_code(sub_block) for sub_block in row) + " |\n" for row in ELSEWHERE)
    parts.append(
        "## Names in other systems\n\nThese are the closest metrics. They may measure something slightly different.\n\n"
        + head
        + rows
    )
    return "\n".join(parts)


def _code(sub_block: str) -> str:
    name, comma, rest = sub_block.partition(",")
    return f"`{name}`{comma}{rest}" if name.isascii() and name else sub_block


def _table(families: Iterable[Family], roles: dict[Family, str] | None = None) -> str:
    headings = ["name", "type", "labels", "unit", "meaning", *(["role"] if roles else [])]
    lines = ["| " + " | ".join(headings) + " |", "|---" * len(headings) + "|"]
    for family in families:
        unit = next((unit for unit in UNITS if family.name.endswith(unit)), "")
        labels = ", ".join(f"`{label}`" for label in family.labels)
        line = f"| `{family.exported}` | {family.kind} | {labels} | {unit} | {family.help} |"
        lines.append(line + (f" {roles[family]} |" if roles else ""))
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> None:
    if arguments:
        Path(arguments[0]).write_text(text(), encoding="utf-8")
    else:
        sys.stdout.write(text())


if __name__ == "__main__":
    main(sys.argv[1:])
