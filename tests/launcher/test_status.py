"""`crossdock status` against a link server, and against nobody."""

import asyncio
import io
import json
import os
import subprocess
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from launcher.admin import status
from launcher.admin.status import NoAnswer, SeveralClusters, StatusSettings, as_dict, ask, show
from launcher.local import process_states
from launcher.local import registry as here
from launcher.local.process_states import ProcessState, ProcessStates
from proto.limits import PROTOCOL_VERSION
from proto.messages import Hello, Message, Role, StatusRequest
from proto.status import (
    AutopilotStatus,
    ClassStatus,
    PairStatus,
    PredictionError,
    Process,
    StatusReport,
    TenantStatus,
    WorkerStatus,
)
from runtime.link.server import LinkServer, Peer
from runtime.process import clock

WORKER = WorkerStatus("decode-0", Role.DECODE, "tiny", "here", 7, 100, 3, 2, 0, 12_345)
PAIR = PairStatus("prefill-0", "decode-0", "gloo", "shm: another host, user or namespace")
REPORT = StatusReport((WORKER,), ("gateway-0",), 4, {"decoding": 2}, {"finished": 9}, {"protocol_errors": 1}, (PAIR,))


def test_coordinator_answer_is_shown() -> None:
    """The status is the report with which the coordinator answers."""
    roles: list[Role] = []

    async def scene() -> StatusReport:
        def on_message(peer: Peer, message: Message, _blob: bytes) -> None:
            assert isinstance(message, StatusRequest)
            roles.append(peer.hello.role)
            peer.send(REPORT)

        server = LinkServer(
            bind="tcp://127.0.0.1:0",
            hello=Hello(
                version=PROTOCOL_VERSION, role=Role.COORDINATOR, incarnation=clock.new_incarnation(), name="coordinator"
            ),
            accept=lambda hello: None,
            on_up=lambda peer: None,
            on_message=on_message,
            on_down=lambda peer, reason: None,
        )
        address = await server.start()
        try:
            return await ask(address, 20_000)
        finally:
            await server.close()

    assert asyncio.run(scene()) == REPORT
    assert roles == [Role.OBSERVER]


def _shown(report: StatusReport, wide: bool = False) -> str:
    console = Console(file=io.StringIO(), width=200)
    show(report, console, wide=wide)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_differing_numerics_are_shown() -> None:
    """Workers with different kernel fingerprints are shown as differing."""
    alike = msgspec.structs.replace(WORKER, numerics="kernels 1")
    other = msgspec.structs.replace(WORKER, name="decode-1", numerics="kernels 2")
    same = msgspec.structs.replace(REPORT, workers=(alike, msgspec.structs.replace(alike, name="decode-1")))
    assert "Numerics of tiny: kernels 1" in _shown(same, wide=True) and "umerics" not in _shown(same)
    text = _shown(msgspec.structs.replace(REPORT, workers=(alike, other)))
    assert "Attention: numerics of tiny differ" in text and "decode-0: kernels 1; decode-1: kernels 2" in text


def test_status_is_written_for_operators() -> None:
    """Version, rates and the TTFT of tenants are shown; what is abnormal comes first, and only then is there any."""
    prefill = msgspec.structs.replace(WORKER, name="prefill-0", role=Role.PREFILL)
    rates = {"requests_per_s": 2.5, "prompt_tokens_per_s": 1234.0, "output_tokens_per_s": 80.0}
    well = msgspec.structs.replace(
        REPORT,
        workers=(prefill, WORKER),
        counters={},
        version="0.1.0",
        uptime_ms=7_500_000.0,
        recent=rates,
        tenants=(TenantStatus("acme", 0.75, 3, 420.0, 1900.0),),
        classes=(ClassStatus("standard", 2000.0, 0.0, 0.95, 100, 100, 95),),
    )
    text = _shown(well)
    assert text.startswith("crossdock 0.1.0, coordinator up 2 h 5 min; last minute: 2.5 requests/s, 1,234 prompt")
    assert "acme 75% (3 waiting), TTFT 420 ms, p99 1.90 s" in text
    assert "Attention" not in text and "Counters" not in text
    ill = msgspec.structs.replace(
        well,
        workers=(prefill, msgspec.structs.replace(WORKER, draining=True, kv_blocks_used=100)),
        gateways=(),
        counters={"turned_away_unknown_key": 4, "kv_bytes": 7},
        circuit_open=("[prefill-0 → decode-0]",),
        hung=(Process("decode-1", 77),),
        classes=(ClassStatus("standard", 2000.0, 0.0, 0.95, 100, 100, 90),),
    )
    found = [line.removeprefix("Attention: ") for line in _shown(ill).splitlines() if line.startswith("Attention: ")]
    assert found == [
        "no gateway is connected",
        "tiny has no decode worker that takes requests",
        "left out: [prefill-0 → decode-0]",
        "decode-1 (pid 77) was given up because of a hung step",
        "class standard keeps its targets for 90.0%, wanted 0.95",
        "the KV cache of decode-0 is full, and 4 requests wait",
        "4 connections were turned away: unknown key",
    ]


