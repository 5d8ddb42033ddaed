"""The connecting end of a link; see `runtime.link.server`."""

import asyncio
import random
from collections.abc import Callable
from typing import Final

import zmq

from proto.errors import CheckFailed, RemoteProtocolError
from proto.messages import Bye, Hello, Ping, Pong, Refused, Role, Welcome
from runtime.link.connections import Connections
from runtime.link.curve import connect_as
from runtime.link.failure_detector import FailureDetector
from runtime.link.monitor import ConnectionFailure, open_watched
from runtime.link.peer import CLOSED, GOODBYE, LinkCounters, LinkSettings, OnDown, OnMessage, Peer, greet, read_checked
from runtime.link.server import PROBE_AFTER_S, TURN_MESSAGES
from runtime.process import clock, log
from runtime.process.driver import cancelled, watched
from runtime.process.loop_socket import LoopSocket

NEVER_MS = 3_600_000
"""An interval so long that libzmq never reconnects by itself, because the socket is closed before. Turning reconnection off
(-1) would also discard messages that arrived just before the connection ended, and would not report a refused connection."""

QUICK_S: Final = 0.4
"""How long the handshake may take where there are several addresses: the host of one may be off, and answer nothing."""
QUICK_TRIES: Final = 16  # after that, every host may be just slow

_log = log.get("crossdock.link")


