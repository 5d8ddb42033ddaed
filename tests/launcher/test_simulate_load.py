"""`crossdock simulate load` as a command: what it prints, its JSON, and how it ends."""

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lab.commands import simulate as load
from launcher.commands import as_listed, build_app
from runtime.settings.command_line import invoke
from tests.documents import ROOT

SCENARIO = """
duration_s = 20.0
settle_s = 60.0
[[workers]]
role = "prefill"
[[workers]]
role = "decode"
[[traffic]]
name = "chat"
tenant = "light"
prompt_tokens = "uniform:64-256"
output_tokens = 16
deadline_ms = 2000
retries = 5
[[traffic]]
name = "documents"
tenant = "heavy"
rate_per_s = 4
prompt_tokens = 4096
output_tokens = 64
deadline_ms = 4000
tpot_ms = 100
[[traffic]]
name = "nightly"
tenant = "heavy"
priority_class = "batch"
arrivals = "closed"
clients = 2
output_tokens = 32
[[traffic]]
name = "searches"
tenant = "light"
arrivals = "constant"
[tenants.light]
[tenants.heavy]
priority_classes = ["standard", "batch"]
"""


@pytest.fixture
def scenario(tmp_path: Path) -> str:
    (tmp_path / "scenario.toml").write_text(SCENARIO)
    return str(tmp_path / "scenario.toml")


def simulate(*arguments: str) -> int:
    return invoke(build_app(), as_listed(["simulate", "load", *arguments]), "crossdock")