def test_autopilot_status_shows_its_error() -> None:
    """The autopilot's advice and prediction error are shown."""
    error = PredictionError(17, 0.04, 0.125, None, 0.013)
    pilot = AutopilotStatus("tiny", "on", "1P3D", "2P2D", "[long] prompts", error)
    text = _shown(msgspec.structs.replace(REPORT, autopilots=(pilot,)))
    assert "Autopilot of tiny (on): wants 2P2D instead of 1P3D; [long] prompts" in text
    assert "last hour: TTFT p50 4%, TTFT p90 12%, SLO share 1.3 points (median of 17)" in text
    old = msgspec.structs.replace(pilot, wanted="1P3D", age_ms=600_000.0, error=PredictionError())
    text = _shown(msgspec.structs.replace(REPORT, autopilots=(old,)))
    assert "(on, 10 min ago): keeps 1P3D" in text and "last hour" not in text
    assert as_dict(msgspec.structs.replace(REPORT, autopilots=(pilot,)))["autopilots"][0]["error"]["ttft_p50"] == 0.04


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return here.runs_folder()


def _note(run: Path, coordinator: str, pid: int, started: int | None) -> None:
    run.mkdir(parents=True)
    fields = {"pid": pid, "started": started, "model_id": "m", "base_url": "http://h", "coordinator": coordinator}
    (run / here.NOTE).write_text(json.dumps(fields))


def test_running_cluster_is_found(state: Path) -> None:
    """A running cluster is found by its note, and notes of dead processes are ignored."""
    own, address = os.getpid(), "tcp://127.0.0.1:7"
    with subprocess.Popen(["true"]) as dead:
        dead.wait()
        _note(state / "dead", address, dead.pid, 5)
    _note(state / "of an earlier process with our number", address, own, (here.started_at(own) or 0) - 1)
    _note(state / "broken", address, own, None)
    (state / "running").mkdir()
    assert here.clusters() == []
    with here.noted(state / "running", model_id="m", base_url="http://h", coordinator=address):
        assert [(one.coordinator, one.pid) for one in here.clusters()] == [(address, own)]
    assert here.clusters() == []


