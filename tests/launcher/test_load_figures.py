"""Figures from records: what counts as good, whose service it was, and which differences mean something."""

import io
import random
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from launcher.bench import compare as bench_compare
from launcher.bench import ratio as bench_ratio
from launcher.bench.serve import shown_settings
from launcher.load import plot as load_plot
from launcher.load import records as load_records
from launcher.load import show as load_show
from launcher.load.figures import LoadSlo, figures, goodput, jain, tails, values
from launcher.load.records import RequestRecord, RunFile
from launcher.load.settings import CompareSettings, LoadSettings
from runtime.settings.options import SettingsError

SLO = LoadSlo(1000.0, 100.0, 0.0)


def record(index: int = 0, ttft_s: float = 0.5, gaps_ms: list[float] | None = None, **more: Any) -> RequestRecord:
    gaps = [50.0] * 9 if gaps_ms is None else gaps_ms
    sent = float(index)
    values: dict[str, Any] = {
        "tenant": "a",
        "due_s": sent,
        "prompt_asked": 100,
        "output_asked": 10,
        "sent_s": sent,
        "first_s": sent + ttft_s,
        "gaps_ms": gaps,
        "ended_s": sent + ttft_s + sum(gaps) / 1000,
        "tokens": 1 + len(gaps),
        "prompt_tokens": 100,
        "outcome": "ok",
    }
    return RequestRecord(index, **values | more)


def test_tails_are_measured_values() -> None:
    """Tails are values that were measured, and None without values."""
    found = tails([float(value) for value in range(1, 101)])
    assert found is not None
    assert (found["p50"], found["p90"], found["p95"], found["p99"], found["max"]) == (50, 90, 95, 99, 100)
    assert found["mean"] == 50.5 and found["count"] == 100
    assert tails([]) is None


def test_goodput_is_given_per_priority() -> None:
    """Goodput is given for each priority, if requests have priorities."""
    records = [record(0, priority="interactive"), record(1, 9.0, priority="interactive"), record(2, priority="batch")]
    found = figures(records, {"a": 1.0}, LoadSlo(1000, 100, 0))["priorities"]
    assert {name: row["goodput"]["attainment"] for name, row in found.items()} == {"batch": 1.0, "interactive": 0.5}
    assert figures([record()], {"a": 1.0}, LoadSlo(1000, 100, 0))["priorities"] == {}


def test_goodput_needs_every_limit_met() -> None:
    """A request counts as good only if it met every limit; cancelled and interrupted ones are not judged."""
    records = [
        record(0),
        record(1, ttft_s=1.5),
        record(2, gaps_ms=[150.0] * 9),
        record(3, ttft_s=2.0, gaps_ms=[150.0] * 9),
        record(4, outcome="http_429", first_s=None, gaps_ms=[]),
        record(5, outcome="cancelled"),
        record(6, outcome="interrupted"),
        record(7, gaps_ms=[]),
    ]
    found = goodput(records, SLO, 10.0)
    assert (found["judged"], found["good"], found["requests_per_s"]) == (6, 2, 0.2)
    assert found["missed"] == {"ttft": 2, "tpot": 2, "answer": 1}
    strict = goodput([record(0, gaps_ms=[10.0] * 9 + [900.0])], LoadSlo(1000.0, 200.0, 500.0), 1.0)
    assert strict["missed"] == {"itl": 1}


def test_tpot_counts_tokens_and_itl_gaps() -> None:
    """TPOT divides by tokens, and ITL has one value per gap."""
    one = record(gaps_ms=[90.0, 90.0], tokens=7)
    assert one.tpot_ms == 30.0
    assert values([one], "itl_ms") == [90.0, 90.0]
    assert record(gaps_ms=[]).tpot_ms is None


def test_failed_requests_have_no_times() -> None:
    """Failed requests give no times, and cancelled ones give those they had."""
    records = [record(0, outcome="cut_short"), record(1, outcome="cancelled"), record(2)]
    assert len(values(records, "ttft_ms")) == 2
    assert len(values(records, "e2e_ms")) == 1
    assert len(values(records, "itl_ms")) == 18


