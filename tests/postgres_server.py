"""A PostgreSQL server of a test's own, on loopback and in a folder of its own."""

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from launcher.local.ports import free_port

BIN = next(iter(sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)), None)
INITDB = shutil.which("initdb") or (str(BIN / "initdb") if BIN else "")
START_S = 30.0


class PostgresServer:
    def __init__(self, folder: Path, host: str, inside: tuple[str, ...]) -> None:
        self.folder = folder
        self._host = host
        self._inside = inside
        self._bin = Path(INITDB).resolve().parent
        self.port = free_port("127.0.0.1")
        self.url = f"postgresql://crossdock@{host}:{self.port}/postgres"
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, program: str, *arguments: str) -> "subprocess.Popen[bytes]":
        """Runs a program of PostgreSQL, which refuses to be root."""
        as_user = ("setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups") if os.getuid() == 0 else ()
        command = [*self._inside, *as_user, str(self._bin / program), *arguments]
        return subprocess.Popen(command, cwd=self.folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def create(self) -> None:
        if os.getuid() == 0:
            shutil.chown(self.folder, "postgres", "postgres")
        made = self.run("initdb", "-D", "data", "-N", "-A", "trust", "-U", "crossdock", "--no-locale", "-E", "UTF8")
        assert made.wait(60) == 0
        (self.folder / "data" / "pg_hba.conf").write_text("host all all 0.0.0.0/0 trust\n")

    def start(self) -> None:
        where = ["-h", self._host, "-p", str(self.port), "-k", str(self.folder)]
        self._process = self.run("postgres", "-D", "data", *where, "-c", "fsync=off", "-c", "max_connections=40")
        until = time.monotonic() + START_S
        while self.run("pg_isready", "-h", self._host, "-p", str(self.port)).wait(10):
            assert time.monotonic() < until, "PostgreSQL does not start"
            time.sleep(0.05)

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """SIGINT: end all connections; SIGQUIT: as after a crash."""
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait(START_S)
            self._process = None

    def signal_all(self, which: signal.Signals) -> None:
        """Send a signal to the server's processes."""
        assert self._process is not None
        main = psutil.Process(self._process.pid)
        for one in (main, *main.children(recursive=True)):
            one.send_signal(which)


@contextmanager
def postgres_server(host: str = "127.0.0.1", inside: tuple[str, ...] = ()) -> Iterator[PostgresServer]:
    """Skips the test where there is no server program. `inside`: a command that runs another in some place."""
    pytest.importorskip("psycopg", reason="the extra `postgresql` is not installed")
    if not INITDB:
        pytest.skip("no PostgreSQL server is installed (Debian: postgresql)")
    if os.getuid() == 0:
        try:
            pwd.getpwnam("postgres")
        except KeyError:
            pytest.skip("PostgreSQL does not run as root, and there is no user postgres")
    # Not under pytest's folders, which only their owner may enter.
    with tempfile.TemporaryDirectory(prefix="crossdock-pg-") as name:
        server = PostgresServer(Path(name), host, inside)
        server.create()
        server.start()
        try:
            yield server
        finally:
            server.stop(signal.SIGQUIT)


def query(url: str, statement: str) -> list[Any]:
    """The rows that a statement in crossdock's schema returns."""
    import psycopg

    with psycopg.connect(url, autocommit=True, options="-c search_path=crossdock") as db:
        done = db.execute(statement)
        return done.fetchall() if done.description else []
