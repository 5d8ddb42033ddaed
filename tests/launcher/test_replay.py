"""`crossdock replay` and `crossdock explain` as a user runs them, on event logs of small scenes."""

import json
from pathlib import Path

import msgspec
import pytest

from coordinator.event_log.format import EventLogError
from coordinator.event_log.timeline import ChunkSent
from coordinator.events import PeerDown, PeerUp
from launcher.admin import replay as commands
from launcher.admin.event_log_settings import ExplainSettings, ReplaySettings
from launcher.admin.explain_words import lines
from proto.drain import FlipFailed, FlipRequest
from proto.limits import PROTOCOL_VERSION
from proto.messages import Chunk, Hello, Role
from proto.status import AutopilotReport, AutopilotStatus
from tests.coordinator.logged_core import as_logged
from tests.coordinator.test_replay import contended_world
from tests.coordinator.test_timeline import Scene, full_decode
from tests.coordinator.world import worker_hello


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")


def saved(scene: Scene, path: Path, *, ended: bool = True) -> str:
    path.write_bytes(as_logged(scene.core).event_log(ended=ended))
    return str(path)


def told(file: str, request: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert commands.explain(ExplainSettings(file=file, request=request)) == 0
    return capsys.readouterr().out


def test_request_story_is_in_plain_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """explain tells a request's waits, steps and end in plain words."""
    s = Scene.of()
    s.come("busy1", "busy/bob")
    s.come("busy2", "busy/bob", tokens=12, deadline_ms=5000.0)
    s.come("urgent", "busy/bob", deadline_ms=2000.0)
    s.come("other1", "other")
    s.step(0, Chunk("busy1", 1, 0, 8))
    s.step(1, Chunk("other1", 1, 0, 8))
    s.step(2, Chunk("urgent", 1, 0, 8))
    s.step(3, Chunk("busy2", 1, 0, 8))
    s.step(4, Chunk("busy2", 1, 8, 4))
    s.hand_over("busy2")
    s.finish("busy2")
    text = told(saved(s, tmp_path / "j"), "busy2", capsys)
    for line in (
        "busy2 of busy/bob, priority class standard: 12 prompt tokens, up to 4 more",
        "+0.000 s  submitted: 0 requests waited already, 0 of them of this tenant",
        "+0.300 s  passed over once: the turn of other, priority class standard (other1); organisation other has had less"
        " of its share than busy, round 0 against 16",
        "+0.400 s  passed over once: urgent of the same tenant first: it is due 2.900 s earlier",
        "+0.500 s  placed on prefill-10 + decode-20: its turn; 4 KV blocks reserved for its answer",
        "+0.500 s  step 3 of prefill-10: tokens 0 to 7 of 12",
        "+0.600 s  step 4 of prefill-10: tokens 8 to 11 of 12; not full: nothing waits",
        "+0.700 s  prompt computed; the last of its KV is on its way",
        "KV handed over in 3 ms; decoding",
        "+0.800 s  finished",
        "Its first prefill chunk started after 0.500 s; it waited for own queue 0.333 s, other tenants 0.167 s; it was"
        " passed over 2 times: 1 × another tenant's turn,"
        " 1 × another request of the same tenant.",
    ):
        assert line in text, text


def test_waiting_for_room_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """explain says what room a request waited for, and when it was kept for it."""
    s = full_decode(bypasses_max=1)
    s.come("waits", "acme", tokens=10, max_tokens=20)
    s.come("behind", "acme", tokens=10, max_tokens=20)
    s.come("small", "other", tokens=4, max_tokens=1)
    s.step(1, Chunk("small", 1, 0, 4))
    s.come("after", "other", tokens=4, max_tokens=1)
    s.finish("hog")
    file = saved(s, tmp_path / "j")
    waits = told(file, "waits", capsys)
    assert "no room on decode-20: 8 KV blocks needed, 2 free; hogs holds 8" in waits
    assert "others got room before it once: from now on what comes free is kept for it" in waits
    assert "placed on prefill-10 + decode-20: there was room at last, kept for it" in waits
    assert "behind others without room" in told(file, "behind", capsys)
    kept = "no room; what comes free is kept for waits of acme, priority class standard, which others had bypassed once"
    assert kept in told(file, "after", capsys)


@pytest.mark.parametrize(("bypasses_max", "why"), [(9, "no decode kv"), (1, "worker closed")])
def test_unfilled_step_is_explained(
    bypasses_max: int, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """explain says why a step was not full."""
    s = full_decode(bypasses_max=bypasses_max)
    s.come("waits", "acme", tokens=10, max_tokens=20)
    s.come("small", "other", tokens=4, max_tokens=1)
    text = told(saved(s, tmp_path / "j"), "small", capsys)
    assert f"step 1 of prefill-10: tokens 0 to 3 of 4; not full: {why}" in text


def test_expiry_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """explain says that a request expired at its deadline and how often it was passed over."""
    s = full_decode()
    s.come("late", "acme", max_tokens=20, deadline_ms=50.0)
    s.come("next", "acme")
    text = told(saved(s, tmp_path / "j"), "late", capsys)
    assert "expired: no first token within its deadline of 50 ms (Retry-After 1." in text
    assert "It never ran; it was passed over once: 1 × no room." in text


def test_long_chunk_runs_are_one_line() -> None:
    """A long run of chunks is told in one line, and a short one in a line per chunk."""
    run = [ChunkSent(0.1 * n, "prefill-0", n + 7, 256 * n, 256, 8192, 0) for n in range(32)]
    [(when, text)] = lines(run)
    assert when == "+0.000 to 3.100 s"
    assert text == "32 chunks, tokens 0 to 8,191 of 8,192 (8,192), in steps 7 to 38 of prefill-0"
    assert len(lines(run[:12])) == 12


def test_worst_requests_are_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """explain lists what clients felt as a table and as JSON, and gives a request's timeline as JSON."""
    path = tmp_path / "j"
    path.write_bytes(contended_world(1).event_log())
    monkeypatch.setattr(commands, "LISTED", 3)
    assert commands.explain(ExplainSettings(file=str(path), as_json=True)) == 0
    rows = json.loads(capsys.readouterr().out)["requests"]
    assert len(rows) == 3 and rows[0]["ttft_s"] >= rows[1]["ttft_s"] > 0
    assert commands.explain(ExplainSettings(file=str(path))) == 0
    shown = capsys.readouterr().out
    assert all(row["request"] in shown and row["tenant"] in shown for row in rows)
    assert commands.explain(ExplainSettings(file=str(path), request=rows[0]["request"], as_json=True)) == 0
    timeline = json.loads(capsys.readouterr().out)["timeline"]
    assert timeline[0]["what"] == "submitted" and timeline[-1]["what"] == "ended"
    assert {entry["reason"]["kind"] for entry in timeline if entry["what"] == "passed_over"}


def test_idle_cluster_is_said_to_be_idle(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """explain says that no request came, in place of an empty table."""
    assert commands.explain(ExplainSettings(file=saved(Scene.of(), tmp_path / "j"))) == 0
    assert capsys.readouterr().out == "No request came while this was recorded: the cluster was idle.\n"


def test_unknown_request_or_file_is_refused(tmp_path: Path) -> None:
    """An unknown request, a missing file and a file that is no event log are refused."""
    file = saved(Scene.of(), tmp_path / "j")
    with pytest.raises(EventLogError, match="no request 'nobody'"):
        commands.explain(ExplainSettings(file=file, request="nobody"))
    with pytest.raises(EventLogError, match="No such file"):
        commands.replay(ReplaySettings(file=str(tmp_path / "absent")))
    (tmp_path / "text").write_text("hello")
    with pytest.raises(EventLogError, match="not an event log"):
        commands.explain(ExplainSettings(file=str(tmp_path / "text")))


def test_unique_request_id_prefix_is_enough(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The beginning of a request id is enough if it is unique; otherwise the candidates are listed."""
    s = Scene.of()
    for name in ("cmpl-4a1", "cmpl-4b2", "cmpl-4b2.c0"):
        s.come(name, "acme")
    file = saved(s, tmp_path / "j")
    assert told(file, "cmpl-4a", capsys) == told(file, "cmpl-4a1", capsys)
    assert told(file, "cmpl-4b2", capsys).startswith("cmpl-4b2 of acme")
    assert commands.explain(ExplainSettings(file=file, request="cmpl-4a", as_json=True)) == 0
    assert json.loads(capsys.readouterr().out)["request"] == "cmpl-4a1"
    with pytest.raises(
        EventLogError, match=r"3 requests begin with 'cmpl-4'.*\n    cmpl-4a1\n    cmpl-4b2\n    cmpl-4b2\.c0$"
    ):
        commands.explain(ExplainSettings(file=file, request="cmpl-4"))


def test_replay_reports_its_findings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """replay says whether all actions are the same and whether the recording was cut off."""
    path = tmp_path / "j"
    log = contended_world(1).event_log()
    path.write_bytes(log)
    assert commands.replay(ReplaySettings(file=str(path))) == 0
    said = capsys.readouterr().out
    assert "Every action is the same." in said and "The recording was cut off" in said and "no whole record" not in said
    path.write_bytes(log[:-3])
    assert commands.replay(ReplaySettings(file=str(path))) == 0
    said = capsys.readouterr().out
    assert "bytes are no whole record and were left out" in said
    assert commands.replay(ReplaySettings(file=str(path), as_json=True)) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["identical"] and found["recorded"]["cut_off_bytes"] > 0 and found["difference"] is None


def test_replay_shows_the_first_difference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """replay shows the first event at which the actions differ, and ends with status 1."""
    path = tmp_path / "j"
    path.write_bytes(contended_world(2).event_log())
    monkeypatch.setattr("scheduler.waiting.projection.JITTER", 0.2)
    assert commands.replay(ReplaySettings(file=str(path))) == 1
    said = capsys.readouterr().out
    assert "the actions differ" in said and "  event     Received(" in said and " bytes of ids)" in said
    assert "recorded" in said and "digest" in said and "retry_after_s=" in said and "\\x00" not in said
    assert commands.replay(ReplaySettings(file=str(path), as_json=True)) == 1
    difference = json.loads(capsys.readouterr().out)["difference"]
    assert difference["why"] == "the actions differ" and difference["actions"]
    with pytest.raises(EventLogError, match="crossdock replay says more"):
        commands.explain(ExplainSettings(file=str(path)))


def test_role_changes_are_told_with_reasons(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Role changes and the autopilot's advice are told with their reasons."""
    s = Scene.of(prefill=2)
    s.come("before", "acme")
    s.now += 5.0
    s.post(PeerUp(5, Hello(PROTOCOL_VERSION, Role.OBSERVER, 5, "autopilot")))
    for wanted in ("1P2D", "1P2D", "2P1D"):
        s.receive(5, AutopilotReport(AutopilotStatus("m", "on", "2P1D", wanted, "answers are long")))
    s.receive(5, FlipRequest("prefill-11", Role.DECODE, 0.0, False, "autopilot: answers are long"))
    s.post(PeerDown(11, "said goodbye"))
    s.now += 0.02
    back = msgspec.structs.replace(worker_hello(Role.DECODE, 30), name="prefill-11", flipped_from=11)
    s.post(PeerUp(30, back))
    s.receive(5, FlipRequest("prefill-11", Role.PREFILL, 0.0))
    s.receive(30, FlipFailed("no memory"))
    file = saved(s, tmp_path / "j")
    assert commands.explain(ExplainSettings(file=file, flips=True)) == 0
    ordered = "prefill-11, a prefill worker, is ordered to become a decode worker; autopilot: answers are long"
    text = capsys.readouterr().out
    assert text.count("the autopilot (on) wants 1P2D instead of 2P1D: answers are long") == 1
    assert "the autopilot wants no other ratio than 2P1D any more" in text
    for line in (ordered, "prefill-11 is a decode worker now, after 20 ms", "stays a decode worker: no memory"):
        assert line in text, text
    assert ordered in told(file, "before", capsys), "it was served then"
    assert "wants 1P2D" in told(file, "before", capsys)
    assert commands.explain(ExplainSettings(file=file, flips=True, as_json=True)) == 0
    kinds = [entry["what"] for entry in json.loads(capsys.readouterr().out)]
    assert kinds == ["advice", "advice", *["role_change"] * 4]


def test_flips_outside_its_life_are_omitted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A request's story leaves out role changes before it came and after it ended."""
    s = Scene.of(prefill=2)
    s.come("a", "acme")
    s.step(0, Chunk("a", 1, 0, 8))
    s.hand_over("a")
    s.finish("a")
    s.post(PeerUp(5, Hello(PROTOCOL_VERSION, Role.OBSERVER, 5, "flip")))
    s.receive(5, FlipRequest("prefill-11", Role.DECODE, 0.0))
    s.come("b", "acme")
    file = saved(s, tmp_path / "j")
    assert "prefill-11" not in told(file, "a", capsys) and "is ordered" not in told(file, "b", capsys)
