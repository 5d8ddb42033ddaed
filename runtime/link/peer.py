"""What both ends of a link share: its settings and counters, the other end as a `Peer`, and the sockets underneath."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import zmq

from proto import limits
from proto.codec import encode, to_frames
from proto.messages import Bye, Hello, Message, Refused, Welcome
from proto.newer import read_answer, version_refusal
from runtime.link.keys import Keys
from runtime.link.loop_socket import LoopContext, LoopSocket
from runtime.process import clock


@dataclass(frozen=True)
class LinkSettings:
    """A peer without a word for three and a half heartbeats is lost (`silence`). A dead process is noticed at once where its
    kernel closes the connection."""

    heartbeat_ms: int = 500
    queue_messages_max: int = 10_000
    """Per peer and direction; a peer whose queue is full is given up."""
    peers_max: int = 4_096
    """Of one server; one more is refused."""
    handshake_timeout_ms: int = 5_000
    keys: Keys | None = None
    """Of this process, for CURVE; None: links are neither encrypted nor authenticated."""
    reconnect_ms: int = 50
    reconnect_ms_max: int = 300
    """Less than a coordinator takes to start: what waits for it is to lose no more than that again. A refused connection is
    cheap, and where nobody answers at all a try takes `handshake_timeout_ms`."""


@dataclass
class LinkCounters:
    """What one end of a link has seen, for metrics."""

    protocol_errors: int = 0
    refused: int = 0
    plain: int = 0
    """Turned away: came without a key where keys are needed."""
    unknown_keys: int = 0
    """Turned away: came with a key that is not listed."""
    impostors: int = 0
    """Turned away: said to be what their key does not allow."""
    unknown_messages: int = 0
    """Ignored: sent by a peer of a newer version, and unknown to this one."""
    lost: int = 0
    messages_in: int = 0
    messages_out: int = 0

    def turned_away(self) -> dict[str, int]:
        """By reason: who was not let in."""
        return {"plain": self.plain, "unknown_key": self.unknown_keys, "wrong_role": self.impostors}


@dataclass(eq=False)
class Peer:
    """The other end of an open link."""

    epoch: int
    hello: Hello
    _send: Callable[["Peer", list[bytes]], bool]
    routing_id: bytes = b""
    heard_at: float = field(default_factory=clock.now)
    user_id: str = ""
    """Its public key, where links have keys."""
    version: int = limits.PROTOCOL_VERSION
    """Protocol version of the other end."""

    @property
    def common_version(self) -> int:
        """The protocol version that both ends know. What it does not have must not be relied upon."""
        return min(self.version, limits.PROTOCOL_VERSION)

    def send(self, message: Message, blob: bytes = b"") -> bool:
        """Queue a message; False if the peer is gone, or is being given up because its queue is full."""
        return self._send(self, to_frames(message, blob))


OnMessage = Callable[[Peer, Message, bytes], None]
OnDown = Callable[[Peer, str], None]

GOODBYE = "said goodbye"
"""How the reason for the end of a link begins where the other end left in order."""
CLOSED = "closed here"
"""The reason where this end did."""


class CannotBind(OSError):
    """A server's address is taken, or not of this machine; `strerror` names it."""


def is_orderly(reason: str) -> bool:
    """Whether a link ended because one of its ends meant it to."""
    return reason == CLOSED or reason.startswith(GOODBYE)


LINGER_MS = 200
HANDSHAKE_MS = 3_000
"""A connection whose handshake of ZMTP, with CURVE where there are keys, takes longer is closed. libzmq allows 30 s, in which
idle strangers could take all descriptors of the process."""
BACKLOG = 1_024
"""Connections that the kernel keeps for a bound socket until libzmq takes them: many may come at once."""
_SOCKETS_MAX = 32_768
"""Of one process. A link takes three with its monitor, and libzmq's own limit is 1,023."""
_context: LoopContext | None = None


def open_socket(kind: int, settings: LinkSettings) -> LoopSocket:
    """Raises `zmq.ZMQError` where this process has no descriptor left."""
    global _context
    if _context is None or _context.closed:
        _context = LoopContext()
        _context.set(zmq.MAX_SOCKETS, _SOCKETS_MAX)
    socket = _context.socket(kind)
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.setsockopt(zmq.SNDHWM, settings.queue_messages_max)
    socket.setsockopt(zmq.RCVHWM, settings.queue_messages_max)
    # Frames between our own limit and libzmq's reach the codec, which refuses and counts them; what is larger libzmq cuts off.
    socket.setsockopt(zmq.MAXMSGSIZE, 2 * limits.MAX_FRAME_BYTES)
    socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    socket.setsockopt(zmq.BACKLOG, BACKLOG)
    return socket


def close_sockets() -> None:
    """On the event loop: close what this process still has open, and wait until what was sent is with the kernel, the linger
    at most. A process that ends without it may take its goodbyes with it."""
    global _context
    if _context is None or _context.closed:
        return
    context, _context = _context, None
    context.destroy(LINGER_MS)


async def greet(socket: LoopSocket, hello: Hello, gone: asyncio.Event, timeout_s: float) -> Message | None:
    """Say Hello and wait for what comes back; None if nothing did before `gone` was set or the time was over. A peer whose
    version does not suit this end counts as having refused. Raises `RemoteProtocolError`."""
    socket.try_send([encode(hello)])
    waiting, leaving = asyncio.ensure_future(socket.receive()), asyncio.ensure_future(gone.wait())
    try:
        await asyncio.wait({waiting, leaving}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        answer = read_answer(waiting.result()) if waiting.done() else None
    finally:
        leaving.cancel()
        waiting.cancel()
    if isinstance(answer, Welcome) and (refusal := version_refusal(answer.version)) is not None:
        socket.try_send([encode(Bye(refusal))])
        return Refused(refusal)
    return answer
