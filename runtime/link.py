"""Links: handshaken, heart-beating, bounded ZeroMQ connections between two processes.

    server (ROUTER, bound)                       client (DEALER, connects)
                          ← Hello                first message, once
    Welcome | Refused →                          version, role and whatever `accept` looks at have been checked
    Pong →                ← Ping                 twice in `heartbeat_ms`; who is silent for too long is lost (`silence`)
    any message           any message

One socket of the client is one connection is one link: after a loss the client opens a new socket and shakes hands again,
so a frame can never belong to an earlier incarnation of the link. The server names a peer by the routing id that libzmq
drew for the connection, never by what the peer says of itself.

Sending never waits: a peer whose pipe is full is lost, not silently skipped. Whatever is not a message of the protocol, or
makes the owner raise `RemoteProtocolError`, is counted and ends that peer's link only.
"""

import asyncio
import random
from collections.abc import Callable

import zmq

from proto import limits
from proto.codec import decode, encode
from proto.errors import RemoteProtocolError
from proto.messages import Bye, Hello, Message, Ping, Pong, Refused, Role, Welcome
from runtime import clock, log
from runtime.curve import Gate, connect_as
from runtime.driver import cancelled, watched
from runtime.loop_socket import LoopSocket
from runtime.monitor import ConnectionMonitor, Failure
from runtime.peer import (
    CLOSED,
    GOODBYE,
    CannotBind,
    LinkCounters,
    LinkSettings,
    OnDown,
    OnMessage,
    Peer,
    greet,
    is_orderly,
    open_socket,
)
from runtime.seldom import Seldom
from runtime.silence import Silence

__all__ = ["CannotBind", "LinkClient", "LinkServer", "LinkSettings", "OnMessage", "Peer", "is_orderly"]

PROBE_AFTER_S = 0.02
NEVER_MS = 3_600_000
"""To libzmq's own reconnecting: its socket is closed long before. Off (-1) would also take back what a connection delivered
in its last moment and nobody has read yet, and tell nothing of a connection refused."""
TURN_MESSAGES = 64
"""Messages read before the rest of the process gets its turn: while more are there, reading never waits."""

_log = log.get("crossdock.link")


