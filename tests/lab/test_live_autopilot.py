"""What `scripts/autopilot_gain` makes of a run, and the shares of a core that it gives to workers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lab.advise import Slo
from launcher.load import traces
from launcher.load.records import OK, RequestRecord
from tests.lab import core_shares
from tests.lab.driving import Phase
from tools.live_autopilot import changes_of, judged, main, write_trace

PHASES = (Phase(10, 1.0, 900, 20), Phase(20, 4.0, 100, 300))


def test_request_counts_for_its_phase() -> None:
    """A request counts for the phase in which it was due."""

    def record(due_s: float, ttft_ms: float, gap_ms: float, outcome: str = OK) -> RequestRecord:
        first_s = due_s + ttft_ms / 1000
        return RequestRecord(
            0, "default", due_s, 9, 2, sent_s=due_s, first_s=first_s, gaps_ms=[gap_ms], tokens=2, outcome=outcome
        )

    records = [record(9.9, 100, 10), record(10.0, 100, 10), record(11.0, 900, 10), record(12.0, 100, 90)]
    found = judged("x", PHASES, [*records, record(29.0, 0, 0, "error")], Slo(500, 50))
    assert (found.asked, found.good, found.errors, found.goodput) == ([1, 4], [1, 1], 1, 2)


def test_trace_follows_the_phases(tmp_path: Path) -> None:
    """The written trace has the rates and lengths of its phases."""
    write_trace(tmp_path / "trace.csv", PHASES, 1)
    rows = traces.read(str(tmp_path / "trace.csv"))
    early = [row for row in rows if row.at_s < 10]
    assert 2 <= len(early) <= 25 and all(450 <= row.prompt_tokens <= 1350 for row in early)
    assert all(150 <= row.output_tokens <= 450 for row in rows[len(early) :]) and len(rows) - len(early) > 40


def test_changes_come_from_the_log() -> None:
    """Role changes are read from the autopilot's log lines."""
    said = {
        "event": "changes a role",
        "timestamp": "1970-01-01T00:01:40Z",
        "worker": "w",
        "role": "prefill",
        "why": "y",
    }
    log = "\n".join(json.dumps(one) for one in ({"event": "advice"}, said))
    assert changes_of(log, 90.0) == ["  10 s: w to prefill: y"]


@pytest.mark.parametrize("option", [("--share", "2"), ("--oracle", "--no-fixed"), ("--ratios", "2P2D,x")])
def test_bad_options_are_named(
    option: tuple[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A bad option is refused by its name."""
    monkeypatch.setattr(sys, "argv", ["autopilot_gain", *option])
    with pytest.raises(SystemExit):
        main()
    assert f"{option[0]}" in capsys.readouterr().err


def test_process_gets_its_core_share() -> None:
    """A process is limited to its share of a core and is released at the end."""
    try:
        core_shares.check()
    except core_shares.NoShares as error:
        pytest.skip(str(error))
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        with core_shares.shares({"w": process.pid}, 0.25):
            folder = core_shares.GROUPS / f"crossdock-{os.getpid()}-w"
            assert (folder / "cgroup.procs").read_text().split() == [str(process.pid)]
            quota, period = (int((folder / f"cpu.cfs_{one}_us").read_text()) for one in ("quota", "period"))
            assert quota / period == 0.25
        assert not folder.exists() and process.poll() is None
        process.communicate(b"\n", timeout=30)
