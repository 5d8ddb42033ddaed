"""Real child processes: restarted, given up with their last words, stopped in bounded time, and never left behind."""

import asyncio
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import uvloop

from launcher.local import process_states, restart
from launcher.local import supervisor as supervisors
from launcher.local.supervisor import ProcessSpec, RoleFailed, Supervisor
from launcher.process import child_environment
from runtime.process import clock
from runtime.process.exits import CONFIG_EXIT, USAGE_EXIT, ConfigError
from runtime.settings.options import SettingsError

pytestmark = pytest.mark.cluster

Say = Callable[[str, str, str], None]


def _spec(code: str, name: str = "role", cores: tuple[int, ...] = ()) -> ProcessSpec:
    return ProcessSpec(name, (sys.executable, "-c", code), child_environment(1), cores)


def _gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


class _Heard:
    """What the supervisor said, and a way to wait for it."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._news = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def __call__(self, level: str, name: str, text: str) -> None:
        """Called on the supervisor's thread for the terminal."""
        self.lines.append(f"{level} {name} {text}")
        self._loop.call_soon_threadsafe(self._news.set)

    async def wait_for(self, part: str) -> str:
        async with asyncio.timeout(30):
            while not (found := [line for line in self.lines if part in line]):
                self._news.clear()
                await self._news.wait()
        return found[0]


LOUD = 'print(\'{"event": "here", "level": "warning", "pid": %d}\' % __import__("os").getpid(), flush=True)'
WAIT = "__import__('signal').pause()"


def test_killed_role_is_restarted(tmp_path: Path) -> None:
    """A role that was killed is started again, and a line says so."""

    async def scene() -> None:
        heard = _Heard()
        supervisor = Supervisor(log_dir=tmp_path, say=heard)
        supervisor.started_up = True
        supervisor.start(_spec(f"{LOUD}; {WAIT}"))
        try:
            await heard.wait_for("here")
            first = supervisor.children["role"].pid
            heard.lines.clear()
            os.kill(first, signal.SIGKILL)
            assert "starting it again" in await heard.wait_for("was killed by SIGKILL")
            await heard.wait_for("here")
            assert supervisor.children["role"].pid not in (0, first)
            assert supervisor.children["role"].restarts == 1
        finally:
            last = supervisor.children["role"].pid
            await supervisor.close()
        assert _gone(last)

    uvloop.run(scene())


def test_tenants_reload_is_shown_once(tmp_path: Path) -> None:
    """A tenants file that all roles reload is reported once per change."""

    def says(modified: int) -> str:
        return f'print(\'{{"event": "tenants file taken", "level": "info", "modified": {modified}}}\', flush=True)'

    async def scene() -> None:
        heard = _Heard()
        supervisor = Supervisor(log_dir=tmp_path, say=heard)
        supervisor.started_up = True
        for name in ("coordinator", "gateway-0", "gateway-1"):
            supervisor.start(_spec(f"{says(1)}; {LOUD}; {WAIT}", name))
            await heard.wait_for(f"{name} here")
        supervisor.start(_spec(f"{says(2)}; {LOUD}; {WAIT}", "later"))
        try:
            await heard.wait_for("later here")
        finally:
            await supervisor.close()
        assert [line for line in heard.lines if "tenants" in line] == [
            "info coordinator tenants file taken modified=1",
            "info later tenants file taken modified=2",
        ]

    uvloop.run(scene())


def test_failing_role_is_given_up(tmp_path: Path) -> None:
    """A role that keeps failing before the cluster is ready is given up with its last words."""

    async def scene() -> None:
        supervisor = Supervisor(log_dir=tmp_path, say=lambda level, name, text: None)
        supervisor.start(_spec("raise SystemExit('no such model')"))
        try:
            with pytest.raises(RoleFailed, match=r"role ended with status 1 and is given up(.|\n)*no such model"):
                await asyncio.wait_for(supervisor.wait_failed(), 30)
        finally:
            await supervisor.close()

    uvloop.run(scene())
    assert (tmp_path / "role.log").read_text().count("no such model") == 2


@pytest.mark.parametrize("status", [1, 75, CONFIG_EXIT, USAGE_EXIT])
def test_failing_role_ends_nothing_once_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    """A role that keeps failing once the cluster was ready ends no other role."""
    monkeypatch.setattr(restart, "FIRST_DELAY_S", 0.001)
    monkeypatch.setattr(restart, "LAST_DELAY_S", 0.002)

    async def scene() -> None:
        heard = _Heard()
        supervisor = Supervisor(log_dir=tmp_path, say=heard)
        supervisor.started_up = True
        supervisor.start(_spec(f"{LOUD}; {WAIT}", name="other"))
        await heard.wait_for("here")
        other = supervisor.children["other"].pid
        heard.lines.clear()
        supervisor.start(_spec(f"raise SystemExit({status})"))
        failed = asyncio.ensure_future(supervisor.wait_failed())
        try:
            async with asyncio.timeout(60):
                while supervisor.children["role"].restarts < 9:
                    await heard.wait_for(f"warning role ended with status {status}; starting it again in 0.0 s")
                    heard.lines.clear()
            assert not failed.done() and supervisor.children["other"].pid == other
            (state,) = (one for one in process_states.read(tmp_path).processes if one.name == "role")
            assert state.restarts >= 8 and state.recent(clock.unix_time()) == state.restarts
            assert state.exit_status == status and state.ended == f"ended with status {status}"
        finally:
            failed.cancel()
            await supervisor.close()

    uvloop.run(scene())