def test_coordinator_choice_for_status(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Status asks the coordinator that is given or noted, and says so if there is none."""
    asked: list[str] = []

    async def answer(coordinator: str, _timeout_ms: int, _keys: object) -> StatusReport:
        asked.append(coordinator)
        raise NoAnswer("nothing there")

    monkeypatch.setattr(status, "ask", answer)
    with pytest.raises(NoAnswer, match="no `crossdock serve` of yours runs on this machine, and nothing there"):
        status.run(StatusSettings())
    own = here.started_at(os.getpid())
    _note(state / "1", "tcp://h:1", os.getpid(), own)
    with pytest.raises(NoAnswer, match=r"^nothing there"):
        status.run(StatusSettings())
    _note(state / "2", "tcp://h:2", os.getpid(), own)
    with pytest.raises(SeveralClusters, match=r"several clusters(.|\n)*--coordinator tcp://h:1 (.|\n)*tcp://h:2 "):
        status.run(StatusSettings())
    with pytest.raises(NoAnswer, match=r"^nothing there"):
        status.run(StatusSettings(coordinator="tcp://h:3"))
    assert asked == [status.DEFAULT_COORDINATOR, "tcp://h:1", "tcp://h:3"]


@pytest.mark.parametrize("answers", [True, False])
def test_down_processes_are_always_listed(
    state: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], answers: bool
) -> None:
    """Processes that are down are listed whether or not the coordinator answers."""

    async def answer(_coordinator: str, _timeout_ms: int, _keys: object) -> StatusReport:
        if not answers:
            raise NoAnswer("nothing there")
        return REPORT

    monkeypatch.setattr(status, "ask", answer)
    monkeypatch.setenv("COLUMNS", "200")
    now, own = clock.unix_time(), here.started_at(os.getpid())
    down = ProcessState("decode-0", 0, False, 2, (now - 9, now - 5), now + 55.4, "ended with status 1", 1)
    for name, states in (("1", ProcessStates((down,), "127.0.0.1:9404")), ("2", ProcessStates())):
        _note(state / name, f"tcp://h:{name}", os.getpid(), own)
        process_states.write(state / name, states)

    def run(**options: object) -> str:
        if answers:
            assert status.run(StatusSettings(coordinator="tcp://h:1", **options)) == 0  # type: ignore[arg-type]
        else:
            with pytest.raises(NoAnswer):
                status.run(StatusSettings(coordinator="tcp://h:1", **options))  # type: ignore[arg-type]
        return capsys.readouterr().out

    said = run()
    assert "decode-0: restarting in 55 s; it ended with status 1; 2 restarts in the last 10 min" in said
    assert "127.0.0.1:9404" in said
    if answers:
        (shown,) = json.loads(run(as_json=True))["processes"]
        assert (shown["name"], shown["restarts"], shown["exit_status"]) == ("decode-0", 2, 1)
    assert status.run(StatusSettings(coordinator="tcp://h:2")) == 0 if answers else True
    assert "restarting" not in capsys.readouterr().out


def test_silent_coordinator_is_named() -> None:
    """An unanswered status request names the address and --coordinator."""
    with pytest.raises(NoAnswer, match=r"127\.0\.0\.1:1\b.*--coordinator"):
        asyncio.run(ask("tcp://127.0.0.1:1", 100))


@pytest.mark.parametrize("models", [1, 2])
def test_status_table_fits_80_columns(models: int) -> None:
    """The status table of 20 workers fits 80 columns and cuts nothing."""
    workers = tuple(
        WorkerStatus(
            f"{role}-1{n}", role, f"meta-llama/Llama-3.{n % models}-70B", f"n{n}", 1, 1 << 17, 99_999, 256, 2, 10**n
        )
        for role in (Role.PREFILL, Role.DECODE)
        for n in range(10)
    )
    out = io.StringIO()
    show(StatusReport(workers, (), 0, {}, {}, {}), Console(file=out, width=80, force_terminal=True, color_system=None))
    lines = out.getvalue().splitlines()
    assert "…" not in out.getvalue()
    assert all(f"meta-llama/Llama-3.{n}-70B" in out.getvalue() for n in range(models))
    assert sum("99999/131072" in line for line in lines) == len(workers), "one line for each, nothing cut"
    assert all(len(line) <= 80 for line in lines)
    assert "1.00 G" in out.getvalue() and "10,000" in out.getvalue()


def test_table_and_json_have_every_figure() -> None:
    """The table and the JSON hold every figure of the report."""
    out = io.StringIO()
    show(REPORT, Console(file=out, width=200), wide=True)
    for text in (
        "decode-0",
        "tiny",
        "12,345",
        "gateway-0",
        "Queued: 4",
        "2 decoding",
        "9 finished",
        "1 protocol_errors",
    ):
        assert text in out.getvalue()
    parsed = json.loads(msgspec.json.encode(as_dict(REPORT)))
    assert parsed["workers"][0]["kv_blocks_used"] == 3
    assert parsed["running"] == {"decoding": 2}
