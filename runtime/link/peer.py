"""Code that both ends of a link share: settings, counters, the other end as a `Peer`, and the first steps of the handshake."""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from proto import limits
from proto.codec import decode, encode, to_frames
from proto.errors import CheckFailed, RemoteProtocolError
from proto.messages import Bye, Hello, Message, Refused, Welcome
from proto.versions import read, version_refusal
from runtime.link.keys import Keys
from runtime.process import clock
from runtime.process.loop_socket import LoopSocket


@dataclass(frozen=True)
class LinkSettings:
    """A peer that is silent for three and a half heartbeats counts as lost (`failure_detector`). A dead process is noticed at
    once if its kernel closes the connection."""

    heartbeat_ms: int = 500
    queue_messages_max: int = 10_000  # per peer and direction; a peer whose queue is full is given up
    peers_max: int = 4_096  # of a server, and of each key, with those that have not said Hello yet
    handshake_timeout_ms: int = 5_000
    keys: Keys | None = None  # for CURVE; None: links are neither encrypted nor authenticated
    reconnect_ms: int = 50
    reconnect_ms_max: int = 300
    """The longest pause between tries; less than a coordinator takes to start, so that waiting processes lose little time. A
    refused connection is cheap. If no process answers at all, a try takes `handshake_timeout_ms`."""


@dataclass
class LinkCounters:
    """Counts of one end of a link, for metrics."""

    protocol_errors: int = 0
    failed_checks: int = 0  # links ended by an exception of our own while a message was checked
    silent: Counter[str] = field(default_factory=Counter)  # never said Hello, by name of key (empty without keys)
    refused: int = 0
    plain: int = 0  # turned away: came without a key where keys are needed
    unknown_keys: int = 0  # turned away: came with a key that is not listed
    too_many: int = 0  # turned away: its key has as many connections as may be
    impostors: int = 0  # turned away: said to be what their key does not allow
    unknown_messages: int = 0  # ignored: sent by a peer of a newer version, and unknown to this one
    lost: int = 0
    messages_in: int = 0
    messages_out: int = 0

    def turned_away(self) -> dict[str, int]:
        """The number of peers that were not let in, by reason."""
        return {
            "plain": self.plain,
            "unknown_key": self.unknown_keys,
            "wrong_role": self.impostors,
            "too_many": self.too_many,
        }


@dataclass(eq=False)
class Peer:
    """The other end of an open link."""

    incarnation: int
    hello: Hello
    _send: Callable[["Peer", list[bytes]], bool]
    routing_id: bytes = b""
    descriptor: int = -1  # of its connection, at a server
    heard_at: float = field(default_factory=clock.now)
    user_id: str = ""  # its public key, where links have keys
    version: int = limits.PROTOCOL_VERSION

    def send(self, message: Message, blob: bytes = b"") -> bool:
        """Queue a message; False if the peer is gone, or is being given up because its queue is full."""
        return self._send(self, to_frames(message, blob))


OnMessage = Callable[[Peer, Message, bytes], None]
OnDown = Callable[[Peer, str], None]

GOODBYE = "said goodbye"  # how the reason for a link's end begins if the other end has sent `Bye`
CLOSED = "closed here"  # the reason for a link's end that this end has closed


class CannotBind(OSError):
    """A server's address is taken, or not of this machine; `strerror` names it."""


def is_orderly(reason: str) -> bool:
    """Whether a link ended because one of its ends meant it to."""
    return reason == CLOSED or reason.startswith(GOODBYE)


def read_checked(frames: list[bytes], version: int) -> tuple[Message | None, bytes]:
    """Reads a message as `proto.versions.read` does. Raises `RemoteProtocolError`, and `CheckFailed` for a bug."""
    try:
        return read(frames, version)
    except RemoteProtocolError:
        raise
    except Exception as error:
        raise CheckFailed(f"a message of {len(frames)} frames cannot be read") from error


async def greet(socket: LoopSocket, hello: Hello, gone: asyncio.Event, timeout_s: float) -> Message | None:
    """Say Hello and wait for what comes back; None if nothing did before `gone` was set or the time was over. A peer whose
    version does not suit this end counts as having refused. Raises `RemoteProtocolError`."""
    socket.try_send([encode(hello)])
    waiting, leaving = asyncio.ensure_future(socket.receive()), asyncio.ensure_future(gone.wait())
    try:
        await asyncio.wait({waiting, leaving}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        answer = decode(waiting.result())[0] if waiting.done() else None
    finally:
        leaving.cancel()
        waiting.cancel()
    if isinstance(answer, Welcome) and (refusal := version_refusal(answer.version)) is not None:
        socket.try_send([encode(Bye(refusal))])
        return Refused(refusal)
    return answer
