"""What a real process says to a real socket: ready, alive while there is progress, stopping."""

import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from launcher.process import child_environment
from runtime.process.notify import Pulse

pytestmark = pytest.mark.cluster

WAIT_S = 60.0
ROLE = """
import asyncio
from runtime.process import notify
from runtime.process.driver import run_process

async def main(stop):
    healthy = [True]
    notify.only_while(lambda: healthy[0])
    notify.ready("here")
    asyncio.get_running_loop().add_reader(0, lambda: healthy.__setitem__(0, input() == "well"))
    await stop.wait()
    return 0

raise SystemExit(run_process(main))
"""


class Listener:
    def __init__(self, address: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(address)
        self.said: list[str] = []

    def wait_for(self, line: str) -> None:
        """Until it comes, whatever comes before."""
        deadline = time.monotonic() + WAIT_S
        while line not in self.said:
            assert select.select([self.socket], [], [], deadline - time.monotonic())[0], f"{line} not in {self.said}"
            self.said += self.socket.recv(4096).decode().splitlines()

    def quiet_for(self, silent_s: float) -> bool:
        return not select.select([self.socket], [], [], silent_s)[0]

    def drain(self) -> None:
        while select.select([self.socket], [], [], 0)[0]:
            self.socket.recv(4096)
        self.said.clear()


@contextmanager
def listening(address: str) -> Iterator[Listener]:
    listener = Listener(address)
    try:
        yield listener
    finally:
        listener.socket.close()


@contextmanager
def started(arguments: list[str], **environment: str) -> Iterator["subprocess.Popen[str]"]:
    process = subprocess.Popen(
        [sys.executable, *arguments],
        env=child_environment(1) | environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.communicate(timeout=WAIT_S)


@pytest.mark.parametrize("abstract", [True, False])
def test_ready_and_stopping_are_notified(tmp_path: Path, abstract: bool) -> None:
    """A role notifies systemd when it is ready and when it stops."""
    name = f"crossdock-test-{os.getpid()}"
    address, bound = (f"@{name}", f"\0{name}") if abstract else (str(tmp_path / "n"), str(tmp_path / "n"))
    with listening(bound) as listener, started(["-c", ROLE], NOTIFY_SOCKET=address) as process:
        listener.wait_for("READY=1")
        listener.wait_for("STATUS=here")
        assert listener.quiet_for(0.3), "there is no watchdog"
        process.terminate()
        listener.wait_for("STOPPING=1")
        assert process.wait(WAIT_S) == 0


def test_watchdog_is_fed_during_progress(tmp_path: Path) -> None:
    """The watchdog is fed only while there is progress and the event loop runs."""
    address = str(tmp_path / "n")
    watched = {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "300000"}
    with listening(address) as listener, started(["-c", ROLE], **watched) as process:
        assert process.stdin is not None
        listener.wait_for("WATCHDOG=1")
        for how in ("no progress", "the loop stands still"):
            if how == "no progress":
                process.stdin.write("ill\n")
                process.stdin.flush()
            else:
                process.send_signal(signal.SIGSTOP)
            deadline = time.monotonic() + WAIT_S
            while not listener.quiet_for(0.5):
                assert time.monotonic() < deadline, how
                listener.drain()
            if how == "no progress":
                process.stdin.write("well\n")
                process.stdin.flush()
            else:
                process.send_signal(signal.SIGCONT)
            listener.wait_for("WATCHDOG=1")
            listener.drain()


def test_hung_thread_has_no_pulse() -> None:
    """A thread that does not get to its tasks within the limit has no pulse."""
    now, hung = [0.0], threading.Event()
    with ThreadPoolExecutor(1) as thread:
        pulse = Pulse(thread, lambda: now[0], lambda: 10.0)
        assert pulse()
        working = thread.submit(hung.wait, WAIT_S)
        now[0] = 100.0
        thread.submit(int)
        assert pulse(), "it has just been asked"
        now[0] = 109.0
        assert pulse()
        now[0] = 111.0
        assert not pulse()
        hung.set()
        assert working.result(WAIT_S)
        thread.submit(int).result(WAIT_S)
        assert pulse(), "it goes on"


def test_foreign_watchdog_is_not_fed(tmp_path: Path) -> None:
    """A watchdog meant for another process is not fed."""
    address = str(tmp_path / "n")
    others = {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "100000", "WATCHDOG_PID": "1"}
    with listening(address) as listener, started(["-c", ROLE], **others):
        listener.wait_for("READY=1")
        assert listener.quiet_for(0.5)


def test_coordinator_notifies_when_listening(tmp_path: Path) -> None:
    """A coordinator notifies systemd when it listens and when it stops, and feeds the watchdog."""
    address = str(tmp_path / "n")
    arguments = ["-m", "coordinator", "--bind", "tcp://127.0.0.1:0"]
    with listening(address) as listener, started(arguments, NOTIFY_SOCKET=address, WATCHDOG_USEC="500000") as process:
        listener.wait_for("READY=1")
        listener.wait_for("WATCHDOG=1")
        process.terminate()
        listener.wait_for("STOPPING=1")
        assert process.wait(WAIT_S) == 0
