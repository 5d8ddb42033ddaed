"""What both ends of a link share: its settings and counters, the other end as a `Peer`, and the sockets underneath."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import zmq
import zmq.asyncio

from proto import limits
from proto.codec import to_frames
from proto.messages import Hello, Message
from runtime import clock


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
    reconnect_ms: int = 50
    reconnect_ms_max: int = 1_000


@dataclass
class LinkCounters:
    """What one end of a link has seen, for metrics."""

    protocol_errors: int = 0
    refused: int = 0
    lost: int = 0
    messages_in: int = 0
    messages_out: int = 0


@dataclass(eq=False)
class Peer:
    """The other end of an open link."""

    epoch: int
    hello: Hello
    _send: Callable[["Peer", list[bytes]], bool]
    routing_id: bytes = b""
    heard_at: float = field(default_factory=clock.now)

    def send(self, message: Message, blob: bytes = b"") -> bool:
        """Queue a message; False if the peer is gone, or is being given up because its queue is full."""
        return self._send(self, to_frames(message, blob))


OnMessage = Callable[[Peer, Message, bytes], None]
OnDown = Callable[[Peer, str], None]

LINGER_MS = 200
_context: zmq.asyncio.Context | None = None


def open_socket(kind: int, settings: LinkSettings) -> zmq.asyncio.Socket:
    global _context
    if _context is None or _context.closed:
        _context = zmq.asyncio.Context()
    socket = _context.socket(kind)
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.setsockopt(zmq.SNDHWM, settings.queue_messages_max)
    socket.setsockopt(zmq.RCVHWM, settings.queue_messages_max)
    # Frames between our own limit and libzmq's reach the codec, which refuses and counts them; what is larger libzmq cuts off.
    socket.setsockopt(zmq.MAXMSGSIZE, 2 * limits.MAX_FRAME_BYTES)
    socket.setsockopt(zmq.IPV6, 1)
    return socket


def close_sockets() -> None:
    """On the event loop: close what this process still has open, and wait until what was sent is with the kernel, the linger
    at most. A process that ends without it may take its goodbyes with it."""
    global _context
    if _context is None or _context.closed:
        return
    context, _context = _context, None
    context.destroy(LINGER_MS)


def try_send(socket: zmq.asyncio.Socket, frames: list[bytes]) -> str | None:
    """Send without waiting; the reason if it could not be."""
    sent = asyncio.ensure_future(socket.send_multipart(frames, flags=zmq.NOBLOCK))
    if not sent.done():  # cannot happen with NOBLOCK unless an earlier send is waiting, and none ever does
        sent.cancel()
        return "send queue is busy"
    error = sent.exception()
    return None if error is None else f"send failed: {error}"
