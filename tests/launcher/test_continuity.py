"""`crossdock bench continuity`: the comparison of answers, and a run against a server that breaks streams on demand."""

import asyncio
import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from launcher.bench import continuity
from launcher.bench.continuity_figures import AnswerDifference, ContinuityRun, Kill, PlayedStream, difference, figures
from launcher.bench.settings import ContinuitySettings
from launcher.load.records import RequestRecord
from runtime.settings.options import SettingsError
from tests.helpers import until
from tests.launcher.faulty_server import FaultyServer, serving

ANSWER = (
    "it was a bright cold day in april, and the clocks were striking thirteen; winston smith slipped quickly through"
)
FAULTS = ["drop", "repeat", "change", "refuse", "lose"]


@pytest.mark.parametrize(
    ("seen", "whole", "expected"),
    [
        (ANSWER, True, AnswerDifference()),
        (ANSWER[:50], False, AnswerDifference(cut_off=len(ANSWER) - 50)),
        (ANSWER[:50], True, AnswerDifference(lost=len(ANSWER) - 50)),
        (ANSWER[:30] + ANSWER[33:], True, AnswerDifference(lost=3)),
        (ANSWER[:30] + ANSWER[33:60], False, AnswerDifference(lost=3, cut_off=len(ANSWER) - 60)),
        (ANSWER[:30] + ANSWER[26:], True, AnswerDifference(repeated=4)),
        (ANSWER[:50] + ANSWER, True, AnswerDifference(repeated=50)),
        (ANSWER + ANSWER[-3:], True, AnswerDifference(repeated=3)),
        (ANSWER + "~~~", True, AnswerDifference(changed=3)),
        (ANSWER[:30] + "##" + ANSWER[32:], True, AnswerDifference(changed=2)),
        (ANSWER[:20] + ANSWER[22:50] + ANSWER[49:80] + "#" + ANSWER[81:], True, AnswerDifference(2, 1, 1)),
        (ANSWER[:40] + "#" * (len(ANSWER) - 40), True, AnswerDifference(changed=len(ANSWER) - 40)),
        (ANSWER[:40] + "####", False, AnswerDifference(changed=4, cut_off=len(ANSWER) - 44)),
        (ANSWER[:40] + "#" * 200, True, AnswerDifference(changed=200)),
        ("", False, AnswerDifference(cut_off=len(ANSWER))),
    ],
)
def test_differences_are_told_apart(seen: str, whole: bool, expected: AnswerDifference) -> None:
    """Lost, repeated, changed and cut off tokens are counted, as text and as token ids."""
    assert difference(ANSWER, seen, whole=whole) == expected
    assert difference([*map(ord, ANSWER)], [*map(ord, seen)], whole=whole) == expected


def stream(sent_s: float, first_s: float, *gaps_ms: float, number: int = 0, outcome: str = "ok") -> PlayedStream:
    record = RequestRecord(number, "", 0.0, 0, 4, sent_s=sent_s, first_s=first_s, outcome=outcome, tokens=4)
    record.gaps_ms = [*gaps_ms]
    record.ended_s = first_s + sum(gaps_ms) / 1000
    return PlayedStream(number, record, "abcd")


def test_recovery_is_that_of_the_slowest_stream() -> None:
    """The time until all streams go on is that of the slowest interrupted stream, and others do not count."""
    run = ContinuityRun(undisturbed=[stream(0.0, 0.5, 100, 120), stream(1.0, 1.4, 100, 90)])
    run.kills = [Kill(10.0, answered_s=10.4), Kill(20.0, answered_s=23.0), Kill(30.0, error="no such process")]
    run.streams = [
        stream(9.0, 9.4, 100, 400, 100, 100, 1900, 100),
        stream(9.8, 12.5, 100),  # its prompt was lost
        stream(9.0, 9.4, *[100] * 30),
        stream(10.2, 14.0, 100),  # sent after the kill
        stream(19.0, 19.9, 100, 400, 100, outcome="disconnect"),
    ]
    found = figures(run)
    assert found["interrupted_streams"] == 3
    assert found["all_go_on_s"]["count"] == 2
    assert found["all_go_on_s"]["max"] == pytest.approx(2.5) and found["all_go_on_s"]["p50"] == pytest.approx(0.4)
    assert found["new_request_s"]["max"] == pytest.approx(3.0) and found["failed_kills"] == ["no such process"]


