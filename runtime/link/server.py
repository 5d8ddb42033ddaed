"""Links: handshaken, heart-beating, bounded ZeroMQ connections between two processes.

    server (ROUTER, bound)                       client (DEALER, connects)
                          ← Hello                first message, once
    Welcome | Refused →                          version, role and whatever `accept` looks at have been checked
    Pong →                ← Ping                 twice in `heartbeat_ms`; a silent peer is lost (`failure_detector`)
    any message           any message

Each socket of a client has one connection, and that is one link: after a loss the client opens a new socket and shakes hands
again, so a frame can never belong to an earlier link. The server names a peer by the routing id that libzmq drew for the
connection, never by what the peer says of itself.

Sending never waits: a peer whose pipe is full is lost, not silently skipped. Data that is not a message of the protocol, or a
message for which the owner raises `RemoteProtocolError`, is counted and ends only that peer's link. A bug that occurs while
the owner checks a message (`CheckFailed`) has the same effect. Any other exception ends the process: state may be half
changed.
"""

import asyncio
from collections.abc import Callable

import zmq

from proto import limits
from proto.codec import encode
from proto.errors import CheckFailed, RemoteProtocolError
from proto.messages import Bye, Hello, Message, Ping, Pong, Refused, Welcome
from proto.versions import HelloPrefix, read_hello
from runtime.link.connections import HELLO_S, LOOK_S, Connections, shut_down
from runtime.link.curve import ZapAuthenticator
from runtime.link.failure_detector import SILENT, FailureDetector
from runtime.link.monitor import ConnectionMonitor
from runtime.link.peer import (
    GOODBYE,
    CannotBind,
    LinkCounters,
    LinkSettings,
    OnDown,
    OnMessage,
    Peer,
    is_orderly,
    read_checked,
)
from runtime.process import clock, log
from runtime.process.driver import cancelled, watched
from runtime.process.rate_limited_log import RateLimitedLog
from runtime.process.zmq_sockets import open_socket

__all__ = ["CannotBind", "LinkServer", "LinkSettings", "OnMessage", "Peer", "is_orderly"]

