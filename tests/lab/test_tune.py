"""`crossdock tune` from a file to its reports."""

import contextlib
import io
import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import pytest
from markupsafe import escape

from lab.commands.settings import TuneCheckSettings, TuneSettings
from lab.profile import encoded
from launcher.commands import as_listed, build_app
from launcher.load import traces
from launcher.reports import check_writable
from runtime.settings.command_line import invoke
from runtime.settings.options import SettingsError
from tests.lab.profiles import GPU, scaled
from tests.test_tidy import ROOT


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a profile and a trace of ten seconds."""
    monkeypatch.setenv("COLUMNS", "120")
    (tmp_path / "profile.json").write_bytes(encoded(GPU))
    rng = np.random.default_rng(5)
    at_s, lines = 0.0, ["arrival_s,prompt_tokens,output_tokens"]
    while at_s < 10:
        at_s += rng.exponential(1 / 8)
        lines.append(f"{at_s:.3f},{int(rng.lognormal(6.7, 0.6))},{int(rng.lognormal(4.6, 0.5)) + 1}")
    (tmp_path / "traffic.csv").write_text("\n".join(lines))
    return tmp_path


@dataclass(frozen=True)
class Done:
    returncode: int
    stdout: str
    stderr: str


def crossdock(folder: Path, *words: str) -> Done:
    """The command in this process, in that folder."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = invoke(build_app(), as_listed(list(words)), "crossdock")
    return Done(status, out.getvalue(), err.getvalue())


def test_guide_command_works_offline(here: Path) -> None:
    """The guide's command gives a recommendation, and a page that loads nothing from the network."""
    guide = (ROOT / "docs" / "ratio-lab.md").read_text(encoding="utf-8")
    words, *_ = [
        line.split()[1:]
        for line in guide.splitlines()
        if line.startswith("crossdock tune --profile profile.json --trace")
    ]
    done = crossdock(here, *words)
    assert done.returncode == 0, done.stderr
    report = json.loads((here / "best.json").read_text())
    best = report["recommendation"]
    assert best["total"] < 8 and report["kept"], "more would serve no more requests"
    assert 0.0 <= best["probability"] <= 1.0
    assert done.stdout.count(best["workers"]) >= 2
    roles = [f"--{role} {best[role]}" for role in ("prefill", "decode", "mixed") if best[role]]
    assert f"crossdock serve {' '.join(roles)}\n" in done.stdout and report["apply"]["workers"] == best["workers"]
    assert report["what_if"][2]["attainment"] == pytest.approx(best["attainment"], abs=0.1)
    assert report["headroom"] >= 1 and report["caveats"] == []
    assert all(one["load_kept"] >= 1 or not one["keeps"] for one in report["ranked"])
    assert "batch" not in done.stdout
    page = (here / "best.html").read_text()
    assert best["workers"] in page
    assert not re.search(r"https?://|//cdn|<script|<link|@import|url\(", page)
    assert "default-src 'none'" in page


