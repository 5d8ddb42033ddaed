"""Ctrl-C at a terminal: once stops in order, twice kills at once."""

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.process import child_environment
from runtime.process.exits import INTERRUPTED_EXIT

DEAF_CHILD = """
import pathlib, sys, uvloop
from rich.console import Console
from launcher.local import supervisor as supervisors
from launcher.local.lifetime import until_interrupted
import pytest

from launcher.process import child_environment

supervisors.STOP_GRACE_S = 600.0
CODE = '''
import os, signal
def say(text):  # not by print, during which a handler may not print
    os.write(1, ('{"event": "%s", "level": "error"}\\\\n' % text).encode())
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, lambda *_: say("asked"))
say(os.getpid())
while True:
    signal.pause()
'''

async def scene():
    say = lambda level, name, text: print(text, flush=True)
    supervisor = supervisors.Supervisor(log_dir=pathlib.Path(sys.argv[1]), say=say, verbose=True)
    supervisor.start(supervisors.ProcessSpec("role", (sys.executable, "-c", CODE), child_environment(1)))
    try:
        await supervisor.wait_failed()
    finally:
        await supervisor.close()
    return 0

uvloop.run(until_interrupted(scene(), Console()))
"""


def test_second_ctrl_c_kills_stuck_children(tmp_path: Path) -> None:
    """A second Ctrl-C kills a child that does not stop."""
    command = [sys.executable, "-c", DEAF_CHILD, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=child_environment(1), text=True) as launcher:
        assert launcher.stdout is not None
        watch = os.pidfd_open(int(launcher.stdout.readline()))
        try:
            launcher.send_signal(signal.SIGINT)
            while (line := launcher.stdout.readline()) != "asked\n":
                assert line, "it ended, though its child did not"
            launcher.send_signal(signal.SIGINT)
            assert launcher.wait(60) == INTERRUPTED_EXIT
            assert select.select([watch], [], [], 60.0)[0], "the child outlived its launcher"
        finally:
            os.close(watch)


START = """
import asyncio, signal, sys
# Whoever runs the tests may ignore SIGINT, and what a shell starts in its background does.
signal.signal(signal.SIGINT, signal.SIG_IGN if "background" in sys.argv else signal.default_int_handler)
from rich.console import Console
from launcher.local.lifetime import run_until_stopped

async def work(serves):
    try:
        print("begun", flush=True)
        await asyncio.sleep(600)
    except asyncio.CancelledError:
        if serves:
            return 0
        raise

def begin():
    if sys.argv[1] == "fetching":
        import time
        print("begun", flush=True)
        time.sleep(600)
    return work(sys.argv[1] == "serving")

sys.exit(run_until_stopped(begin, Console()))
"""


@pytest.mark.parametrize(
    ("number", "status", "where"),
    [
        (signal.SIGINT, 130, "foreground"),
        (signal.SIGTERM, 143, "foreground"),
        (signal.SIGTERM, 143, "background"),
        (signal.SIGHUP, 129, "foreground"),
    ],
)
@pytest.mark.parametrize("phase", ["fetching", "starting", "serving"])
def test_interrupted_start_is_no_success(phase: str, number: int, status: int, where: str) -> None:
    """A start that is stopped before it was ready ends with the signal's status and says so."""
    command = [sys.executable, "-c", START, phase, where]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=child_environment(1), text=True
    ) as launcher:
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == "begun\n"
        launcher.send_signal(number)
        out, errors = launcher.communicate(timeout=60)
    assert launcher.returncode == (0 if phase == "serving" else status)
    assert ("Stopped before it was ready." in out) == (phase != "serving")
    assert errors == ""
