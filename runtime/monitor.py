"""What libzmq tells of a socket's connections: lost ones, and ones that never spoke ZMTP."""

import asyncio
from collections.abc import Callable

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

_LOST = zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED
_GARBAGE = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL


def _ignore() -> None:
    """Nobody asked."""


class ConnectionMonitor:
    """Calls `on_lost` when a connection of the socket ends and `on_garbage` when a handshake fails, until cancelled."""

    def __init__(
        self,
        socket: zmq.asyncio.Socket,
        *,
        on_lost: Callable[[], None] = _ignore,
        on_garbage: Callable[[], None] = _ignore,
    ) -> None:
        self._watched = socket
        self._on_lost = on_lost
        self._on_garbage = on_garbage
        self._monitor = socket.get_monitor_socket(_LOST | _GARBAGE)

    async def run(self) -> None:
        try:
            while True:
                event = parse_monitor_message(await self._monitor.recv_multipart())["event"]
                if event & _LOST:
                    self._on_lost()
                elif event & _GARBAGE:
                    self._on_garbage()
        except asyncio.CancelledError:
            self.close()
            raise

    def close(self) -> None:
        if not self._watched.closed:
            self._watched.disable_monitor()
        # pyzmq forgets its end without closing it, and the event loop, which reads from it, would keep it for good.
        self._monitor.close(0)