class LinkClient:
    """The connecting end: one peer at a time, reconnected with backoff for as long as the client lives.

    Each `on_up` is followed by exactly one `on_down` before the next `on_up`. With keys, only a process whose key is one of
    role `to` can answer. Of several addresses, the next one is tried whenever a link has ended or could not be made.
    """

    def __init__(
        self,
        *,
        address: str,
        hello: Hello | Callable[[], Hello],
        on_up: Callable[[Peer, Welcome], None],
        on_message: OnMessage,
        on_down: OnDown,
        settings: LinkSettings | None = None,
        to: Role = Role.COORDINATOR,
    ) -> None:
        self.counters = LinkCounters()
        self.last_error = ""
        self._addresses = address.split(",")
        self._to = to
        self._tries = 0  # counted only while the next one should be another
        self._failed_in_row = 0
        self._hello = hello
        self._on_up = on_up
        self._on_message = on_message
        self._on_down = on_down
        self._settings = settings or LinkSettings()
        self._socket: LoopSocket | None = None
        self._peer: Peer | None = None
        self._server_key = b""  # of the process at the other end of the present socket; empty without keys
        self._forget_keys: Callable[[], None] | None = None
        self._theirs_ms: int | None = None
        self._gone = asyncio.Event()
        self._why_gone = ""
        self._task: asyncio.Task[None] | None = None

    @property
    def address(self) -> str:
        """The one that is used, or tried."""
        return self._addresses[self._tries % len(self._addresses)]

    async def start(self) -> None:
        if self._settings.keys is not None:
            self._forget_keys = self._settings.keys.on_change(self._keys_changed)
        self._task = watched(self._run())

    async def close(self) -> None:
        if self._forget_keys is not None:
            self._forget_keys()
            self._forget_keys = None
        if self._peer is not None:
            self._peer.send(Bye("shutting down"))
        if self._task is not None:
            await cancelled(self._task)

    async def _run(self) -> None:
        pause_ms = self._settings.reconnect_ms
        while True:
            if await self._one_link():
                pause_ms = self._settings.reconnect_ms
                self._failed_in_row = 0
                self._tries += len(self._addresses) > 1
            else:
                self._failed_in_row += 1
                self._tries += 1
                pause_ms = min(2 * pause_ms, self._settings.reconnect_ms_max)
            # Each address is tried as often as a single one would be.
            await asyncio.sleep(pause_ms / 1000 / len(self._addresses) * random.uniform(0.5, 1.0))

    async def _one_link(self) -> bool:
        """Runs one socket from connect to close; True if it was welcomed."""
        self._gone.clear()
        self._why_gone = ""
        try:
            connections = Connections(self._floods, lambda _: self._peer, hello_s=None)
            socket, monitor = open_watched(
                zmq.DEALER, self._settings, self._connection_lost, self._not_let_in, connections.opened
            )
        except zmq.ZMQError as error:
            self.last_error = f"cannot open a socket for {self.address}: {error}"
            return False
        self._socket = socket
        socket.setsockopt(zmq.RECONNECT_IVL, NEVER_MS)
        self._server_key = connect_as(socket, self._settings.keys, self._to, self._tries // len(self._addresses))
        watchers = watched(monitor.run()), watched(connections.run())
        receiver: asyncio.Task[None] | None = None
        try:
            socket.connect(self.address)
            peer = await self._handshake(socket)
            if peer is None:
                return False
            receiver = watched(self._receive(socket, peer))
            await self._beat(peer)
            return True
        except zmq.ZMQError as error:
            self.last_error = f"cannot connect to {self.address}: {error}"
            return False
        finally:
            await cancelled(*watchers, *([receiver] if receiver else []))
            socket.close()
            self._socket = None
            if self._peer is not None:
                lost, self._peer = self._peer, None
                self.counters.lost += 1
                self._on_down(lost, self._why_gone or CLOSED)

    async def _handshake(self, socket: LoopSocket) -> Peer | None:
        hello = self._hello if isinstance(self._hello, Hello) else self._hello()
        timeout_s = self._settings.handshake_timeout_ms / 1000
        if len(self._addresses) > 1 and self._failed_in_row < QUICK_TRIES:
            timeout_s = min(timeout_s, QUICK_S)
        try:
            message = await greet(socket, hello, self._gone, timeout_s)
        except RemoteProtocolError as error:
            self.counters.protocol_errors += 1
            self.last_error = f"{self.address} does not speak this protocol: {error}"
            return None
        if message is None:
            why = self._why_gone if self._gone.is_set() else f"no answer within {timeout_s:g} s"
            self.last_error = f"cannot reach {self.address}: {why}"
            return None
        if isinstance(message, Refused):
            self.counters.refused += 1
            if message.reason != self.last_error:
                _log.error("refused by peer", address=self.address, reason=message.reason)
            self.last_error = message.reason
            return None
        if not isinstance(message, Welcome):
            self.counters.protocol_errors += 1
            self.last_error = f"{self.address} answered Hello with {type(message).__name__}"
            return None
        self.last_error = ""
        self._theirs_ms = message.heartbeat_ms
        self._peer = Peer(message.incarnation, hello, self._send, version=message.version)
        self._on_up(self._peer, message)
        return self._peer

    def _connection_lost(self, socket: LoopSocket) -> None:
        """Give the link up after a short delay, since the last messages of the other end, perhaps a `Bye`, may still be
        unread."""

        def give_up() -> None:
            if socket is self._socket and not self._gone.is_set():
                self._give_up("connection closed")

        asyncio.get_running_loop().call_later(PROBE_AFTER_S, give_up)

    def _not_let_in(self, failure: ConnectionFailure) -> None:
        self._give_up(failure.value)

    def _keys_changed(self) -> None:
        keys = self._settings.keys
        if keys is not None and self._socket is not None and self._server_key not in keys.of(self._to):
            self._give_up("its key was removed")

    def _floods(self, _: int, why: str) -> None:
        self.counters.protocol_errors += 1
        _log.warning("protocol error", address=self.address, error=why)
        self._give_up(f"protocol error: {why}")

    def _give_up(self, reason: str) -> None:
        self._why_gone = reason
        self._gone.set()

    def _send(self, peer: Peer, frames: list[bytes]) -> bool:
        if peer is not self._peer or self._socket is None or self._gone.is_set():
            return False
        failure = self._socket.try_send(frames)
        if failure is None:
            self.counters.messages_out += 1
            return True
        self._give_up(failure)
        return False

    async def _receive(self, socket: LoopSocket, peer: Peer) -> None:
        while True:
            frames = await socket.receive()
            self.counters.messages_in += 1
            if self.counters.messages_in % TURN_MESSAGES == 0:
                await asyncio.sleep(0)
            peer.heard_at = clock.now()
            try:
                message, blob = read_checked(frames, peer.version)
                self.counters.unknown_messages += message is None
                if message is None or isinstance(message, Pong):
                    continue
                if isinstance(message, Refused | Bye):
                    self._give_up(f"{GOODBYE}: {message.reason}" if isinstance(message, Bye) else message.reason)
                    return
                if isinstance(message, Hello | Welcome | Ping):
                    raise RemoteProtocolError(f"unexpected {type(message).__name__}")
                self._on_message(peer, message, blob)
            except RemoteProtocolError as error:
                self.counters.protocol_errors += 1
                _log.warning("protocol error", address=self.address, error=str(error))
                self._give_up(f"protocol error: {error}")
                return
            except CheckFailed as error:
                self.counters.failed_checks += 1
                _log.error("a bug met by a peer's message; its link ends", address=self.address, exc_info=error)
                self._give_up("an error of this end")
                return

    async def _beat(self, peer: Peer) -> None:
        """Send `Ping` until the link ends or the peer has been silent for too long."""
        failure_detector = FailureDetector(self._settings.heartbeat_ms, clock.now(), self._theirs_ms)
        while not self._gone.is_set():
            peer.send(Ping())
            try:
                async with asyncio.timeout(failure_detector.pause_s([peer.heard_at], clock.now())):
                    await self._gone.wait()
            except TimeoutError:
                now = clock.now()
                if failure_detector.look(now) and failure_detector.is_lost(peer.heard_at, now):
                    self._give_up(f"no heartbeat for {now - peer.heard_at:.1f} s")