def test_single_worker_stays_mixed(here: Path) -> None:
    """A mix for one worker gets one mixed worker, and no advice about phases, which one worker cannot separate."""
    done = crossdock(
        here, "tune", "--rate", "0.5", "--duration", "120", "--workers", "1", "--slo-tpot-ms", "80", "--json"
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["recommendation"]["workers"] == "1M"
    assert not report["disaggregate"] and "do not disaggregate" not in done.stderr


def test_mistakes_name_the_option(here: Path) -> None:
    """A bad option or file is refused with its name."""
    for words, named in (
        (("--profile", "none.json"), "--profile"),
        (("--trace", "none.csv"), "--trace"),
        (("--slo", "gold:5"), "--slo"),
        (("--slo", "batch:nan:5"), "--slo"),
        (("--slo", "batch:500:50", "--rate", "2", "--duration", "9"), "--slo: no request is of the class batch"),
        (("--cancel-share", "2"), "--cancel-share"),
        (("--rate", "0.1", "--duration", "0.01"), "--rate: no request comes within --duration"),
        (("--html", "no/such/folder.html"), "--html"),
        (("--step-tokens", "0"), "--step-tokens"),
        (("--stall-share", "0.5,17"), "--stall-share"),
        (("--trace", "traffic.csv", "--from", "9000"), "--from: no request comes in the part"),
        (("--prefill-profile", "profile.json"), "--prefill-profile and --decode-profile are only of use together"),
        (("--prefill-profile", "profile.json", "--decode-profile", "none.json"), "--decode-profile"),
    ):
        done = crossdock(here, "tune", *words)
        assert done.returncode != 0
        assert named in done.stderr + done.stdout
    (here / "bad.json").write_text('{"format": 1}')
    done = crossdock(here, "tune", "check", "bad.json")
    assert done.returncode != 0
    assert "not a file of this version's crossdock tune --out" in done.stderr + done.stdout
    for settings, named in (({"rate": -1}, "settings.rate"), ({"trace": "gone.csv"}, "gone.csv")):
        (here / "bad.json").write_text(json.dumps({"format": 4, "settings": settings, "ranked": [{"workers": "1P1D"}]}))
        done = crossdock(here, "tune", "check", "bad.json")
        assert done.returncode != 0
        assert re.search(f"bad.json: .*{named}", done.stderr + done.stdout), done.stderr


def test_aiperf_records_are_a_trace(tmp_path: Path) -> None:
    """A file of AIPerf records is read as a trace, without failed requests."""
    record = (
        '{"metadata": {"request_start_ns": %d, "session_num": 1}, "metrics": {"input_sequence_length": '
        '{"value": 550, "unit": "tokens"}, "output_sequence_length": {"value": 101, "unit": "tokens"}}}'
    )
    failed = '{"metadata": {"request_start_ns": 3000000000}, "metrics": {}, "error": {"code": 500}}'
    file = tmp_path / "profile_export.jsonl"
    file.write_text("\n".join((record % 2_000_000_000, failed, record % 4_500_000_000)))
    assert [(row.at_s, row.prompt_tokens, row.output_tokens) for row in traces.read(str(file))] == [
        (0.0, 550, 101),
        (2.5, 550, 101),
    ]
    file.write_text('{"metadata": {"request_start_ns": "soon"}}')
    with pytest.raises(SettingsError, match="line 1"):
        traces.read(str(file))


def test_settings_can_be_read_again() -> None:
    """The settings saved with a recommendation are read again unchanged."""
    settings = TuneSettings(workers=3, slo=["interactive:500:50"], step_tokens=[256, 512])
    again = TuneSettings(**json.loads(json.dumps(settings.model_dump(exclude={"as_json"}))))
    assert again == settings
    assert TuneCheckSettings(recommendation="x").duration_s == 60


def test_unwritable_output_is_refused_first(tmp_path: Path) -> None:
    """An output that cannot be written is refused with the reason."""
    for path, why in ((tmp_path, "is a folder"), (tmp_path / "none" / "a.json", "there is no folder")):
        with pytest.raises(SettingsError, match=f"^--out: .*{why}"):
            check_writable(str(path), "--out")
    check_writable(str(tmp_path / "a.json"), "--out")


def test_unreachable_limits_name_a_cause(here: Path) -> None:
    """No more workers than help are recommended, with what limits them, where no ratio keeps the SLO."""
    mix = (
        "--rate",
        "0.5",
        "--duration",
        "100",
        "--workers",
        "3",
        "--slo-ttft-ms",
        "30",
        "--json",
        "--seqs-max",
        "32,64",
    )
    done = crossdock(here, "tune", *mix)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    best = report["recommendation"]
    assert not report["kept"] and not report["headroom"]
    assert best["total"] < 3 and best["binds"] == "prefill compute"
    assert "prefill compute limits it: with twice as much," in " ".join(done.stderr.split())
    assert "batch" in done.stderr and "≤ 32" in done.stderr, "candidates differ in it"
    assert all(one["load_kept"] == 0 for one in report["ranked"])


def test_results_survive_a_closed_pipe(here: Path) -> None:
    """Result files are written although the reader of the output has left."""
    command = (
        f"'{sys.executable}' -m launcher.cli tune --rate 1 --duration 60 --workers 2 --out w.json --html w.html | true"
    )
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(here)}
    subprocess.run(["/bin/sh", "-c", command], cwd=here, env=environment, timeout=100, check=False, capture_output=True)
    assert json.loads((here / "w.json").read_text())["recommendation"] and "</html>" in (here / "w.html").read_text()


