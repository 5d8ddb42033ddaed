"""Whose word the supervisor takes for a child's."""

import asyncio
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.local import notify_listener
from launcher.local.notify_listener import NotifySocket

SAY = "import os, socket, sys; s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM); s.connect(sys.argv[1]); s.send(b'%s')"
BY_A_CHILD = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SAY % 'B=1'!r}, sys.argv[1]], timeout=20)"


@pytest.fixture
def said() -> Callable[[str, str], int]:
    """Run this code, which speaks to that address, to its end; the id of its process."""

    def run(code: str, address: str) -> int:
        with subprocess.Popen([sys.executable, "-I", "-S", "-c", code, address]) as process:
            assert process.wait(30) == 0
        return process.pid

    return run


def test_only_child_processes_are_heard(said: Callable[[str, str], int]) -> None:
    """Only messages of a child, and of processes that it started, are heard."""
    with NotifySocket() as heard:
        child = said(SAY % "STOPPING=1", heard.address)
        assert heard.heard(child) == ["STOPPING=1"]
        for pid in (said(SAY % "STOPPING=1", heard.address) - 1, 1, 0, -1, 2**22):
            assert heard.heard(pid) == []
            said(SAY % "STOPPING=1", heard.address)
        heard.heard(0)
        said(BY_A_CHILD, heard.address)
        assert heard.heard(os.getpid()) == [], "the one that started it is gone"
        with subprocess.Popen(
            [sys.executable, "-c", f"{BY_A_CHILD}; sys.stdin.read()", heard.address], stdin=subprocess.PIPE
        ) as process:
            heard._socket.settimeout(30)
            assert heard.heard.__func__ is NotifySocket.heard  # type: ignore[attr-defined]
            heard._socket.recv(1, socket.MSG_PEEK)
            heard._socket.setblocking(False)
            assert heard.heard(process.pid) == ["B=1"]


def test_other_users_are_not_heard(said: Callable[[str, str], int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor may they enter the folder, where they could fill the socket so that the child is not heard either."""
    with NotifySocket() as heard:
        folder = Path(heard.address).parent
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and heard.address not in Path(
            "/proc/net/unix"
        ).read_text().replace(heard.address, "", 1)
        child = said(SAY % "WATCHDOG=1", heard.address)
        other = os.getuid() + 1
        monkeypatch.setattr(notify_listener.os, "getuid", lambda: other)  # type: ignore[attr-defined]
        assert heard.heard(child) == []
    assert not folder.exists()


def test_flood_does_not_block_the_supervisor() -> None:
    """Each call reads a bounded number, however many more there are."""
    with NotifySocket() as heard, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as speaking:
        speaking.connect(heard.address)
        received = 0

        class Endless:
            def recvmsg(self, *sizes: int):
                nonlocal received
                received += 1
                speaking.send(b"X=1")
                return heard_socket.recvmsg(*sizes)

            def close(self) -> None:
                heard_socket.close()

        heard_socket, heard._socket = heard._socket, Endless()  # type: ignore[assignment]
        assert heard.heard(os.getpid()) == ["X=1"] * received and received == notify_listener._DATAGRAMS_AT_ONCE


def test_early_messages_are_kept() -> None:
    """A message sent before the listener starts is delivered later."""

    async def body() -> None:
        with NotifySocket() as heard, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as speaking:
            lines: asyncio.Queue[str] = asyncio.Queue()
            speaking.connect(heard.address)
            speaking.send(b"READY=1")
            heard.listen(os.getpid(), lines.put_nowait)
            async with asyncio.timeout(20):
                assert await lines.get() == "READY=1"
            heard.ignore()

    asyncio.run(body())


def test_long_temp_path_is_no_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The socket works though the path for temporary files is too long for one."""
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(notify_listener.tempfile, "tempdir", str(long))  # type: ignore[attr-defined]
    with NotifySocket() as heard:
        assert heard.address.startswith("/tmp/crossdock-") and not list(long.iterdir())
