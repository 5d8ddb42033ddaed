"""The process driver: a bug ends the process, a signal ends it in order."""

import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from runtime.process.driver import CoreDriver
from runtime.process.exits import BUG_EXIT

ROOT = Path(__file__).parents[2]


def start(body: str) -> "subprocess.Popen[str]":
    script = "import asyncio\nfrom runtime.process.driver import run_process, watched\n" + textwrap.dedent(body)
    return subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )


@pytest.mark.parametrize("how", ["watched(boom())", "asyncio.get_running_loop().call_soon(lambda: 1 / 0)"])
def test_uncaught_bug_ends_the_process(how: str) -> None:
    """A bug in a task or a callback ends the process with its own status and a traceback."""
    process = start(f"""
        async def boom():
            1 / 0
        async def main(stop):
            {how}
            await asyncio.wait_for(stop.wait(), 60)
            return 0
        raise SystemExit(run_process(main))
    """)
    out, errors = process.communicate(timeout=90)
    assert process.returncode == BUG_EXIT and "ZeroDivisionError" in out + errors


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_stop_the_process_orderly(number: signal.Signals) -> None:
    """A signal stops the process in order and keeps its exit status."""
    process = start("""
        async def main(stop):
            print("up", flush=True)
            await asyncio.wait_for(stop.wait(), 60)
            print("down", flush=True)
            return 3
        raise SystemExit(run_process(main))
    """)
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    process.send_signal(number)
    out, _ = process.communicate(timeout=90)
    assert (process.returncode, out) == (3, "down\n")


class Echo:
    """A core that answers event n with n - 1, down to 0."""

    def handle(self, event: int, now: float) -> list[int]:
        return [event - 1] if event > 0 else []

    def next_deadline(self) -> float | None:
        return None


def test_nested_events_wait_their_turn() -> None:
    """Events posted while an action is performed wait for their turn."""
    seen: list[int] = []

    def perform(action: int) -> None:
        seen.append(action)
        driver.post(action)

    async def body() -> None:
        driver.post(3)

    import asyncio

    driver: CoreDriver[int, int] = CoreDriver(Echo(), perform=perform, tick=0)
    asyncio.run(body())
    assert seen == [2, 1, 0]


def test_role_memory_is_private() -> None:
    """PR_GET_DUMPABLE is 0: then /proc/PID/mem, environ and root are for who may trace any process."""
    code = """
import ctypes
from runtime.process.driver import run_process
async def main(stop): return ctypes.CDLL(None).prctl(3, 0, 0, 0, 0)
print(run_process(main), run_process(main, private=True))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.stdout.split() == ["0", "0"], done.stderr


def test_role_raises_open_file_limit() -> None:
    """A role raises its soft limit of open files to the hard limit."""
    code = """
import resource
from runtime.process.driver import run_process
async def main(stop):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return int(soft != hard)
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
print(run_process(main))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.stdout.split() == ["0"], done.stderr
