"""A TCP connection beside a pair's data plane: short words about segments, and the proof that the other process lives.

It is made during the rendezvous. The receiver listens on its fabric address, for one connection that knows a secret told
through the store of the rendezvous. When a process ends, for whatever reason, its kernel closes the connection, and the
other end reads that at once; a host that is lost is noticed by deadlines alone.

A word is eight bytes: what it is, and the sequence of the segment (or another number) it is about.
"""

import hmac
import secrets
import select
import socket
import struct
import time
from dataclasses import dataclass, field

from kvtransfer.transports.transport import PairBroken

_WORD = struct.Struct("<II")
_SECRET_BYTES = 32
_GREETING_S = 1.0  # a connection that does not say the secret in this time is not the one
_GREETING_MAX = 16  # heard at once; one more closes the first: a sender speaks as soon as it is there


class Line:
    """Raises `PairBroken` when the other end is gone; `ended` is then True."""

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(False)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.ended = False
        self._socket = connected
        self._read = b""

    def fileno(self) -> int:
        return self._socket.fileno()

    def say(self, kind: int, number: int) -> None:
        """Never waits: few words are under way at once, and a buffer that is full of them means a peer that does not read."""
        word = _WORD.pack(kind, number)
        try:
            if self._socket.send(word) != len(word):
                raise PairBroken("the peer does not read what it is told")
        except BlockingIOError:
            raise PairBroken("the peer does not read what it is told") from None
        except OSError as error:
            raise PairBroken(f"the peer is gone: {error.strerror}") from None

    def hear(self) -> tuple[int, int] | None:
        """(kind, number) of the next word; None if there is none now."""
        if len(self._read) < _WORD.size:
            try:
                read = self._socket.recv(4096)
            except BlockingIOError:
                return None
            except OSError:
                read = b""
            if not read:
                self.ended = True
                raise PairBroken("the peer is gone: its connection has ended")
            self._read += read
            if len(self._read) < _WORD.size:
                return None
        word, self._read = self._read[: _WORD.size], self._read[_WORD.size :]
        kind, number = _WORD.unpack(word)
        return kind, number

    def await_word(self, kind: int, timeout_s: float) -> int:
        """The number of the next word, which must be of this kind."""
        deadline = time.monotonic() + timeout_s
        while (word := self.hear()) is None:
            wait_readable(self._socket, deadline, "the peer said nothing")
        if word[0] != kind:
            raise PairBroken(f"the peer broke the protocol: word {word[0]} in place of {kind}")
        return word[1]

    def close(self) -> None:
        self._socket.close()


@dataclass(slots=True)
class _Greeting:
    """A connection that has yet to say the secret, and until when it may."""

    connected: socket.socket
    until: float
    said: bytearray = field(default_factory=bytearray)

    def is_over(self) -> bool:
        """Read what has come; whether that is as long as the secret, or all there will be."""
        try:
            read = self.connected.recv(_SECRET_BYTES - len(self.said))
        except BlockingIOError:
            return False
        except OSError:
            return True
        self.said += read
        return not read or len(self.said) == _SECRET_BYTES


def _close_late(greeting: dict[int, _Greeting], poll: select.poll, now: float) -> None:
    for descriptor in [each for each, one in greeting.items() if one.until <= now]:
        poll.unregister(descriptor)
        greeting.pop(descriptor).connected.close()


class RendezvousListener:
    """The receiver's end before the sender is there."""

    def __init__(self, host: str) -> None:
        self.secret = secrets.token_hex(_SECRET_BYTES // 2)
        family = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._socket.bind((host, 0))
            self._socket.listen(2 * _GREETING_MAX)
        except OSError:
            self._socket.close()
            raise
        self._socket.setblocking(False)
        self.port: int = self._socket.getsockname()[1]

    def accept(self, timeout_s: float) -> Line:
        """Returns the first connection that sends the secret. All connections are read concurrently, so silent ones cause no
        delay. Closes the listening socket. Raises `PairBroken` or `OSError`."""
        deadline = time.monotonic() + timeout_s
        greeting: dict[int, _Greeting] = {}  # by descriptor, the first to come first
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        try:
            while (now := time.monotonic()) < deadline:
                _close_late(greeting, poll, now)
                until = min([deadline, *(one.until for one in greeting.values())])
                for descriptor, _ in poll.poll(max(0.0, until - now) * 1e3):
                    if descriptor == self._socket.fileno():
                        self._let_in(greeting, poll)
                    elif descriptor in greeting and greeting[descriptor].is_over():
                        poll.unregister(descriptor)
                        one = greeting.pop(descriptor)
                        if hmac.compare_digest(bytes(one.said), self.secret.encode()):
                            return Line(one.connected)
                        one.connected.close()
            raise PairBroken("the sender did not come in time")
        finally:
            for one in greeting.values():
                one.connected.close()
            self.close()

    def _let_in(self, greeting: "dict[int, _Greeting]", poll: select.poll) -> None:
        try:
            connected, _ = self._socket.accept()
        except (BlockingIOError, ConnectionError):
            return  # it has left already
        if len(greeting) >= _GREETING_MAX:
            oldest = next(iter(greeting))
            poll.unregister(oldest)
            greeting.pop(oldest).connected.close()
        connected.setblocking(False)
        greeting[connected.fileno()] = _Greeting(connected, time.monotonic() + _GREETING_S)
        poll.register(connected, select.POLLIN)

    def close(self) -> None:
        self._socket.close()


def call(host: str, port: int, secret: str, timeout_s: float) -> Line:
    """Connect to a `RendezvousListener` and send the secret. Raises `OSError`."""
    connected = socket.create_connection((host, port), timeout_s)
    try:
        connected.sendall(secret.encode())
    except OSError:
        connected.close()
        raise
    return Line(connected)


def wait_readable(waiting: socket.socket, deadline: float, fault: str) -> None:
    """Raises `PairBroken` with `fault` where nothing has come by then."""
    poll = select.poll()
    poll.register(waiting, select.POLLIN)
    if not poll.poll(max(0.0, deadline - time.monotonic()) * 1e3):
        raise PairBroken(f"{fault} in time")
