"""What is sent: arrivals, lengths, traces, tenants, cancellations; all of it the same for the same seed."""

import os
from collections import Counter
from itertools import pairwise
from pathlib import Path
from statistics import mean, pstdev
from typing import Any

import numpy as np
import pytest

from launcher.load import plan as load_plan
from launcher.load import traces as load_traces
from launcher.load.lengths import Lengths, arrival_kind, arrival_times
from launcher.load.plan import NEVER
from launcher.load.prompts import Prompts
from launcher.load.settings import LoadSettings, ServeBenchSettings
from launcher.load.tenants import LoadTenant, Ratio, parse_tenants
from runtime.settings.command_line import add_command, invoke, new_app
from runtime.settings.options import SettingsError, load

AZURE = Path(os.environ.get("CROSSDOCK_TEST_AZURE_TRACE", "AzureLLMInferenceTrace_conv.csv"))


def make(context: int = 0, **values: Any) -> load_plan.LoadPlan:
    settings = LoadSettings(**{"warmup_s": 0.0, **values})
    return load_plan.make_plan(settings, load_plan.tenants_of(settings), context)


@pytest.mark.parametrize("cv", [1.0, 4.0, 0.0])
def test_arrivals_have_rate_and_burstiness(cv: float) -> None:
    """Arrival times have the rate and the burstiness that were asked for."""
    times = arrival_times(arrival_kind(cv), 5.0, cv, 20_000.0, 1_000_000, np.random.default_rng(7))
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert mean(gaps) == pytest.approx(0.2, rel=0.1)
    assert pstdev(gaps) / mean(gaps) == pytest.approx(cv, rel=0.1, abs=1e-6)
    assert all(0 <= at < 20_000.0 for at in times)


def test_lengths_follow_their_distribution() -> None:
    """Drawn lengths follow the fixed, uniform or lognormal distribution."""
    source = np.random.default_rng(1)
    assert {Lengths.parse("17").draw(source) for _ in range(10)} == {17}
    uniform = [Lengths.parse("uniform:10-20").draw(source) for _ in range(2000)]
    assert (min(uniform), max(uniform)) == (10, 20)
    lognormal = sorted(Lengths.parse("lognormal:200,0.8").draw(source) for _ in range(4000))
    assert lognormal[2000] == pytest.approx(200, rel=0.1)
    assert lognormal[int(0.8413 * 4000)] == pytest.approx(200 * np.exp(0.8), rel=0.15)


@pytest.mark.parametrize("text", ["", "0", "uniform:9-3", "lognormal:9", "normal:3,4", "-5", "lognormal:5,9", "9" * 9])
def test_bad_lengths_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"length|sigma"):
        Lengths.parse(text)


def test_seed_determines_the_load() -> None:
    """The same seed gives the same plan and another seed another one."""
    values: dict[str, Any] = {"rate": 20.0, "cancel_share": 0.2, "prefix_share": 0.5, "tenant": ["a:k:1", "b:k:3"]}
    assert make(**values) == make(**values)
    assert make(**values).requests != make(**values, seed=1).requests
    without = make(**values | {"cancel_share": 0.0}).requests
    assert [one.due_s for one in without] == [one.due_s for one in make(**values).requests]


def test_planned_shares_are_kept() -> None:
    """Shares of tenants, prefixes, cancellations and the abuser are as asked for."""
    plan = make(rate=100.0, cancel_share=0.04, prefix_share=0.3, tenant=["a:k:1", "b:k:3::batch"], abuser="c:k:2")
    requests = plan.requests
    names = Counter(one.tenant.name for one in requests)
    own = names["a"] + names["b"]
    assert names["b"] / own == pytest.approx(0.75, abs=0.03)
    assert names["c"] / own == pytest.approx(2.0, rel=0.1)
    assert sum(one.prefix != NEVER for one in requests) / len(requests) == pytest.approx(0.3, abs=0.03)
    assert {one.prefix for one in requests} == {NEVER, *range(load_plan.PREFIXES)}
    leaving = [one for one in requests if one.cancel_s != NEVER or one.cancel_tokens != NEVER]
    assert len(leaving) / len(requests) == pytest.approx(0.04, abs=0.01)
    assert all(one.cancel_tokens < max(2, one.output_tokens) for one in leaving)
    assert {one.priority for one in requests if one.tenant.name == "b"} == {"batch"}
    assert {one.priority for one in requests if one.tenant.name == "a"} == {""}
    assert [one.due_s for one in requests] == sorted(one.due_s for one in requests)


def test_requests_are_cut_to_the_context() -> None:
    """Requests are cut to fit the context, and the plan counts those that were cut."""
    plan = make(context=100, rate=50.0, prompt_tokens="uniform:10-200", output_tokens="uniform:1-300")
    assert 0 < plan.cut < len(plan.requests)
    assert all(one.prompt_tokens + one.output_tokens <= 100 for one in plan.requests)
    assert all(one.prompt_tokens >= 1 and one.output_tokens >= 1 for one in plan.requests)