def test_fairness_is_service_by_weight() -> None:
    """Fairness is Jain's index of service per weight, over tenants that asked for something."""
    assert jain([1.0, 1.0, 1.0]) == pytest.approx(1.0)
    assert jain([1.0, 0.0, 0.0, 0.0]) == pytest.approx(0.25)
    assert jain([0.0]) is None
    records = [record(0), record(1, tenant="b"), record(2, tenant="b", cached_tokens=60)]
    records += [record(3, tenant="b", outcome="http_429", first_s=None, gaps_ms=[], tokens=0)]
    found = figures(records, {"a": 1.0, "b": 2.0, "c": 1.0}, SLO)["fairness"]
    assert found["tenants"]["a"]["service"] == 120.0
    assert found["tenants"]["b"]["service_per_weight"] == (120 + 60) / 2
    assert found["tenants"]["b"]["served_share"] == pytest.approx(180 / 360)
    assert found["jain_service_per_weight"] == pytest.approx(jain([120.0, 90.0])), "who asked nothing is not counted"


def test_figures_skip_warmup_and_name_errors() -> None:
    """Figures leave warm-up requests out and name errors with their details."""
    records = [record(0, ttft_s=99.0, counted=False), record(1), record(2, sent_s=2.25)]
    records += [
        record(3, outcome="http_503", detail="no capacity", retry_after_s=4.0, first_s=None, gaps_ms=[], tokens=0)
    ]
    found = figures(records, {"a": 1.0}, SLO)
    assert (found["requests"], found["warmup_requests"]) == (3, 1)
    assert found["errors"] == {"http_503": 1}
    assert found["error_details"] == {"http_503": "no capacity"}
    assert found["retry_after_s"]["max"] == 4.0
    assert found["late_ms"]["max"] == 250.0
    assert found["latency"]["ttft_ms"]["max"] < 1000
    assert found["latency"]["queue_ms"] is None
    assert found["seconds"] == pytest.approx(records[3].ended_s - 1.0)
    assert found["throughput"]["output_tokens_per_s"] == pytest.approx(20 / found["seconds"])
    load_show.show(found, Console(file=io.StringIO()))


def test_offered_rate_follows_arrivals() -> None:
    """The offered rate is taken from the arrivals and not stretched by slow answers."""
    found = figures([record(index, ttft_s=50.0) for index in range(11)], {"a": 1.0}, SLO)
    assert found["seconds"] > 60
    assert found["throughput"]["offered_requests_per_s"] == pytest.approx(1.0)
    assert found["throughput"]["requests_per_s"] == pytest.approx(11 / found["seconds"])
    one = figures([record(0)], {"a": 1.0}, SLO)
    assert one["throughput"]["offered_requests_per_s"] > 0, "one arrival spans nothing"


def test_figures_without_answers_are_shown() -> None:
    """Figures of a run without answers are computed and shown."""
    found = figures([record(0, outcome="connect", first_s=None, gaps_ms=[], tokens=0)], {"a": 1.0, "b": 1.0}, SLO)
    assert found["goodput"]["attainment"] == 0.0
    load_show.show(found, Console(file=io.StringIO()))


# --- two runs ---------------------------------------------------------------------------------------------------------


def run_of(seed: int, factor: float, count: int = 300, **settings: Any) -> RunFile:
    source = random.Random(seed)
    records = [
        record(index, factor * source.lognormvariate(-1, 0.5), [factor * source.gauss(50, 5) for _ in range(9)])
        for index in range(count)
    ]
    shown = shown_settings(LoadSettings(tenant=["a:sk-secret:1"], abuser="c:sk-secret:2", **settings))
    about = {"model": "m", "interrupted": False}
    return RunFile(load_records.FORMAT, shown, about, {"a": 1.0}, figures(records, {"a": 1.0}, SLO), records)


def test_bootstrap_separates_change_from_noise() -> None:
    """The bootstrap marks a real slowdown, and few figures of two equal runs."""
    same = bench_compare.compared(run_of(1, 1.0), run_of(2, 1.0), 0, 300)
    assert sum(row["means_something"] for row in same) <= len(same) // 4
    slower = bench_compare.compared(run_of(1, 1.0), run_of(2, 1.3), 0, 300)
    rows = {row["figure"]: row for row in slower}
    for name in ("TTFT mean, ms", "TTFT p50, ms", "ITL p50, ms", "ITL p99, ms"):
        assert rows[name]["means_something"], name
        assert rows[name]["low"] <= rows[name]["ratio"] <= rows[name]["high"]
    assert rows["ITL p50, ms"]["ratio"] == pytest.approx(1.3, rel=0.02)


