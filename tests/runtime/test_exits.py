"""The end of a process: prompt whatever its threads do, with nothing lost that was said."""

import errno
import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from proto.errors import CrossdockError
from runtime.process.exits import ConfigError

ROOT = Path(__file__).parents[2]


def start(body: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(body)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONUNBUFFERED": ""},
    )


def test_leave_waits_for_no_thread() -> None:
    """Leaving keeps status, output and atexit handlers, and waits for no thread."""
    process = start("""
        import atexit, sys, threading
        from runtime.process.exits import leave
        atexit.register(print, "atexit", flush=False)
        threading.Thread(target=threading.Event().wait).start()
        print("no line end", end=" ")
        print("said", end="", file=sys.stderr)
        leave(7)
    """)
    out, errors = process.communicate(timeout=60)
    assert (process.returncode, out, errors) == (7, "no line end atexit\n", "said")


def test_leave_without_reader_is_quiet() -> None:
    """A process that leaves with its output closed is quiet and keeps its status."""
    process = start("""
        import sys
        from runtime.process.exits import leave
        sys.stdin.read()
        print("unread")
        leave(3)
    """)
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    process.stdout.close()
    process.stdin.close()
    with process.stderr:
        assert process.stderr.read() == ""
    assert process.wait(60) == 3


def test_signal_during_load_ends_worker() -> None:
    """A signal while the model loads ends the worker at once."""
    process = start("""
        import threading
        from runtime.process.exits import leave
        from runtime.settings.workers import WorkerSettings
        from worker import process

        def load(*_, **options):
            print("loading", flush=True)
            threading.Event().wait()

        process._load_own = load
        leave(process.run_worker(WorkerSettings(role="decode", model="m", log_format="json")))
    """)
    assert process.stdout is not None and process.stdout.readline() == "loading\n"
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert "stopped" in errors.splitlines()[-1]


def fail_to_read(number: int) -> None:
    """Raises as a reader of a file does."""
    try:
        raise OSError(number, os.strerror(number))
    except OSError as error:
        raise CrossdockError(f"a file: {error.strerror}") from None


def fail_to_write(path: Path) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("PRAGMA max_page_count = 1")
        db.execute("CREATE TABLE t (a)")


def status_of(work: Callable[[], None]) -> int:
    try:
        try:
            work()
        except (CrossdockError, sqlite3.Error) as error:
            raise ConfigError(f"--option: {error}") from error
    except ConfigError as failure:
        return failure.exit_status
    return 0


@pytest.mark.parametrize(
    ("number", "status"),
    [(errno.ENOSPC, 1), (errno.EROFS, 1), (errno.EMFILE, 1), (errno.EIO, 1), (errno.EACCES, 78), (errno.ENOENT, 78)],
)
def test_passing_faults_are_no_configuration(number: int, status: int) -> None:
    """A full disk or table of files at the start has status 1, so that a unit is started again; a missing file has 78."""
    assert status_of(lambda: fail_to_read(number)) == status


def test_full_database_is_no_configuration(tmp_path: Path) -> None:
    """A database that is full has status 1."""
    assert status_of(lambda: fail_to_write(tmp_path / "db")) == 1