def test_same_seed_prints_the_same(scenario: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The same seed prints the same tables and another seed other ones."""

    def told(*more: str) -> str:
        assert simulate(scenario, *more) == 0
        return capsys.readouterr().out

    first = told()
    assert told() == first == told("--seed", "1") and told("--seed", "2") != first
    rows = [line.split() for line in first.splitlines()]
    assert [row[:2] for row in rows if row[:1] in (["heavy"], ["light"])] == [
        ["heavy", "batch"],
        ["heavy", "standard"],
        ["light", "standard"],
    ] * 3
    assert [row[0] for row in rows if row and row[0] in ("chat", "documents", "nightly", "searches")] == [
        "chat", "documents", "nightly", "searches",
    ] * 3  # fmt: skip
    assert re.search(r"^heavy +standard .*\d+ rejected: deadline", first, re.MULTILINE)
    assert "20 seconds of arrivals, seed 1." in first and "\x1b" not in first


def test_json_has_every_printed_figure(scenario: str, capsys: pytest.CaptureFixture[str]) -> None:
    """JSON output has every figure that is printed, for tenants, traffic and all."""
    assert simulate(scenario, "--json") == 0
    told = capsys.readouterr()
    found = json.loads(told.out)
    assert "seconds of arrivals" in told.err
    groups = [*found["tenants"], *found["traffic"].values(), found["all"]]
    assert len(groups) == 3 + 4 + 1
    wanted = {
        "offered", "finished", "rejected", "ended_otherwise", "goodput_per_s", "goodput_share", "ttft_ms", "tpot_ms",
        "prefill_share", "decode_share", "useful_share", "rejections_per_request", "interruptions",
    }  # fmt: skip
    assert all(wanted <= one.keys() for one in groups)
    assert found["traffic"]["documents"]["rejected"]["deadline"] > 0
    assert (found["seed"], found["duration_s"]) == (1, 20.0)


def require(scenario: str, text: str) -> None:
    Path(scenario).write_text(f"{SCENARIO}[[require]]\n{text}\n")


def test_missed_requirement_is_status_3(scenario: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The run ends with status 3 where a required figure is missed, and names it."""
    require(scenario, 'of = "chat"\nfigure = "ttft_ms.p95"\nat_most = 1')
    assert simulate(scenario) == 3
    assert re.search(r"^chat: ttft_ms.p95 +at most 1 .*missed$", capsys.readouterr().out, re.MULTILINE)
    require(scenario, 'figure = "decode_share_by_window"\nat_least = 1')
    assert simulate(scenario, "--json") == 0
    [checked] = json.loads(capsys.readouterr().out)["require"]
    assert checked["holds"] and checked["value"] == pytest.approx(1)


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ('figure = "goodput_share"', "require.0: needs at_least or at_most"),
        (
            'of = "chats"\nfigure = "goodput_share"\nat_least = 1',
            "require.0.of: there is no 'chats'; there are all, run,",
        ),
        ('figure = "ttft_ms.p42"\nat_least = 1', "require.0.figure: 'all' has no figure 'ttft_ms.p42'"),
        ('figure = "rejected"\nat_least = 1', "require.0.figure: 'rejected' is not a number"),
        ('figure = "offered"\nat_least = 1\nfrom_s = 3', "from_s has no effect with figure = 'offered'"),
    ],
)
def test_bad_requirement_is_named(scenario: str, text: str, wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A requirement that makes no sense is an error with its key."""
    require(scenario, text)
    assert simulate(scenario) == 2
    assert wrong in " ".join(capsys.readouterr().err.split())


EVERYTHING = """
duration_s = 12.0
[[workers]]
role = "mixed"
count = 2
[[workers]]
role = "prefill"
[[workers]]
role = "decode"
[[traffic]]
name = "traced"
arrivals = "trace"
trace = "requests.csv"
speed = 2
[[traffic]]
name = "clients"
arrivals = "closed"
clients = 3
think_s = 0.2
output_tokens = 20
[[traffic]]
name = "bursts"
arrivals = "gamma"
rate_per_s = 4
prompt_tokens = "lognormal:300,0.8"
retries = 2
deadline_ms = 1500
""" + "".join(
    f'[[failures]]\nat_s = {at_s}\nworker = "{worker}"\nkind = "{kind}"\nfor_s = 2\n'
    for at_s, worker, kind in (
        (1, "mixed-0", "slow"), (3, "prefill-0", "failing"), (5, "decode-0", "lost"), (7, "mixed-1", "drained"),
    )
)  # fmt: skip


def test_output_is_independent_of_hash_seed(tmp_path: Path) -> None:
    """Whatever the order of their sets."""
    (tmp_path / "s.toml").write_text(EVERYTHING)
    (tmp_path / "requests.csv").write_text(
        "arrival_s,prompt_tokens,output_tokens\n" + "".join(f"{n},{100 + n},{10 + n}\n" for n in range(20))
    )
    command = [sys.executable, "-P", "-m", "launcher.cli", "simulate", "load", str(tmp_path / "s.toml"), "--json"]
    told = []
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": hash_seed}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
        told.append(json.loads(done.stdout))
    assert told[0] == told[1]
    traffic = told[0]["traffic"]
    assert list(traffic) == ["traced", "clients", "bursts"]
    assert traffic["traced"]["finished"] == traffic["traced"]["offered"] == 20
    assert traffic["clients"]["offered"] > 20 and traffic["bursts"]["finished"] > 20
    assert told[0]["all"]["interruptions"] > 0


def test_scenario_mistakes_have_a_line_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each mistake in the scenario file gives one line, and nothing is printed on stdout."""
    (tmp_path / "s.toml").write_text(SCENARIO.replace("clients", "client").replace("retries = 5", "retries = -5"))
    assert simulate(str(tmp_path / "s.toml")) == 2
    told = capsys.readouterr()
    assert told.out == "" and told.err.splitlines() == [
        f"crossdock: SCENARIO: {tmp_path}/s.toml: traffic.0.retries: must be >= 0, not -5",
        f"crossdock: SCENARIO: {tmp_path}/s.toml: traffic.2.client: there is no such setting",
    ]


def test_ctrl_c_ends_without_traceback(
    scenario: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C ends the simulation with status 130 and no output."""

    def interrupted(workload: Any, progress: Any) -> None:
        progress(1.0)
        raise KeyboardInterrupt

    monkeypatch.setattr(load, "play", interrupted)
    assert simulate(scenario) == 130
    assert capsys.readouterr() == ("", "")


def test_terminal_shows_progress(scenario: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal sees the virtual time advance."""
    out = io.StringIO()
    real, told = load.play, list[float]()  # type: ignore[attr-defined]

    def play(workload: Any, progress: Any) -> Any:
        return real(workload, lambda now_s: (told.append(now_s), progress(now_s)))  # type: ignore[arg-type]

    monkeypatch.setattr(load, "play", play)
    monkeypatch.setattr(load, "console_for", lambda settings, **more: Console(file=out, force_terminal=True, width=100))
    assert simulate(scenario) == 0
    assert "virtual time" in out.getvalue() and told == sorted(told) and 0 < told[0] < 1 and told[-1] == 20.0
    assert len(told) >= 80


def test_too_many_requests_are_one_line(
    scenario: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Too many requests end the simulation with one line and status 1."""
    from lab.cluster import run

    monkeypatch.setattr(run, "REQUESTS_MAX", 30)
    assert simulate(scenario) == 1
    assert re.fullmatch(r"crossdock: clients have sent 30 requests by second [\d.]+\n", capsys.readouterr().err)
