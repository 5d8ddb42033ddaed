"""The ZeroMQ sockets of this process: opened with the same bounds everywhere, and closed together at its end."""

import zmq

from proto import limits
from runtime.process.loop_socket import LoopContext, LoopSocket

LINGER_MS = 200
HANDSHAKE_MS = 3_000
"""A connection whose handshake of ZMTP, with CURVE where there are keys, takes longer is closed. libzmq allows 30 s, in which
idle strangers could take all descriptors of the process."""
BACKLOG = 1_024  # connections that the kernel keeps for a bound socket until libzmq takes them: many may come at once
_SOCKETS_MAX = 32_768  # in one process; a link takes three with its monitor, and libzmq's own limit is 1,023
_context: LoopContext | None = None


def open_socket(kind: int, queue_messages_max: int) -> LoopSocket:
    """Raises `zmq.ZMQError` where this process has no descriptor left."""
    global _context
    if _context is None or _context.closed:
        _context = LoopContext()
        _context.set(zmq.MAX_SOCKETS, _SOCKETS_MAX)
    socket = _context.socket(kind)
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.setsockopt(zmq.SNDHWM, queue_messages_max)
    socket.setsockopt(zmq.RCVHWM, queue_messages_max)
    # Frames between our limit and this one reach the codec, which refuses and counts them. libzmq closes the connection of a
    # larger frame.
    socket.setsockopt(zmq.MAXMSGSIZE, 2 * limits.MAX_FRAME_BYTES)
    socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    socket.setsockopt(zmq.BACKLOG, BACKLOG)
    return socket


def close_sockets() -> None:
    """Close the open sockets of this process, on the event loop. Wait at most `LINGER_MS` until the kernel has taken all sent
    messages. Without this, messages like `Bye` may be lost when the process ends."""
    global _context
    if _context is None or _context.closed:
        return
    context, _context = _context, None
    context.destroy(LINGER_MS)