PROBE_AFTER_S = 0.02
TURN_MESSAGES = 64  # read before the rest of the process gets its turn
TURN_LOSSES = 16

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
        self._incarnation = hello.incarnation
        self._accept = accept
        self._on_up = on_up
        self._on_message = on_message
        self._on_down = on_down
        self._settings = settings or LinkSettings()
        self._socket = open_socket(zmq.ROUTER, self._settings.queue_messages_max)
        self._gate = ZapAuthenticator(self._socket, self._settings.keys, self.counters, self._settings.peers_max)
        self._by_descriptor: dict[int, Peer] = {}
        self._connections = Connections(self._shut_down, self._by_descriptor.get)
        self._port = 0
        self._warn = RateLimitedLog(_log.warning)
        self._tasks: list[asyncio.Task[None]] = []
        self._probe: asyncio.TimerHandle | None = None

    async def start(self, within_s: float = 0.0) -> str:
        """Bind; returns the address with the real port. Raises `CannotBind`, a port in use after `within_s` only."""
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        monitor = ConnectionMonitor(
            self._socket,
            on_lost=self._probe_soon,
            on_failed=self._gate.handshake_failed,
            on_opened=self._opened,
            on_closed=self._connections.closed,
        )
        self._gate.open(self._drop_unlisted)
        try:
            await self._socket.bind_within(self._bind, within_s)
        except zmq.ZMQError as error:
            monitor.close()
            self._gate.close()
            self._socket.close(0)
            raise CannotBind(error.errno, f"cannot bind {self._bind}: {error}") from None
        address: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        port = address.rpartition(":")[2]
        self._port = int(port) if port.isdecimal() else 0
        tasks = (self._receive(), self._watch(), self._connections.run(), self._forget_silent(), monitor.run())
        self._tasks = [watched(task) for task in tasks]
        return address

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
        self._gate.links[peer.user_id] -= 1
        if self._by_descriptor.get(peer.descriptor) is peer:
            del self._by_descriptor[peer.descriptor]
            self._connections.left(peer.descriptor)
        self._socket.try_send([peer.routing_id, encode(Refused(reason[: limits.MAX_TEXT_CHARS]))])
        self.counters.lost += 1
        self._on_down(peer, reason)

    def _opened(self, descriptor: int) -> None:
        if len(self._connections.open) >= self._settings.peers_max:
            self.counters.too_many += 1
            shut_down(descriptor, self._port)
        else:
            self._connections.opened(descriptor)

    def _shut_down(self, descriptor: int, why: str) -> None:
        self._connections.closed(descriptor)
        shut_down(descriptor, self._port)
        peer = self._by_descriptor.get(descriptor)
        if why:
            self.counters.protocol_errors += 1
            self._warn("protocol error", peer=peer.hello.name if peer else "unknown", error=why)
        elif self._settings.keys is None:
            self.counters.silent[""] += 1
        if peer is not None:
            self.drop(peer, f"protocol error: {why}")

    async def _forget_silent(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            self._gate.forget_silent(clock.now() - HELLO_S - LOOK_S)

    def _probe_soon(self) -> None:
        """Find out which peer's connection has ended. libzmq does not say it, but it refuses to send to a peer that is gone
        (ROUTER_MANDATORY). The probe comes after a short delay, so that many losses at once cause one round."""
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
        # The owner may be handling an event, so it is told of the loss later, in a separate one.
        asyncio.get_running_loop().call_soon(self.drop, peer, failure)
        return False

    async def _receive(self) -> None:
        while True:
            first, frames, user_id = await self._gate.receive()
            routing_id = first.bytes
            self.counters.messages_in += 1
            if self.counters.messages_in % TURN_MESSAGES == 0:
                await asyncio.sleep(0)
            peer = self.peers.get(routing_id)
            try:
                if peer is None:
                    self._shake_hands(first, frames, user_id)
                    await asyncio.sleep(0)  # a Hello makes more work than other messages
                elif peer.user_id != user_id:
                    # A client can choose its routing id, and may take the id of a client that has left.
                    self.counters.impostors += 1
                    self.drop(peer, "another key speaks in its place")
                else:
                    self._dispatch(peer, *read_checked(frames, peer.version))
            except RemoteProtocolError as error:
                self.counters.protocol_errors += 1
                self._warn("protocol error", peer=peer.hello.name if peer else "unknown", error=str(error))
                self._turn_out(routing_id, peer, f"protocol error: {error}")
                if len(frames) > limits.MAX_FRAMES:
                    shut_down(_descriptor(first), self._port)
            except CheckFailed as error:
                self.counters.failed_checks += 1
                name = peer.hello.name if peer else "unknown"
                _log.error("a bug met by a peer's message; its link ends", peer=name, exc_info=error)
                self._turn_out(routing_id, peer, "an error of this end")

    def _turn_out(self, routing_id: bytes, peer: Peer | None, reason: str) -> None:
        if peer is not None:
            self.drop(peer, reason)
        else:
            self._refuse(routing_id, reason)

    def _shake_hands(self, first: zmq.Frame, frames: list[bytes], user_id: str) -> None:
        routing_id = first.bytes
        try:
            hello = read_hello(frames)
        except RemoteProtocolError:
            raise
        except Exception as error:
            raise CheckFailed("a Hello cannot be read") from error
        if hello is None:
            # A client whose link we gave up: it starts over on hearing this.
            self._refuse(routing_id, "say Hello first")
            return
        if isinstance(hello, HelloPrefix):
            refusal: str | None = hello.refusal
        elif len(self.peers) >= self._settings.peers_max:
            refusal = f"{len(self.peers)} peers are connected already"
        else:
            refusal = self._gate.refusal(hello, user_id, self.peers.values()) or self._refusal(hello)
        if isinstance(hello, HelloPrefix) or refusal is not None:
            self._warn("refused", peer=hello.name, role=str(hello.role), reason=refusal)
            self._refuse(routing_id, refusal or "")
            return
        peer = Peer(
            hello.incarnation, hello, self._send, routing_id, _descriptor(first), user_id=user_id, version=hello.version
        )
        self.peers[routing_id] = peer
        self._gate.greeted(user_id)
        self._gate.links[user_id] += 1
        self._by_descriptor[peer.descriptor] = peer
        peer.send(Welcome(self._incarnation, self._settings.heartbeat_ms, limits.PROTOCOL_VERSION))
        self._on_up(peer)

    def _refusal(self, hello: Hello) -> str | None:
        try:
            return self._accept(hello)
        except Exception as error:
            raise CheckFailed(f"the Hello of {hello.name} cannot be checked") from error

    def _refuse(self, routing_id: bytes, reason: str) -> None:
        self.counters.refused += 1
        self._socket.try_send([routing_id, encode(Refused(reason[: limits.MAX_TEXT_CHARS]))])

    def _dispatch(self, peer: Peer, message: Message | None, blob: bytes) -> None:
        peer.heard_at = clock.now()
        if message is None:
            self.counters.unknown_messages += 1
        elif isinstance(message, Ping):
            peer.send(Pong())
        elif isinstance(message, Bye):
            self.drop(peer, f"{GOODBYE}: {message.reason}")
        elif isinstance(message, Hello | Welcome | Refused | Pong):
            raise RemoteProtocolError(f"unexpected {type(message).__name__}")
        else:
            self._on_message(peer, message, blob)

    async def _watch(self) -> None:
        failure_detector = FailureDetector(self._settings.heartbeat_ms, clock.now())
        while True:
            await asyncio.sleep(failure_detector.pause_s((peer.heard_at for peer in self.peers.values()), clock.now()))
            now = clock.now()
            counts = failure_detector.look(now)
            if self._socket.is_draining:
                # The messages of all peers wait, and are no silence. They must hear that this end is there.
                for peer in self.peers.values():
                    peer.heard_at = now
                self._probe_all()
            elif counts:
                silent = [peer for peer in self.peers.values() if failure_detector.is_lost(peer.heard_at, now)]
                for count, peer in enumerate(silent, 1):
                    self.drop(peer, f"{SILENT} for {now - peer.heard_at:.1f} s")
                    if count % TURN_LOSSES == 0:
                        await asyncio.sleep(0)


def _descriptor(frame: zmq.Frame) -> int:
    """The descriptor of the connection that a frame came by; -1 where it came by none."""
    try:
        return int(frame.get(zmq.SRCFD))
    except zmq.ZMQError:
        return -1
