"""Every role is scraped while a real cluster serves: what they count must add up, and say nothing that is nobody's business."""

import hashlib
import io
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from launcher.admin.status import show
from tests.e2e.live import Live, live
from tools import metrics as metrics_reference

KEYS = {"acme/ann": "key-of-ann-0123456789", "lab": "key-of-lab-0123456789"}
SECRET = "xyzzy"
ROLES = {"coordinator": "coordinator", "gateway-0": "gateway", "prefill-0": "prefill", "decode-0": "decode"}
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def _tenants() -> str:
    hashes = {tenant: hashlib.sha256(key.encode()).hexdigest() for tenant, key in KEYS.items()}
    return (
        "[tenants.acme]\nslo_ttft_ms = 60000\nslo_itl_ms = 60000\n"
        f'[tenants.acme.users.ann]\nkeys = ["{hashes["acme/ann"]}"]\n'
        f'[tenants.lab]\nslo_ttft_ms = 0.001\nkeys = ["{hashes["lab"]}"]\n'
    )


@pytest.fixture(scope="module")
def up(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    home = tmp_path_factory.mktemp("metrics")
    (home / "tenants.toml").write_text(_tenants(), encoding="utf-8")
    with live(tiny, home, "--tenants", str(home / "tenants.toml"), STEP_TOKENS="64") as cluster:
        yield cluster


def total(samples: Samples, name: str, **labels: str) -> float:
    wanted = set(labels.items())
    return sum(value for (sample, has), value in samples.items() if sample == name and wanted <= has)


def ask(up: Live, tenant: str, prompt: object, max_tokens: int, **options: object) -> int:
    """Returns the tokens of the answer."""
    body = {"model": up.model_id, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, **options}
    headers = {"Authorization": f"Bearer {KEYS[tenant]}"}
    answer = httpx.post(f"{up.base_url}/v1/completions", json=body, headers=headers, timeout=120.0, trust_env=False)
    assert answer.status_code == 200, answer.text
    tokens: int = answer.json()["usage"]["completion_tokens"]
    return tokens


def leave_early(up: Live) -> None:
    """A client that goes after the first tokens."""
    body = {"model": up.model_id, "prompt": [9] * 20, "max_tokens": 400, "ignore_eos": True, "stream": True}
    headers = {"Authorization": f"Bearer {KEYS['lab']}"}
    url = f"{up.base_url}/v1/completions"
    with httpx.stream("POST", url, json=body, headers=headers, timeout=120.0, trust_env=False) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: "):
                return


def test_metrics_match_the_reference(up: Live) -> None:
    """Each role exports exactly the metrics of the reference, at addresses that the coordinator lists."""
    registries = metrics_reference.registries()
    where = up.status().metrics
    assert set(where) == set(ROLES)
    for name, role in ROLES.items():
        assert httpx.get(f"http://{where[name]}/ready", trust_env=False).status_code == 200
        text = httpx.get(f"http://{where[name]}/metrics", trust_env=False).text
        exported = {(f.name, f.type) for f in text_string_to_metric_families(text) if f.name.startswith("crossdock_")}
        assert exported == {(family.name, family.kind) for family in registries[role].families}, name
    assert httpx.get(f"{up.base_url}/metrics", trust_env=False).status_code == 401, "on the API's port it needs a key"
    targets = httpx.get(f"http://{where['coordinator']}/targets", trust_env=False).json()
    assert {(one["labels"]["crossdock_name"], *one["targets"]) for one in targets} == set(where.items())


def test_metric_counts_add_up(up: Live) -> None:
    """Counts of streams, tokens, prompts, transfers and blocks agree between all processes."""
    before = {name: up.scrape(name) for name in ROLES}

    def grown(name: str, metric: str, **labels: str) -> float:
        return total(up.scrape(name), metric, **labels) - total(before[name], metric, **labels)

    tokens = ask(up, "acme/ann", f"{SECRET} and more of it", 12)
    tokens += ask(up, "acme/ann", [[1, 2, 3] * 30, [4, 5] * 40], 9)  # two streams
    tokens += ask(up, "lab", [7] * 100, 8, n=2)
    tokens += ask(up, "lab", [7] * 100, 8)  # its prompt is cached
    tokens += ask(up, "lab", [8], 1)  # ends with its first token
    up.wait_idle()
    g, c = "crossdock_gateway_", "crossdock_coordinator_"
    up.wait_for("a page that is new", lambda: grown("gateway-0", g + "output_tokens_total") == tokens)
    streams = 6
    assert grown("gateway-0", g + "streams_total", outcome="ok") == streams
    for histogram in ("time_to_first_token_seconds", "stream_duration_seconds"):
        assert grown("gateway-0", f"{g}{histogram}_count") == streams
        assert grown("gateway-0", f"{g}{histogram}_bucket", le="+Inf") == streams
    assert grown("gateway-0", g + "time_per_output_token_seconds_count") == streams - 1, "one had no second token"
    assert grown("gateway-0", g + "slo_streams_total", tenant="acme/ann", result="met") == 3
    assert grown("gateway-0", g + "slo_streams_total", tenant="lab", result="ttft") == 3
    assert total(up.scrape("gateway-0"), g + "active_streams") == 0
    first = grown("prefill-0", "crossdock_prefill_first_tokens_total")
    here = grown("decode-0", "crossdock_decode_first_tokens_total")
    assert here == 1, "of the prompt that was cached"
    first += here
    assert first == streams + 1 and first + grown("decode-0", "crossdock_decode_tokens_total") == tokens

    assert grown("coordinator", c + "requests_admitted_total") == streams
    assert grown("coordinator", c + "requests_ended_total", outcome="finished") == streams
    assert total(up.scrape("coordinator"), c + "requests") == 0
    assert grown("coordinator", c + "output_tokens_total") == tokens
    prompt_tokens = grown("gateway-0", g + "prompt_tokens_total")
    computed, cached = (grown("coordinator", c + "prompt_tokens_total", source=s) for s in ("computed", "cached"))
    assert computed + cached == prompt_tokens and cached > 0
    suffix = grown("decode-0", "crossdock_decode_suffix_tokens_total")
    assert grown("prefill-0", "crossdock_prefill_step_tokens_sum") + suffix == computed and suffix > 0
    assert grown("prefill-0", "crossdock_prefix_cache_hit_tokens_total") == 0, "what is cached was computed in decode"
    assert cached == 96 and prompt_tokens == grown("prefill-0", "crossdock_prefix_cache_queried_tokens_total") + 100
    charged = {t: grown("coordinator", c + "tenant_charged_tokens_total", tenant=t) for t in KEYS}
    assert sum(charged.values()) == computed + tokens and min(charged.values()) > 0
    assert grown("coordinator", c + "phase_seconds_count", phase="prefill") == streams

    sent, received = (grown(name, "crossdock_kv_bytes_total") for name in ("prefill-0", "decode-0"))
    assert 0 < received <= sent, "what an answer of one token sent may not have been waited for"
    assert grown("prefill-0", "crossdock_kv_transfers_total") == streams - 1, "one ended before it was needed"
    assert total(up.scrape("coordinator"), "crossdock_kv_transport", pair="prefill-0/decode-0", transport="shm") == 1
    for worker in ("prefill-0", "decode-0"):
        now = up.scrape(worker)
        blocks = {
            state: total(now, "crossdock_kv_blocks", state=state) for state in ("free", "cached", "held", "quarantined")
        }
        assert blocks["held"] == blocks["quarantined"] == 0 and blocks["cached"] > 0
        assert sum(blocks.values()) == total(before[worker], "crossdock_kv_blocks")
        assert total(now, "crossdock_link_protocol_errors_total") == 0
        assert total(now, "crossdock_link_coordinator_up") == 1


def test_leaving_client_is_counted(up: Live) -> None:
    """A request of a client that leaves is counted as cancelled and gives back its room."""
    c = "crossdock_coordinator_"
    before = up.scrape("coordinator")
    leave_early(up)
    up.wait_idle()

    def one_more() -> bool:
        after = up.scrape("coordinator")
        names = (c + "cancel_to_release_seconds_count", c + "requests_admitted_total", c + "tenant_requests_total")
        return all(total(after, name) == total(before, name) + 1 for name in names)

    up.wait_for("the cancelled request is counted", one_more)
    after = up.scrape("coordinator")
    assert total(after, c + "requests_ended_total", outcome="cancelled") == 1
    assert total(after, c + "requests_admitted_total") == total(after, c + "requests_ended_total")
    assert total(after, c + "tenant_requests_total", tenant="lab", outcome="cancelled") == 1


def test_rejections_are_counted_by_reason(up: Live) -> None:
    before = up.scrape("coordinator")
    body = {"model": up.model_id, "prompt": [1] * 10, "max_tokens": 5, "priority": "interactive"}
    headers = {"Authorization": f"Bearer {KEYS['lab']}"}
    answer = httpx.post(f"{up.base_url}/v1/completions", json=body, headers=headers, timeout=60.0, trust_env=False)
    assert answer.status_code == 403, answer.text
    name = "crossdock_coordinator_requests_rejected_total"
    up.wait_for("it is counted", lambda: total(up.scrape("coordinator"), name, reason="priority_class") == 1)
    assert total(up.scrape("coordinator"), name) == total(before, name) + 1


def test_metric_labels_hold_no_secrets(up: Live) -> None:
    """Metric labels are few and hold no prompt, key or answer id."""
    for name in ROLES:
        series: dict[str, int] = defaultdict(int)
        for (sample, labels), _ in up.scrape(name).items():
            series[sample] += 1
            for _, value in labels:
                assert not any(secret in value for secret in (SECRET, *KEYS.values(), "cmpl-")), (sample, value)
        assert max(series.values()) < 200 and sum(series.values()) < 1500


def test_status_fits_80_columns(up: Live) -> None:
    """The status page shows latencies, tenants, transports and metrics addresses in 80 columns."""
    ask(up, "acme/ann", [3] * 40, 6)
    report = up.wait_idle()
    out = io.StringIO()
    show(report, Console(file=out, width=80))
    text = out.getvalue()
    assert "TTFT" in text and "TPOT" in text and "acme/ann" in text and "requests/s" in text
    assert all(address in text for address in report.metrics.values())
    assert all(len(line) <= 80 for line in text.splitlines()), text