class LinkServer:
    """The bound end: many peers, each accepted or refused by `accept(hello)`, which returns a refusal or None.

    `on_up`, `on_message` and `on_down` are called on the event loop, and each peer's `on_down` exactly once after its `on_up`.
    """

    def __init__(
        self,
        *,
        bind: str,
        hello: Hello,
        accept: Callable[[Hello], str | None],
        on_up: Callable[[Peer], None],
        on_message: OnMessage,
        on_down: OnDown,
        settings: LinkSettings | None = None,
    ) -> None:
        self.counters = LinkCounters()
        self.peers: dict[bytes, Peer] = {}
        self._bind = bind
        self._epoch = hello.epoch
        self._accept = accept
        self._on_up = on_up
        self._on_message = on_message
        self._on_down = on_down
        self._settings = settings or LinkSettings()
        self._socket = open_socket(zmq.ROUTER, self._settings)
        self._gate = Gate(self._socket, self._settings.keys, self.counters)
        self._warn = Seldom(_log.warning)
        self._tasks: list[asyncio.Task[None]] = []
        self._probe: asyncio.TimerHandle | None = None

    async def start(self, within_s: float = 0.0) -> str:
        """Bind; returns the address with the real port. Raises `CannotBind`, a port in use after `within_s` only."""
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        monitor = ConnectionMonitor(self._socket, on_lost=self._probe_soon, on_failed=self._gate.handshake_failed)
        self._gate.open(self._drop_unlisted)
        try:
            await self._socket.bind_within(self._bind, within_s)
        except zmq.ZMQError as error:
            monitor.close()
            self._gate.close()
            self._socket.close(0)
            raise CannotBind(error.errno, f"cannot bind {self._bind}: {error}") from None
        self._tasks = [watched(self._receive()), watched(self._watch()), watched(monitor.run())]
        return self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    async def close(self) -> None:
        for peer in list(self.peers.values()):
            peer.send(Bye("shutting down"))
        if self._probe is not None:
            self._probe.cancel()
        await cancelled(*self._tasks)
        self._gate.close()
        self._socket.close()

    def drop(self, peer: Peer, reason: str) -> None:
        """End one peer's link and say so to both ends."""
        if self.peers.get(peer.routing_id) is not peer:
            return
        del self.peers[peer.routing_id]
        self._socket.try_send([peer.routing_id, encode(Refused(reason[: limits.MAX_TEXT_CHARS]))])
        self.counters.lost += 1
        self._on_down(peer, reason)

    def _probe_soon(self) -> None:
        """A connection ended. libzmq does not say whose, but it refuses to send to a peer that is gone (ROUTER_MANDATORY); a
        moment later, so that a storm of them makes one round."""
        if self._probe is None:
            self._probe = asyncio.get_running_loop().call_later(PROBE_AFTER_S, self._probe_all)

    def _probe_all(self) -> None:
        self._probe = None
        for peer in list(self.peers.values()):
            peer.send(Pong())

    def _drop_unlisted(self) -> None:
        for peer in list(self.peers.values()):
            if not self._gate.is_listed(peer.user_id):
                self.drop(peer, "its key was removed")

    def _send(self, peer: Peer, frames: list[bytes]) -> bool:
        if self.peers.get(peer.routing_id) is not peer:
            return False
        failure = self._socket.try_send([peer.routing_id, *frames])
        if failure is None:
            self.counters.messages_out += 1
            return True
        # The owner may be in the middle of an event: it hears of the loss in one of its own.
        asyncio.get_running_loop().call_soon(self.drop, peer, failure)
        return False

    async def _receive(self) -> None:
        while True:
            routing_id, frames, user_id = await self._gate.receive()
            self.counters.messages_in += 1
            if self.counters.messages_in % TURN_MESSAGES == 0:
                await asyncio.sleep(0)
            peer = self.peers.get(routing_id)
            try:
                message, blob = decode(frames)
                if peer is None:
                    self._shake_hands(routing_id, message, user_id)
                elif peer.user_id != user_id:
                    # A routing id is what a client says it is, and one that has left is free to be taken.
                    self.counters.impostors += 1
                    self.drop(peer, "another key speaks in its place")
                else:
                    self._dispatch(peer, message, blob)
            except RemoteProtocolError as error:
                self.counters.protocol_errors += 1
                self._warn("protocol error", peer=peer.hello.name if peer else "unknown", error=str(error))
                if peer is not None:
                    self.drop(peer, f"protocol error: {error}")
                else:
                    self._refuse(routing_id, f"protocol error: {error}")

    def _shake_hands(self, routing_id: bytes, message: Message, user_id: str) -> None:
        if not isinstance(message, Hello):
            # A client whose link we gave up: it starts over on hearing this.
            self._refuse(routing_id, "say Hello first")
            return
        if message.version != limits.PROTOCOL_VERSION:
            refusal: str | None = f"protocol version {message.version}; this end speaks {limits.PROTOCOL_VERSION}"
        elif len(self.peers) >= self._settings.peers_max:
            refusal = f"{len(self.peers)} peers are connected already"
        else:
            refusal = self._gate.refusal(message, user_id, self.peers.values()) or self._accept(message)
        if refusal is not None:
            self._warn("refused", peer=message.name, role=message.role.value, reason=refusal)
            self._refuse(routing_id, refusal)
            return
        peer = Peer(message.epoch, message, self._send, routing_id, user_id=user_id)
        self.peers[routing_id] = peer
        peer.send(Welcome(self._epoch, self._settings.heartbeat_ms))
        self._on_up(peer)

    def _refuse(self, routing_id: bytes, reason: str) -> None:
        self.counters.refused += 1
        self._socket.try_send([routing_id, encode(Refused(reason[: limits.MAX_TEXT_CHARS]))])

    def _dispatch(self, peer: Peer, message: Message, blob: bytes) -> None:
        peer.heard_at = clock.now()
        if isinstance(message, Ping):
            peer.send(Pong())
        elif isinstance(message, Bye):
            self.drop(peer, f"{GOODBYE}: {message.reason}")
        elif isinstance(message, Hello | Welcome | Refused | Pong):
            raise RemoteProtocolError(f"unexpected {type(message).__name__}")
        else:
            self._on_message(peer, message, blob)

    async def _watch(self) -> None:
        silence = Silence(self._settings.heartbeat_ms, clock.now())
        while True:
            await asyncio.sleep(silence.pause_s((peer.heard_at for peer in self.peers.values()), clock.now()))
            now = clock.now()
            if silence.look(now):
                for peer in list(self.peers.values()):
                    if silence.is_lost(peer.heard_at, now):
                        self.drop(peer, f"no heartbeat for {now - peer.heard_at:.1f} s")


