"""A coordinator that records, killed for real: what it wrote replays, and tells what its clients saw."""

import json
import signal
from pathlib import Path

import pytest

from launcher.admin import replay as commands
from launcher.admin.event_log_settings import ExplainSettings, ReplaySettings
from tests.e2e.live import at_once, live


def _replay(path: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    status = commands.replay(ReplaySettings(file=str(path), as_json=True))
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    assert status == 0, found
    return found


def test_event_logs_replay_after_coordinator_kill(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The event log of a killed coordinator replays, and so does that of the next one."""
    path = tmp_path / "events"
    with live(tiny, tmp_path, "--event-log", str(path), STEP_TOKENS="32") as up:
        prompt = list(range(20, 220))
        answers = at_once(lambda number: up.complete([number, *prompt], 20, ignore_eos=True), range(30, 42))
        up.wait_idle()
        answer_id = answers[0]["id"]
        up.wait_for("the last event is on the disk", lambda: b"StatusRequest" in path.read_bytes())
        up.one("coordinator").send_signal(signal.SIGKILL)
        earlier = tmp_path / "events.1"
        up.wait_for("another coordinator records", lambda: earlier.exists() and path.exists())
        up.wait_ready()
        up.complete(prompt, 5)
    replayed = {each: _replay(each, capsys)["recorded"] for each in tmp_path.glob("events*")}
    assert all(isinstance(recorded, dict) and recorded["process"] == "coordinator" for recorded in replayed.values())
    ended = {each: recorded["ended"] for each, recorded in replayed.items() if isinstance(recorded, dict)}
    # Where the machine stands still for long, whoever came after the killed one begins anew and records one more.
    assert ended.pop(path) == "stopped" and set(ended.values()) <= {"", "was away"}
    (earlier,) = (each for each, how in ended.items() if how == "")
    assert commands.explain(ExplainSettings(file=str(earlier), request=answer_id, as_json=True)) == 0
    timeline = json.loads(capsys.readouterr().out)["timeline"]
    chunks = [entry for entry in timeline if entry["what"] == "chunk"]
    assert sum(chunk["tokens"] for chunk in chunks) == timeline[0]["prompt_tokens"] == 201
    assert [entry["state"] for entry in timeline if entry["what"] == "state"] == ["handing_over", "decoding"]
    assert timeline[-1]["what"] == "ended" and timeline[-1]["outcome"] == "finished"
