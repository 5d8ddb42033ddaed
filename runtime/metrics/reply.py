"""What the metrics port answers, and what serves it: apart from both, since the HTTP library is imported late."""

import socket
from typing import Final, NamedTuple, Protocol

CONNECTIONS_MAX: Final = 64
"""One more takes the place of the oldest: idle strangers must not keep a scraper out."""
BACKLOG: Final = 1_024
"""Connections that the kernel keeps until they are accepted."""


class Reply(NamedTuple):
    status: int
    body: bytes = b""
    content_type: str = "text/plain; charset=utf-8"


class Serving(Protocol):
    """What answers on sockets that listen, and owns them."""

    async def start(self, listening: list[socket.socket]) -> None: ...

    async def close(self) -> None: ...