class LinkClient:
    """The connecting end: one peer at a time, reconnected with backoff for as long as the client lives.

    Each `on_up` is followed by exactly one `on_down` before the next `on_up`. With keys, only a process whose key is one of
    role `to` can answer.
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
        self.address = address
        self._to = to
        self._failed = 0
        self._hello = hello
        self._on_up = on_up
        self._on_message = on_message
        self._on_down = on_down
        self._settings = settings or LinkSettings()
        self._socket: LoopSocket | None = None
        self._peer: Peer | None = None
        self._theirs_ms: int | None = None
        self._gone = asyncio.Event()
        self._why_gone = ""
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._task = watched(self._run())

    async def close(self) -> None:
        if self._peer is not None:
            self._peer.send(Bye("shutting down"))
        if self._task is not None:
            await cancelled(self._task)

    async def _run(self) -> None:
        pause_ms = self._settings.reconnect_ms
        while True:
            if await self._one_link():
                pause_ms = self._settings.reconnect_ms
            else:
                self._failed += 1
                pause_ms = min(2 * pause_ms, self._settings.reconnect_ms_max)
            await asyncio.sleep(pause_ms / 1000 * random.uniform(0.5, 1.0))

    async def _one_link(self) -> bool:
        """One socket from connect to close; True if it had been welcomed."""
        socket = self._socket = open_socket(zmq.DEALER, self._settings)
        socket.setsockopt(zmq.RECONNECT_IVL, NEVER_MS)
        connect_as(socket, self._settings.keys, self._to, self._failed)
        self._gone.clear()
        self._why_gone = ""
        monitor = ConnectionMonitor(socket, on_lost=lambda: self._connection_lost(socket), on_failed=self._not_let_in)
        watcher = watched(monitor.run())
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
            await cancelled(watcher, *([receiver] if receiver else []))
            socket.close()
            self._socket = None
            if self._peer is not None:
                lost, self._peer = self._peer, None
                self.counters.lost += 1
                self._on_down(lost, self._why_gone or CLOSED)

    async def _handshake(self, socket: LoopSocket) -> Peer | None:
        hello = self._hello if isinstance(self._hello, Hello) else self._hello()
        timeout_s = self._settings.handshake_timeout_ms / 1000
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
        self._peer = Peer(message.epoch, hello, self._send)
        self._on_up(self._peer, message)
        return self._peer

    def _connection_lost(self, socket: LoopSocket) -> None:
        """Given up a moment later: what the other end said last, a goodbye perhaps, may still be unread."""

        def give_up() -> None:
            if socket is self._socket and not self._gone.is_set():
                self._give_up("connection closed")

        asyncio.get_running_loop().call_later(PROBE_AFTER_S, give_up)

    def _not_let_in(self, failure: Failure) -> None:
        self._give_up(failure.value)

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
                message, blob = decode(frames)
                if isinstance(message, Pong):
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

    async def _beat(self, peer: Peer) -> None:
        """Ping until the link is lost, by its own word or by silence."""
        silence = Silence(self._settings.heartbeat_ms, clock.now(), self._theirs_ms)
        while not self._gone.is_set():
            peer.send(Ping())
            try:
                async with asyncio.timeout(silence.pause_s([peer.heard_at], clock.now())):
                    await self._gone.wait()
            except TimeoutError:
                now = clock.now()
                if silence.look(now) and silence.is_lost(peer.heard_at, now):
                    self._give_up(f"no heartbeat for {now - peer.heard_at:.1f} s")
