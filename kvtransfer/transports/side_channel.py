"""A TCP connection beside a pair's data plane: short words about segments, and the proof that the other process lives.

It is made during the rendezvous, at the port and with the handshake of `tcp`. When a process ends, for whatever reason, its
kernel closes the connection, and the other end reads that at once; a host that is lost is noticed by deadlines alone.

A word is eight bytes: what it is, and the sequence of the segment (or another number) it is about.
"""

import select
import socket
import struct
import time

from kvtransfer.transports.transport import PairBroken

_WORD = struct.Struct("<II")


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


def wait_readable(waiting: socket.socket, deadline: float, fault: str) -> None:
    """Raises `PairBroken` with `fault` where nothing has come by then."""
    poll = select.poll()
    poll.register(waiting, select.POLLIN)
    if not poll.poll(max(0.0, deadline - time.monotonic()) * 1e3):
        raise PairBroken(f"{fault} in time")
