"""The listening end of `runtime.process.notify`: a socket without a file, for one process or several."""

import asyncio
import secrets
import socket
from collections.abc import Callable
from typing import Self

_DATAGRAM_BYTES = 8192


class NotifySocket:
    """`address` is for NOTIFY_SOCKET of the process that is to speak; it must be in the same network namespace."""

    def __init__(self) -> None:
        self.address = f"@crossdock-{secrets.token_hex(12)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        self._socket.bind("\0" + self.address[1:])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fileno(self) -> int:
        return self._socket.fileno()

    def heard(self) -> list[str]:
        """The lines of what has come in, like `READY=1`."""
        lines: list[str] = []
        while True:
            try:
                lines += self._socket.recv(_DATAGRAM_BYTES).decode("utf-8", "replace").splitlines()
            except BlockingIOError:
                return lines

    def listen(self, on_line: Callable[[str], None]) -> None:
        """On the running event loop, until `close`."""

        def readable() -> None:
            for line in self.heard():
                on_line(line)

        asyncio.get_running_loop().add_reader(self._socket, readable)

    def close(self) -> None:
        try:
            asyncio.get_running_loop().remove_reader(self._socket)
        except RuntimeError:
            pass  # read without a loop
        self._socket.close()