def test_prompts_have_length_and_shared_prefix() -> None:
    """Prompts have their planned length and share a prefix exactly where planned."""
    plan = make(rate=20.0, prefix_share=0.5, prefix_tokens=16)
    prompts = Prompts(0, tuple(range(100)), plan.block_tokens, 16)
    made = {one.index: prompts.make(one) for one in plan.requests}
    assert all(len(made[one.index]) == one.prompt_tokens for one in plan.requests)
    heads = {(one.prefix, tuple(made[one.index][:16])) for one in plan.requests if one.prefix != NEVER}
    assert len(heads) == load_plan.PREFIXES
    others = [tuple(made[one.index]) for one in plan.requests if one.prefix == NEVER and one.prompt_tokens > 8]
    assert len(set(others)) == len(others)
    words = Prompts(0, ("a", "b"), 1, 16, tokens_per_word=2.0, overhead_tokens=10.0)
    text = words.make(next(one for one in plan.requests if one.prompt_tokens > 50))
    assert isinstance(text, str) and set(text.split()) == {"a", "b"}


# --- traces -----------------------------------------------------------------------------------------------------------


def test_csv_trace_is_scaled_and_cut(tmp_path: Path) -> None:
    """A CSV trace is sorted by time, scaled, and cut to a window."""
    file = tmp_path / "t.csv"
    file.write_text("arrival_s,prompt_tokens,output_tokens,x\n5,100,10,a\n1,10,0,b\n9,100,30,c\n")
    rows = load_traces.read(str(file))
    assert [row.at_s for row in rows] == [1, 5, 9]
    source = np.random.default_rng(0)
    part = load_traces.scaled(rows, from_s=4.0, duration_s=2.0, speed=4.0, scale_tokens=0.5, source=source)
    assert [(row.at_s, row.prompt_tokens, row.output_tokens) for row in part] == [(0.25, 50, 5), (1.25, 50, 15)]
    plan = make(trace=str(file), duration_s=10.0)
    assert [one.output_tokens for one in plan.requests] == [1, 10, 30]


def test_azure_trace_is_read_unchanged(tmp_path: Path) -> None:
    """Azure's trace format is read as published, with either form of timestamps."""
    file = tmp_path / "t.csv"
    lines = ("2023-11-16 23:59:59.9000000,374,44", "2023-11-17 00:00:01.4000000,5,0", "2024-05-10 00:00:00.1+00:00,7,9")
    file.write_text("\r\n".join(("TIMESTAMP,ContextTokens,GeneratedTokens", *lines)))
    rows = load_traces.read(str(file))
    assert [(row.prompt_tokens, row.output_tokens) for row in rows] == [(374, 44), (5, 0), (7, 9)]
    assert [row.at_s for row in rows[:2]] == pytest.approx([0.0, 1.5]) and rows[2].at_s > 1e7


def test_mooncake_trace_shares_blocks(tmp_path: Path) -> None:
    """Mooncake lines share the blocks that their hash ids name, and equal times are spread."""
    file = tmp_path / "t.jsonl"
    line = '{"timestamp": %d, "input_length": %d, "output_length": 5, "hash_ids": %s}\n'
    file.write_text(line % (0, 1100, "[1, 2, 3]") + line % (0, 1400, "[1, 2, 4]") + "\n" + line % (3000, 700, "[9, 2]"))
    plan = make(trace=str(file), duration_s=10.0, scale_tokens=0.1)
    times = [one.due_s for one in plan.requests]
    assert 0 <= times[0] < times[1] < 3.0 == times[2]
    prompts = Prompts(0, tuple(range(1000)), plan.block_tokens, 16)
    first, second, third = (prompts.make(one) for one in plan.requests)
    assert plan.block_tokens == 51
    assert first[:102] == second[:102] and first[102:] != second[102 : len(first)]
    assert third[:51] != first[:51] and third[51:70] == first[51:70]


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("t.csv", "arrival_s,prompt_tokens\n1,2\n", "line 1: no column output_tokens"),
        ("t.csv", "arrival_s,prompt_tokens,output_tokens\n1,2,3\n1,two,3\n", "line 3: '1,two,3'"),
        ("t.csv", "arrival_s,prompt_tokens,output_tokens\n1,2\n", "line 2"),
        ("t.csv", "TIMESTAMP,ContextTokens\n", "line 1: no column GeneratedTokens"),
        ("t.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\nnoon,2,3\n", "line 2: 'noon,2,3'"),
        (
            "t.csv",
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 12:00,2,3\n2023-11-16 11:59,2,3\n",
            "line 3: the time -60",
        ),
        ("t.csv", "arrival_s,prompt_tokens,output_tokens\nnan,2,3\n", "line 2: the time nan"),
        ("t.csv", "arrival_s,prompt_tokens,output_tokens\n1,0,3\n", "line 2: 0 and 3 tokens"),
        ("t.csv", "arrival_s,prompt_tokens,output_tokens\n", "has no requests"),
        ("t.csv", "", "line 1: no column"),
        ("t.jsonl", '{"timestamp": 0, "input_length": 5}\n', "line 1"),
        ("t.jsonl", '{"timestamp": 0, "input_length": 5, "output_length": 2}\n{', "line 2"),
        ("t.jsonl", '{"timestamp": -9, "input_length": 5, "output_length": 2}\n', "line 1: the time"),
    ],
)
def test_bad_trace_lines_are_named(tmp_path: Path, name: str, text: str, complaint: str) -> None:
    """A bad line of a trace is refused with --trace and the complaint."""
    (tmp_path / name).write_text(text)
    with pytest.raises(SettingsError, match=r"^--trace: .*") as caught:
        load_traces.read(str(tmp_path / name))
    assert complaint in str(caught.value)


