"""The TCP connections under a socket. libzmq does not limit how long a connection may stay without a `Hello`, or how many
bytes of an unfinished message it keeps. So this module checks both."""

import asyncio
import os
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass

from proto import limits
from runtime.link.peer import Peer
from runtime.process import clock

HELLO_S = 3.0  # a connection has so long to become a link; one whose link has ended gets as long
LOOK_S = 0.25
UNENDED_BYTES_MAX = 2 * limits.MAX_FRAMES * limits.MAX_FRAME_BYTES  # after a connection's last message
UNENDED_BYTES_MAX_ALL = 4 * UNENDED_BYTES_MAX
"""Such bytes of all connections of a socket together. Kept frames take up to 20 times as much, where they are tiny."""
_BYTES_RECEIVED = 128  # `tcpi_bytes_received` in Linux's `struct tcp_info`


@dataclass(eq=False)
class ServerConnection:
    since: float  # when it was accepted, or when its link ended
    base_bytes: int | None = 0  # received up to its last message; None: not known, since it has just had one


class Connections:
    """The connections of one socket, by descriptor, as its monitor tells. `drop(descriptor, why)` is called for each
    connection that must be closed; `why` is empty for one that has no link. `peer_of(descriptor)` returns the peer of a
    connection. It is called again at each check, since a `Hello` may be read before the monitor reports its connection."""

    def __init__(
        self,
        drop: Callable[[int, str], None],
        peer_of: Callable[[int], Peer | None],
        *,
        hello_s: float | None = HELLO_S,
    ) -> None:
        self.open: dict[int, ServerConnection] = {}
        self._drop = drop
        self._peer_of = peer_of
        self._hello_s = hello_s
        self._looked_at = 0.0

    def opened(self, descriptor: int) -> None:
        self.open[descriptor] = ServerConnection(clock.now())

    def closed(self, descriptor: int) -> None:
        self.open.pop(descriptor, None)

    def left(self, descriptor: int) -> None:
        """Notes that the connection's link has ended; the connection may go on."""
        if (connection := self.open.get(descriptor)) is not None:
            connection.since = clock.now()

    async def run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            self.look(clock.now())

    def look(self, now: float) -> None:
        looked_at, self._looked_at = self._looked_at, now
        if now - looked_at > 4 * LOOK_S:
            return  # after a pause of our own, what they have sent is still unread
        unended: list[tuple[int, int]] = []
        for descriptor, connection in list(self.open.items()):
            peer = self._peer_of(descriptor)
            if peer is None and self._hello_s is not None and now - connection.since > self._hello_s:
                self._drop(descriptor, "")
            elif peer is not None and peer.heard_at >= looked_at:
                connection.base_bytes = None
            else:
                received = received_bytes(descriptor)
                if connection.base_bytes is None:
                    connection.base_bytes = received
                unended.append((received - connection.base_bytes, descriptor))
        together = sum(size for size, _ in unended)
        for size, descriptor in sorted(unended, reverse=True):
            if size <= UNENDED_BYTES_MAX and together <= UNENDED_BYTES_MAX_ALL:
                break
            together -= size
            if descriptor in self.open:
                self._drop(descriptor, f"{size} bytes and no end of a message")


def received_bytes(descriptor: int) -> int:
    """Bytes that this TCP connection received since it began; 0 if it is none, or gone."""
    try:
        with socket.socket(fileno=os.dup(descriptor)) as own:
            info = own.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        received: int = struct.unpack_from("=Q", info, _BYTES_RECEIVED)[0]
    except (OSError, struct.error):
        return 0
    return received


def shut_down(descriptor: int, port: int) -> None:
    """End a connection of the socket bound to this port; libzmq notices, and closes it. With a reset: a peer whose window was
    full may otherwise wait for a minute until it hears of the end."""
    try:
        with socket.socket(fileno=os.dup(descriptor)) as own:
            # The connection may have been closed, and its descriptor reused for something else.
            if own.family in (socket.AF_INET, socket.AF_INET6) and own.getsockname()[1] == port:
                own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                own.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # it is gone already
