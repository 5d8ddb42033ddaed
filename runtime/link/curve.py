"""CURVE on the sockets of links, with an allow-list: who may connect, and as what.

libzmq checks that a client has the secret of its key, and asks a handler in this process (ZAP, ZeroMQ's RFC 27) whether to
admit it. Without a handler libzmq admits every client, so a socket is never bound before there is a handler. Every frame of an
accepted connection carries its key as `User-Id`. The server derives the role from this key, not from the `Hello` or the
routing id.
"""

import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import Any

import zmq
from zmq.utils import z85

from proto.messages import Hello, Role
from runtime.link.keys import Keys
from runtime.link.monitor import ConnectionFailure
from runtime.link.peer import LinkCounters, Peer
from runtime.process import clock, log
from runtime.process.driver import watched
from runtime.process.loop_socket import LoopSocket
from runtime.process.rate_limited_log import RateLimitedLog

_log = log.get("crossdock.curve")
_domains = itertools.count(1)


_ZAP_VERSION = b"1.0"
_ZAP_FRAMES = 7  # version, request id, domain, address, routing id, mechanism, key


class _Handler:
    """The ZAP handler of a context, for as long as there is the context. Each server is a domain of its own."""

    def __init__(self, socket: LoopSocket) -> None:
        self._socket = socket
        socket.frames_max = _ZAP_FRAMES + 1
        self.lets_in: dict[str, Callable[[str], bool]] = {}  # by domain, for a client's public key
        socket.bind("inproc://zeromq.zap.01")

    async def run(self) -> None:
        while True:
            reply = self.answer(await self._socket.receive())
            if reply:
                self._socket.try_send(reply)

    def answer(self, request: list[bytes]) -> list[bytes]:
        """The reply: version, request id, status code, its text, User-Id, metadata. A peer without a known CURVE key stays out.
        Empty for what is no request."""
        if len(request) < 2:
            return []
        key = self._known_key(request)
        status = (b"200", b"OK", key.encode()) if key else (b"400", b"not let in", b"")
        return [_ZAP_VERSION, request[1], *status, b""]

    def _known_key(self, request: list[bytes]) -> str:
        """The client's public key as text, if it may come in."""
        if len(request) != _ZAP_FRAMES or request[0] != _ZAP_VERSION or request[5] != b"CURVE" or len(request[6]) != 32:
            return ""
        lets_in = self.lets_in.get(request[2].decode("utf-8", "replace"))
        key = z85.encode(request[6]).decode("ascii")
        return key if lets_in is not None and lets_in(key) else ""


_handlers: "dict[zmq.Context[Any], _Handler]" = {}


class ZapAuthenticator:
    """Checks the peers of a server. If there are keys, a peer's key decides its role. Without keys, the server trusts the
    peer's `Hello`."""

    def __init__(self, socket: LoopSocket, keys: Keys | None, counters: LinkCounters, peers_max: int) -> None:
        self.links: Counter[str] = Counter()
        self._peers_max = peers_max
        self._let_in: dict[str, deque[float]] = {}  # of connections without Hello, by key; oldest first
        self._socket = socket
        self._keys = keys
        self._counters = counters
        self._domain = f"link-{next(_domains)}"
        self._rate_limited_log = RateLimitedLog(_log.warning)
        self._forget: Callable[[], None] | None = None

    def open(self, on_change: Callable[[], None]) -> None:
        """Before the socket is bound. `on_change` is called when keys may have been removed."""
        if self._keys is None:
            return
        context = self._socket.context
        for old in [one for one in _handlers if one.closed]:
            del _handlers[old]
        if context not in _handlers:
            handler = _handlers[context] = _Handler(context.socket(zmq.REP))
            watched(handler.run())
        _handlers[context].lets_in[self._domain] = self._lets_in
        self._socket.setsockopt(zmq.CURVE_SERVER, 1)
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, self._keys.secret)
        self._socket.setsockopt_string(zmq.ZAP_DOMAIN, self._domain)
        self._forget = self._keys.on_change(on_change)

    def close(self) -> None:
        if self._forget is None:
            return
        self._forget()
        self._forget = None
        del _handlers[self._socket.context].lets_in[self._domain]

    def _lets_in(self, key: str) -> bool:
        """Returns whether a client with this key is admitted. The ZAP handler calls this."""
        assert self._keys is not None
        if self._keys.listed(key) is not None:
            if self.links[key] + len(self._let_in.get(key, ())) >= self._peers_max:
                self._counters.too_many += 1
                self._rate_limited_log("turned away", reason=f"its key has {self._peers_max} connections already")
                return False
            self._let_in.setdefault(key, deque()).append(clock.now())
            return True
        self._counters.unknown_keys += 1
        self._rate_limited_log("turned away", reason="its key is not among those of --keys")
        return False

    def greeted(self, key: str) -> None:
        """A connection with this key has said Hello."""
        waiting = self._let_in.get(key)
        if waiting:
            waiting.popleft()
            if not waiting:
                del self._let_in[key]

    def forget_silent(self, until: float) -> None:
        """Forget and count the connections that were admitted by the time `until` and never sent a `Hello`. They are closed by
        now."""
        for key, waiting in list(self._let_in.items()):
            listed = self._keys.listed(key) if self._keys is not None else None
            while waiting and waiting[0] <= until:
                waiting.popleft()
                self._counters.silent[listed.name if listed is not None else "removed"] += 1
            if not waiting:
                del self._let_in[key]

    def handshake_failed(self, failure: ConnectionFailure) -> None:
        # A client without keys often sees first that they do not suit each other, and is gone.
        if failure is ConnectionFailure.MECHANISM or (
            failure is ConnectionFailure.BROKEN_OFF and self._keys is not None
        ):
            self._counters.plain += 1
            self._rate_limited_log("turned away", reason="it came without a key")
        elif failure in (ConnectionFailure.GARBAGE, ConnectionFailure.BROKEN_OFF):
            self._counters.protocol_errors += 1

    async def receive(self) -> "tuple[zmq.Frame, list[bytes], str]":
        """(routing id, frames, whose key it is or empty) of the next message."""
        first, *rest = await self._socket.receive(copy=False)
        user_id = str(first.get("User-Id")) if self._keys is not None else ""
        return first, [frame.bytes for frame in rest], user_id

    def refusal(self, hello: Hello, user_id: str, peers: Iterable[Peer]) -> str | None:
        """Returns why a peer with this key may not send this `Hello`, or None. `peers`: the connected peers. A peer with
        another key may not use the incarnation of one of them, since it would displace that peer."""
        if self._keys is None:
            return None
        listed = self._keys.listed(user_id)
        taken = any(peer.incarnation == hello.incarnation and peer.user_id != user_id for peer in peers)
        if listed is not None and listed.role is hello.role and not taken:
            return None
        self._counters.impostors += 1
        if listed is None:
            return "its key was removed"
        if listed.role is not hello.role:
            return f"its key is {listed.name}, which may not be a {hello.role}"
        return "its incarnation is another process's"

    def is_listed(self, user_id: str) -> bool:
        return self._keys is None or self._keys.listed(user_id) is not None


def connect_as(socket: LoopSocket, keys: Keys | None, to: Role, attempt: int) -> bytes:
    """Before a client's socket is connected to a process of role `to`: where it has several keys, attempts take turns. Returns
    the key that the process must have; empty without keys."""
    if keys is None:
        return b""
    theirs = keys.of(to)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
    # If the last key was removed, use a new key that no process has.
    key = theirs[attempt % len(theirs)] if theirs else zmq.curve_keypair()[0]
    socket.setsockopt(zmq.CURVE_SERVERKEY, key)
    return key