def test_missing_or_binary_trace_is_refused(tmp_path: Path) -> None:
    """A trace that is missing or not UTF-8 is refused, and so is a load without a request."""
    with pytest.raises(SettingsError, match="--trace: cannot read"):
        load_traces.read(str(tmp_path / "none.csv"))
    (tmp_path / "t.csv").write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(SettingsError, match="not UTF-8"):
        load_traces.read(str(tmp_path / "t.csv"))
    with pytest.raises(SettingsError, match="--rate: no request comes"):
        make(rate=0.001, duration_s=1.0)


@pytest.mark.skipif(
    not AZURE.is_file(), reason="CROSSDOCK_TEST_AZURE_TRACE names no file; docs/benchmarks.md says where it is from"
)
def test_azure_trace_has_its_known_size() -> None:
    """The published Azure trace has its known number of rows and token ratio."""
    rows = load_traces.read(str(AZURE))
    assert len(rows) == 19_366
    ratio = sum(row.prompt_tokens for row in rows) / sum(row.output_tokens for row in rows)
    assert ratio == pytest.approx(5.5, abs=0.1)


# --- who, and with how many workers -----------------------------------------------------------------------------------


def test_tenants_come_from_flags() -> None:
    """Tenants of a load have keys, shares, weights and classes."""
    assert parse_tenants(["a:k:1", "b::2:3:batch"]) == [LoadTenant("a", "k", 1), LoadTenant("b", "", 2, 3, "batch")]
    settings = load(LoadSettings, {"tenant": "a:k:1,b:k:2"})
    assert [tenant.name for tenant in load_plan.tenants_of(settings)] == ["a", "b"]


@pytest.mark.parametrize(
    "text", ["a", "a:sk-secret", "a:sk-secret:-1", "a:sk-secret:x", ":sk-secret:1", "a:sk-secret:1:1:b:c"]
)
def test_bad_tenant_error_hides_its_key(text: str) -> None:
    """A bad --tenant is refused without showing its key."""
    with pytest.raises(SettingsError, match="--tenant: ") as caught:
        load_plan.tenants_of(load(LoadSettings, {"tenant": text}))
    assert "secret" not in str(caught.value)


def test_list_option_repeats_or_has_commas(capsys: pytest.CaptureFixture[str]) -> None:
    """A list option may be repeated or have commas."""
    found: list[LoadSettings] = []

    def keep(settings: LoadSettings) -> int:
        found.append(settings)
        return 0

    app = new_app()
    add_command(app, "load", LoadSettings, keep)
    for arguments in (["--tenant", "a:k:1", "--tenant", "b:k:2"], ["--tenant", "a:k:1,b:k:2"], []):
        assert invoke(app, arguments, "load") == 0
    assert [settings.tenant for settings in found] == [["a:k:1", "b:k:2"]] * 2 + [[]]
    assert invoke(app, ["--duration", "5", "--warmup-s", "9"], "load") == 2
    assert "--warmup-s: 9 leaves nothing" in capsys.readouterr().err


def test_ratios_are_parsed_or_refused() -> None:
    """Ratios like 2P3D are parsed, and malformed or repeated ones refused."""
    assert [str(Ratio.parse(text)) for text in ("1P1D", "2p3d", "16P8D")] == ["1P1D", "2P3D", "16P8D"]
    for bad in ("", "1P", "0P1D", "1P0D", "1D1P", "99P1D", "1P1D1", "-1P1D"):
        with pytest.raises(ValueError, match="ratio"):
            Ratio.parse(bad)
    assert load(ServeBenchSettings, {"start": "1P1D,2P1D"}).start == ["1P1D", "2P1D"]
    for bad in ("1P1D,1P1D", "1P1D,x"):
        with pytest.raises(SettingsError, match="--start: "):
            load(ServeBenchSettings, {"start": bad})