def test_two_hardware_kinds_have_costs(here: Path) -> None:
    """Two kinds of hardware with prices are compared by cost, and no worker is mixed."""
    for name, factor, cost in (("fast", 0.5, 3.0), ("cheap", 1.5, 1.0)):
        priced = msgspec.structs.replace(GPU.decode_capacity, cost_per_hour=cost)
        made = scaled(GPU, factor, 1.0).replaced(
            prefill_capacity=priced, decode_capacity=priced, about={"model": "m", "machine": {"cpu": name}}
        )
        (here / f"{name}.json").write_bytes(encoded(made))
    kinds = ("--prefill-profile", "fast.json", "--decode-profile", "cheap.json")
    words = ("tune", *kinds, "--trace", "traffic.csv", "--duration", "60", "--workers", "3")
    done = crossdock(here, *words, "--out", "o.json", "--html", "o.html")
    assert done.returncode == 0, done.stderr
    report, page = json.loads((here / "o.json").read_text()), (here / "o.html").read_text()
    best, costs = report["recommendation"], {one["workers"]: one["cost_per_hour"] for one in report["by_workers"]}
    assert costs["1P2D"] == 5.0 and costs["2P1D"] == 7.0 and not any(one["mixed"] for one in report["by_workers"])
    assert best["good_per_cost"] == pytest.approx(3600 * best["goodput_requests_per_s"] / best["cost_per_hour"])
    told = " ".join(report["caveats"])
    assert "on fast" in told and "on cheap" in told and "none is mixed" in told
    assert "requests in time for each unit of money" in " ".join(done.stdout.split()) and "good / money" in page
    other = GPU.replaced(about={"model": "another"})
    (here / "cheap.json").write_bytes(encoded(other))
    done = crossdock(here, *words)
    assert done.returncode != 0 and "--decode-profile: of the model another" in done.stderr


def test_sessions_are_played_back(here: Path) -> None:
    """A file of sessions is played in the simulator, and tune check refers to bench agents."""
    rows = ["session,turn,prompt_tokens,reused_tokens,output_tokens,think_s"]
    for session in range(6):
        tokens = 1500
        for turn in range(5):
            rows.append(f"s{session},{turn},{tokens},{tokens - 200 if turn else 0},60,{2 if turn else 0}")
            tokens += 200
    (here / "agents.csv").write_text("\n".join(rows))
    words = ("tune", "--trace", "agents.csv", "--workers", "3", "--out", "o.json", "--html", "o.html")
    done = crossdock(here, *words, "--sessions", "3")
    assert done.returncode == 0, done.stderr
    report = json.loads((here / "o.json").read_text())
    assert report["traffic"]["requests"] == 30
    assert 0 < report["traffic"]["requests_per_s"] < 12
    done = crossdock(here, "tune", "check", "o.json")
    assert done.returncode != 0 and "bench agents plays them" in " ".join(done.stderr.split())
    done = crossdock(here, "tune", "--sessions-trace", "agents.csv", "--workers", "3", "--sessions", "3")
    assert done.returncode != 0 and "beside a --trace of single requests" in " ".join(done.stderr.split())
    both = ("tune", "--trace", "traffic.csv", "--sessions-trace", "agents.csv", "--workers", "3", "--out", "b.json")
    assert crossdock(here, *both).returncode == 0
    single = len((here / "traffic.csv").read_text().splitlines()) - 1
    assert json.loads((here / "b.json").read_text())["traffic"]["requests"] == 30 + single


def test_caveats_stand_beside_the_answer(here: Path) -> None:
    """Caveats of a recommendation are in the report, on the page and in the output."""
    about = {"model": "m", "machine": {"cpu": "X"}, "when": "2020-01-01T00:00:00+00:00"}
    small = msgspec.structs.replace(GPU.prefill_capacity, context_tokens=600)
    profile = GPU.replaced(prefill_cores=1, decode_cores=1, prefill_capacity=small, about=about)
    (here / "profile.json").write_bytes(encoded(profile))
    words = (
        "tune",
        "--trace",
        "traffic.csv",
        "--workers",
        "3",
        "--hit-rate",
        "0.2",
        "--duration",
        "60",
        "--out",
        "o.json",
    )
    done = crossdock(here, *words, "--html", "o.html")
    assert done.returncode == 0, done.stderr
    report, page = json.loads((here / "o.json").read_text()), (here / "o.html").read_text()
    told = " ".join(report["caveats"])
    for part in ("were made shorter", "share 2 cores", "20% of each prompt", "measured of m, on X,", "days ago"):
        assert part in told and part in " ".join(done.stdout.split())
    assert all(str(escape(line)) in page for line in report["caveats"])
    assert not any(one["workers"] == "3M" for one in report["by_workers"])
    done = crossdock(here, *words, "--own-hardware")
    assert done.returncode == 0, done.stderr
    assert any(one["workers"] == "3M" for one in json.loads((here / "o.json").read_text())["by_workers"])