def test_vanished_program_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that is missing once the cluster was ready is tried again until it exists."""
    monkeypatch.setattr(restart, "FIRST_DELAY_S", 0.01)

    async def scene() -> None:
        heard = _Heard()
        supervisor = Supervisor(log_dir=tmp_path, say=heard)
        supervisor.started_up = True
        program = tmp_path / "program"
        supervisor.start(ProcessSpec("role", (str(program),), {}))
        try:
            await heard.wait_for("could not be started")
            program.write_text('#!/bin/sh\necho \'{"event": "here", "level": "error"}\'\nexec sleep 600\n')
            program.chmod(0o700)
            await heard.wait_for("error role here")
        finally:
            await supervisor.close()

    uvloop.run(scene())


READY = """
import asyncio, os, signal, sys
from runtime.process import notify
from runtime.process.driver import run_process
async def main(stop):
    notify.ready()
    print('{"event": "ready", "level": "warning"}', flush=True)
    await stop.wait()
    return 0
run_process(main)
"""


def _watched(name: str, timeout_s: float = 2.0) -> ProcessSpec:
    return ProcessSpec(name, (sys.executable, "-c", READY), child_environment(1), watchdog_s=timeout_s)


def test_recovered_role_is_announced(tmp_path: Path) -> None:
    """A restarted role that is ready again is announced as back."""

    async def scene() -> None:
        heard = _Heard()
        supervisor = Supervisor(log_dir=tmp_path, say=heard)
        supervisor.started_up = True
        supervisor.start(_spec(READY))
        try:
            await heard.wait_for("role ready")
            os.kill(supervisor.children["role"].pid, signal.SIGKILL)
            assert await heard.wait_for("back") == "info role is back: started again, and ready"
            assert supervisor.children["role"].is_ready
        finally:
            await supervisor.close()
        assert sum("is back" in line for line in heard.lines) == 1, "the first start is no news"

    uvloop.run(scene())


def test_hung_role_is_restarted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A role that hangs is killed and started again, and other roles stay."""
    monkeypatch.setattr(supervisors, "ABORT_S", 0.2)

    async def scene() -> None:
        heard = _Heard()
        supervisor = Supervisor(log_dir=tmp_path, say=heard)
        supervisor.start(_watched("well"))
        await heard.wait_for("well ready")
        supervisor.start(_watched("role"))
        try:
            await heard.wait_for("role ready")
            supervisor.started_up = True
            first, well = (supervisor.children[name].pid for name in ("role", "well"))
            heard.lines.clear()
            os.kill(first, signal.SIGSTOP)
            await heard.wait_for("error role said nothing for")
            await heard.wait_for("role was killed by SIG")
            await heard.wait_for("role ready")
            assert supervisor.children["role"].pid not in (0, first) and _gone(first)
            assert supervisor.children["well"].pid == well, "it speaks, and lives"
        finally:
            await supervisor.close()

    uvloop.run(scene())


def test_stuck_loop_shows_its_stack(tmp_path: Path) -> None:
    """A role whose event loop is stuck is aborted and shows where it was."""
    stuck = READY.replace("await stop.wait()", "import time; time.sleep(600)")

    async def scene() -> None:
        heard = _Heard()
        supervisor = Supervisor(log_dir=tmp_path, say=heard)
        supervisor.started_up = True
        supervisor.start(ProcessSpec("role", (sys.executable, "-c", stuck), child_environment(1), watchdog_s=1.0))
        try:
            await heard.wait_for("role was killed by SIGABRT")
        finally:
            await supervisor.close()

    uvloop.run(scene())
    assert "in main" in (tmp_path / "role.log").read_text(), "faulthandler's stacks"


