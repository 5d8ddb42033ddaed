"""The listening end of `runtime.process.notify`: a socket in a folder that only this user may enter, for one child process.

The kernel says who sent each datagram. Those of other users, and of processes that are neither the child nor started by it, are
dropped: otherwise they could switch the child's watchdog off.
"""

import asyncio
import os
import socket
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final, Self

_DATAGRAM_BYTES: Final = 8192
_DATAGRAMS_AT_ONCE: Final = 64
_ANCESTORS_MAX: Final = 64
_PATH_BYTES_MAX: Final = 107
_CREDENTIALS: Final = struct.Struct("3i")  # `struct ucred`: pid, uid, gid


class NotifySocket:
    """The socket. Its `address` is passed as NOTIFY_SOCKET to the process that is to send."""

    def __init__(self) -> None:
        folder = tempfile.mkdtemp(prefix="crossdock-")
        if len(os.fsencode(folder)) + len("/notify") > _PATH_BYTES_MAX:
            os.rmdir(folder)
            folder = tempfile.mkdtemp(prefix="crossdock-", dir="/tmp")
        self.address = f"{folder}/notify"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.bind(self.address)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fileno(self) -> int:
        return self._socket.fileno()

    def heard(self, pid: int) -> list[str]:
        """Returns the lines that this process and those it started have sent, like `READY=1`. One call reads a bounded number
        of datagrams, so there may be more."""
        lines: list[str] = []
        for _ in range(_DATAGRAMS_AT_ONCE):
            try:
                data, ancillary, _, _ = self._socket.recvmsg(_DATAGRAM_BYTES, socket.CMSG_SPACE(_CREDENTIALS.size))
            except BlockingIOError:
                break
            if any(_is_from(pid, content) for _, kind, content in ancillary if kind == socket.SCM_CREDENTIALS):
                lines += data.decode("utf-8", "replace").splitlines()
        return lines

    def listen(self, pid: int, on_line: Callable[[str], None]) -> None:
        """Listen to this process, on the running event loop, until `ignore` or `close`."""

        def readable() -> None:
            for line in self.heard(pid):
                on_line(line)

        asyncio.get_running_loop().add_reader(self._socket, readable)

    def ignore(self) -> None:
        """Stop listening."""
        asyncio.get_running_loop().remove_reader(self._socket)

    def close(self) -> None:
        try:
            asyncio.get_running_loop().remove_reader(self._socket)
        except RuntimeError:
            pass  # read without a loop
        self._socket.close()
        path = Path(self.address)
        path.unlink(missing_ok=True)
        path.parent.rmdir()


def _is_from(pid: int, credentials: bytes) -> bool:
    """Whether the process with this id, or a process that it started, sent it as this user."""
    sender, uid, _ = _CREDENTIALS.unpack(credentials[: _CREDENTIALS.size])
    if uid != os.getuid():
        return False
    for _ in range(_ANCESTORS_MAX):
        if sender == pid:
            return True
        sender = _parent(sender)
        if sender <= 1:
            return False
    return False


def _parent(pid: int) -> int:
    """Returns the parent's id; 0 if there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return 0
    return int(stat.rpartition(b")")[2].split()[1])
