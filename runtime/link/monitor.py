"""Events of libzmq on a socket's connections: lost ones, and handshakes of ZMTP that failed."""

import asyncio
from collections.abc import Callable
from enum import Enum

import zmq
from zmq.utils.monitor import parse_monitor_message

from runtime.link.peer import LinkSettings
from runtime.process.loop_socket import LoopSocket
from runtime.process.zmq_sockets import open_socket

_LOST = zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED
_OPENED = zmq.EVENT_ACCEPTED | zmq.EVENT_CONNECTED
_FAILED = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
_MECHANISM_MISMATCH = 0x1100_0002  # ZMQ_PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH, which pyzmq does not name


class ConnectionFailure(Enum):
    """Why a handshake failed."""

    GARBAGE = "it does not speak this protocol, or one end has keys and the other has none (--keys)"
    BROKEN_OFF = "its connection ended amid the handshake; does one end have keys and the other none (--keys)?"
    MECHANISM = "one end has keys and the other has none (--keys)"
    KEY = "it does not let this key in (--keys)"


def _ignore() -> None:
    """Nobody asked."""


class ConnectionMonitor:
    """Calls `on_lost` when a connection of the socket ends and `on_failed` when a handshake fails, until cancelled; `on_opened`
    and `on_closed` with the descriptors of connections."""

    def __init__(
        self,
        socket: LoopSocket,
        *,
        on_lost: Callable[[], None] = _ignore,
        on_failed: Callable[[ConnectionFailure], None] = lambda failure: None,
        on_opened: Callable[[int], None] = lambda descriptor: None,
        on_closed: Callable[[int], None] = lambda descriptor: None,
    ) -> None:
        self._watched = socket
        self._on_opened = on_opened
        self._on_closed = on_closed
        self._on_lost = on_lost
        self._on_failed = on_failed
        self._monitor = socket.get_monitor_socket(_LOST | _FAILED | _OPENED)

    async def run(self) -> None:
        try:
            while True:
                message = parse_monitor_message(await self._monitor.receive())
                event = message["event"]
                if event & _OPENED:
                    self._on_opened(int(message["value"]))
                elif event & _LOST:
                    if event == zmq.EVENT_DISCONNECTED:
                        self._on_closed(int(message["value"]))
                    self._on_lost()
                elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                    self._on_failed(ConnectionFailure.KEY)
                elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and message["value"] == _MECHANISM_MISMATCH:
                    self._on_failed(ConnectionFailure.MECHANISM)
                elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
                    self._on_failed(ConnectionFailure.BROKEN_OFF)
                elif event & _FAILED:
                    self._on_failed(ConnectionFailure.GARBAGE)
        except asyncio.CancelledError:
            self.close()
            raise

    def close(self) -> None:
        if not self._watched.closed:
            self._watched.disable_monitor()
        # pyzmq forgets its end without closing it, and the event loop, which reads from it, would keep it for good.
        self._monitor.close(0)


def open_watched(
    kind: int,
    settings: LinkSettings,
    on_lost: Callable[[LoopSocket], None],
    on_failed: Callable[[ConnectionFailure], None],
    on_opened: Callable[[int], None],
) -> tuple[LoopSocket, ConnectionMonitor]:
    """A socket and its monitor. Raises `zmq.ZMQError`, and leaves nothing open, where no descriptor is left."""
    socket = open_socket(kind, settings.queue_messages_max)
    try:
        return socket, ConnectionMonitor(
            socket, on_lost=lambda: on_lost(socket), on_failed=on_failed, on_opened=on_opened
        )
    except zmq.ZMQError:
        socket.close(0)
        raise