@pytest.mark.parametrize(
    ("status", "error"), [(CONFIG_EXIT, ConfigError), (USAGE_EXIT, SettingsError)], ids=["config", "usage"]
)
def test_refused_settings_are_not_retried(tmp_path: Path, status: int, error: type[Exception]) -> None:
    """A role that refuses its settings is not started again; its message is raised."""
    said = "python -m decode_worker: --kv-gib: 9 GiB is over the memory of this machine, 4.0 GiB"

    async def scene() -> int:
        heard = _Heard()
        supervisor = Supervisor(log_dir=tmp_path, say=heard)
        supervisor.start(_spec(f"{LOUD}; {WAIT}", name="other"))
        await heard.wait_for("here")
        other = supervisor.children["other"].pid
        supervisor.start(_spec(f"print('noise'); print('{said}'); raise SystemExit({status})"))
        try:
            with pytest.raises(error, match=r"^role: --kv-gib: 9 GiB is over .* 4\.0 GiB$"):
                await asyncio.wait_for(supervisor.wait_failed(), 30)
        finally:
            await supervisor.close()
        return other

    assert _gone(uvloop.run(scene()))
    assert (tmp_path / "role.log").read_text() == f"noise\n{said}\n", "it was started once"


def test_missing_program_fails_at_once(tmp_path: Path) -> None:
    """A program that does not exist makes the start fail instead of hang."""

    async def scene() -> None:
        supervisor = Supervisor(log_dir=tmp_path, say=lambda level, name, text: None)
        supervisor.start(ProcessSpec("role", ("/does/not/exist",), {}))
        try:
            with pytest.raises(RoleFailed, match="cannot start role"):
                await asyncio.wait_for(supervisor.wait_failed(), 30)
        finally:
            await supervisor.close()

    uvloop.run(scene())


def test_deaf_role_is_killed_after_grace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A role that ignores signals is killed when the grace time is over."""
    monkeypatch.setattr(supervisors, "STOP_GRACE_S", 0.2)

    async def scene() -> int:
        heard = _Heard()
        supervisor = Supervisor(log_dir=tmp_path, say=heard)
        supervisor.start(
            _spec(f"from signal import *; signal(SIGTERM, SIG_IGN); signal(SIGINT, SIG_IGN); {LOUD}\nwhile 1: {WAIT}")
        )
        await heard.wait_for("here")
        pid = supervisor.children["role"].pid
        await supervisor.close()
        return pid

    assert _gone(uvloop.run(scene()))


def test_children_start_on_their_cores(tmp_path: Path) -> None:
    """A child starts on its cores and with its number of threads."""
    core = max(os.sched_getaffinity(0))
    code = (
        "import json, os; print(json.dumps({'event': 'placed', 'level': 'error',"
        " 'cores': sorted(os.sched_getaffinity(0)), 'omp': os.environ['OMP_NUM_THREADS']}), flush=True); " + WAIT
    )

    async def scene() -> str:
        heard = _Heard()
        supervisor = Supervisor(log_dir=tmp_path, say=heard)
        supervisor.start(_spec(code, cores=(core,)))
        try:
            return await heard.wait_for("placed")
        finally:
            await supervisor.close()

    assert uvloop.run(scene()) == f"error role placed cores=[{core}] omp=1"


ORPHAN_SCENE = """
import pathlib, sys, uvloop
from launcher.process import child_environment
from launcher.local.supervisor import ProcessSpec, Supervisor

async def scene():
    supervisor = Supervisor(log_dir=pathlib.Path(sys.argv[1]), say=lambda level, name, text: print(text, flush=True))
    code = 'import os, signal; print(\\'{"event": "%d", "level": "error"}\\' % os.getpid(), flush=True); signal.pause()'
    supervisor.start(ProcessSpec("role", (sys.executable, "-c", code), child_environment(1)))
    await supervisor.wait_failed()

uvloop.run(scene())
"""


def test_missing_cores_are_refused_by_role(tmp_path: Path) -> None:
    """Cores that do not exist are not set by the supervisor; the role refuses them itself."""

    async def scene() -> None:
        supervisor = Supervisor(log_dir=tmp_path, say=lambda *_: None)
        code = f"print('--cpu-cores: 4000 cannot be used'); raise SystemExit({CONFIG_EXIT})"
        supervisor.start(_spec(code.replace("'--", "'python -m role: --"), cores=(4000,)))
        try:
            async with asyncio.timeout(60):
                with pytest.raises(ConfigError, match="--cpu-cores: 4000 cannot be used"):
                    await supervisor.wait_failed()
        finally:
            await supervisor.close()

    uvloop.run(scene())


def test_killed_launcher_leaves_no_orphan(tmp_path: Path) -> None:
    """A child ends when its launcher is killed."""
    with subprocess.Popen(
        [sys.executable, "-c", ORPHAN_SCENE, str(tmp_path)], stdout=subprocess.PIPE, env=child_environment(1), text=True
    ) as launcher:
        assert launcher.stdout is not None
        child = int(launcher.stdout.readline())
        watch = os.pidfd_open(child)
        launcher.kill()
        try:
            _wait_until_dead(watch)
        finally:
            os.close(watch)


def _wait_until_dead(pidfd: int) -> None:
    """A pidfd becomes readable when its process has ended, whoever its parent is by then."""
    readable, _, _ = select.select([pidfd], [], [], 30.0)
    assert readable, "the child outlived its launcher"