def test_compare_marks_differing_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The comparison marks differing settings and refuses files that are no runs."""
    first, second = str(tmp_path / "a.json"), str(tmp_path / "b.json")
    Path(first).write_text(load_records.encoded(run_of(1, 1.0, 40)))
    Path(second).write_text(load_records.encoded(run_of(2, 2.0, 40, rate=7.0)))
    assert "secret" not in Path(first).read_text()
    assert bench_compare.run(CompareSettings(first=first, second=second)) == 0
    said = capsys.readouterr().out
    assert "rate" in said and "7.0" in said and "differs" in said
    Path(second).write_text("{}")
    with pytest.raises(SettingsError, match=r"b.json: not a file of"):
        load_records.read(second)
    with pytest.raises(SettingsError, match="No such file"):
        load_records.read(str(tmp_path / "c.json"))
    Path(second).write_bytes(msgspec.json.encode(run_of(1, 1.0, 2)).replace(b'"format":1', b'"format":9'))
    with pytest.raises(SettingsError, match="of format 9"):
        load_records.read(second)


def test_ratio_names_failing_limit_and_phase() -> None:
    """A ratio's row names the limits it fails and the phase that is short."""
    slow_prefill = figures([record(index, ttft_s=3.0) for index in range(10)], {"a": 1.0}, SLO)
    slow_decode = figures([record(index, gaps_ms=[300.0] * 9) for index in range(10)], {"a": 1.0}, SLO)
    fine = figures([record(index) for index in range(10)], {"a": 1.0}, SLO)
    assert (bench_ratio.failing(slow_prefill["goodput"]), bench_ratio.bottleneck(slow_prefill)) == (["ttft"], "prefill")
    assert (bench_ratio.failing(slow_decode["goodput"]), bench_ratio.bottleneck(slow_decode)) == (["tpot"], "decode")
    assert (bench_ratio.failing(fine["goodput"]), bench_ratio.bottleneck(fine)) == ([], "nothing")
    nothing = figures([record(0, outcome="connect", first_s=None, gaps_ms=[])], {"a": 1.0}, SLO)
    assert bench_ratio.bottleneck(nothing) == "unknown"
    rows = [bench_ratio.row("1P1D", slow_prefill), bench_ratio.row("2P1D", fine), bench_ratio.row("1P2D", nothing)]
    bench_ratio.show(rows, Console(file=io.StringIO()))


INSTALLS = {
    "made-in": r"an env/bin/pip' install -c '?/.+/constraints\.txt'? matplotlib",
    "uv-receipt.toml": "uv tool install --with matplotlib",
    "pipx_metadata.json": "pipx inject crossdock matplotlib",
    "other": "-m pip install matplotlib",
}
"""The file that tells a kind of environment, and the command that adds matplotlib to it."""


def test_plot_is_drawn_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plot is drawn as SVG; a wrong suffix is refused, and a missing matplotlib with the command that adds it."""
    with pytest.raises(SettingsError, match=r"--plot: .* must end with"):
        load_plot.check(str(tmp_path / "x.gif"))
    with monkeypatch.context() as patch:
        patch.setattr(load_plot, "find_spec", lambda name: None)
        patch.setattr(sys, "prefix", str(tmp_path / "an env"))
        for mark, command in INSTALLS.items():
            (file := tmp_path / "an env" / mark).parent.mkdir(parents=True, exist_ok=True)
            file.touch()
            with pytest.raises(SettingsError, match=f"matplotlib is not installed; install it with: .*{command}"):
                load_plot.check(str(tmp_path / "x.svg"))
            file.unlink()
    pytest.importorskip("matplotlib")
    load_plot.draw(str(tmp_path / "x.svg"), [("A", run_of(1, 1.0, 20)), ("B", run_of(2, 1.5, 20))])
    assert "<svg" in (tmp_path / "x.svg").read_text()
    windows = {name: {"gaps_ms": [30.0, 10.0, 20.0], "p99_ms": 30.0} for name in ("alone", "loaded")}
    load_plot.draw_isolation(str(tmp_path / "i.svg"), windows)
    assert "<svg" in (tmp_path / "i.svg").read_text()
    edges, rates = load_plot.timeline(run_of(1, 1.0, 50))
    assert sum(rates) * edges[1] == pytest.approx(500, abs=20)