def test_errors_are_grouped_without_ids() -> None:
    """Errors that differ only in the id of their request are counted as one."""
    run = ContinuityRun(undisturbed=[stream(0.0, 0.1, 100)])
    for name in ("cmpl-83f1c02a77d1", "cmpl-0b9e53aa12c4"):
        run.streams.append(stream(1.0, 1.1, outcome="error_event"))
        run.streams[-1].record.detail = f"request {name} was lost by 127.0.0.1"
    assert figures(run)["errors"] == {"error_event: request … was lost by 127.0.0.1": 2}


def measured(
    folder: Path, *, owned_by: str = "someone", steady: bool = True, kill: str = "", **options: Any
) -> tuple[int, str, FaultyServer]:
    """Runs the command against the faulty server. Returns status, what it printed, and the server."""
    console = Console(file=io.StringIO(), width=200)

    async def scene() -> tuple[int, FaultyServer]:
        orders = folder / "orders"
        async with serving(FaultyServer(orders, FAULTS, owned_by, steady=steady)) as server:
            few: dict[str, Any] = {"streams": 3, "tokens": 80, "kills": 5, "every_s": 0.1} | options
            settings = ContinuitySettings(url=server.url, kill=kill or f"echo >> {orders}", as_json=True, **few)
            return await continuity._run(settings, console), server

    status, server = asyncio.run(scene())
    assert isinstance(console.file, io.StringIO)
    return status, console.file.getvalue(), server


@pytest.mark.parametrize("owned_by", ["someone", "crossdock"])
def test_each_fault_of_a_server_is_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str], owned_by: str) -> None:
    """A dropped stream, a repeated, a changed and a lost token and a refusal are each counted once."""
    status, said, server = measured(tmp_path, owned_by=owned_by)
    found = json.loads(capsys.readouterr().out)["figures"]
    assert status == 0 and server.happened == FAULTS
    total = {name: sum(row[name] for row in found["streams"].values()) for name in found["streams"]["greedy"]}
    assert (total["lost"], total["repeated"], total["changed"], total["errors"]) == (1, 1, 1, 2)
    assert 60 <= total["cut_off"] - 80 <= 70, "the refused stream has no token, the dropped one its first"
    assert found["errors"]["http_503: the engine is dead"] == 1 and found["kills"] == 5
    assert found["new_request_s"]["count"] == 5 and not found["unsteady_requests"]
    assert found["compared"] == ("token ids" if owned_by == "crossdock" else "text")
    extended = any("ignore_eos" in body or "return_token_ids" in body for body in server.bodies)
    assert extended == (owned_by == "crossdock"), "other servers get only OpenAI's fields"
    assert "Streams under 5 kills" in said and "the engine is dead" in said


def test_unsteady_server_is_not_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Answers that differ without a fault are said to, and are not counted as changed."""
    _, said, _ = measured(tmp_path, steady=False, kills=1)
    found = json.loads(capsys.readouterr().out)["figures"]
    assert found["unsteady_requests"] == found["requests"] == 6
    assert all(row["judged"] == row["changed"] == row["lost"] == 0 for row in found["streams"].values())
    assert "answers differ without a fault: 6 of 6" in said


def test_kill_that_fails_first_ends_the_run(tmp_path: Path) -> None:
    """A command that fails on the first try ends the run with its last words; a later failure is counted."""
    with pytest.raises(SettingsError, match="--kill: the command ended with status 3: no worker"):
        measured(tmp_path, kill="echo trying; echo no worker >&2; exit 3")
    _, said, _ = measured(tmp_path, kill=f"mkdir {tmp_path}/once", kills=2)
    assert "kill failed: the command ended with status 1" in said


def test_ctrl_c_ends_the_kill_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ctrl-C ends the process group of a running kill command, and prints what was measured so far."""
    pids, console = tmp_path / "pids", Console(file=io.StringIO(), width=200)

    def ended() -> bool:
        path = Path(f"/proc/{pids.read_text().strip()}/stat")
        return not path.exists() or path.read_text().split()[2] == "Z"

    async def scene() -> int:
        async with serving(FaultyServer(tmp_path / "orders", [], "someone")) as server:
            kill = f"sleep 600 & echo $! > {pids}; wait"
            settings = ContinuitySettings(url=server.url, kill=kill, streams=2, tokens=20, every_s=0.1, as_json=True)
            task = asyncio.create_task(continuity._run(settings, console))
            await until(lambda: pids.exists() and bool(pids.read_text().strip()))
            task.cancel()
            status = await task
        await until(ended)
        return status

    assert asyncio.run(scene()) == 130
    assert json.loads(capsys.readouterr().out)["figures"]["kills"] == 1
