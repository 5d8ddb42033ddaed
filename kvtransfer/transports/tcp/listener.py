"""The one listening socket of a process for `tcp` pairs, and the thread that accepts authenticated senders and closes other
connections.

A connection has to say the hello of a pair that is expected (`handshake`) within `HELLO_TIMEOUT_S`, and is handed to that
pair's thread then. All connections that have not done so are served by one selector, so none of them can hold up another one,
and there are never more than `pending_limit` of them. If there is no room or no descriptor for one more, the oldest is closed:
a sender sends its hello at once, so the oldest connection is the least likely to be a sender.
"""

import errno
import math
import os
import queue
import resource
import secrets
import selectors
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from kvtransfer.transports.tcp.handshake import (
    HELLO_BYTES,
    KEY_BYTES,
    NONCE_BYTES,
    TOKEN_BYTES,
    HandshakeFailed,
    TcpHello,
    answer,
    read_hello,
    record_key,
    verify_hello,
)
from kvtransfer.transports.transport import PairBroken

HELLO_TIMEOUT_S: Final = 2.0
_BACKLOG: Final = 1024
_ACCEPTED_AT_ONCE: Final = 16
_PAUSE_S: Final = 0.1  # without accepting: no descriptor is left, and no stranger to close
_NO_ROOM: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_JOIN_S: Final = 5.0


def pending_limit(descriptors: int, most: int = 64) -> int:
    """How many may wait in a process that may have so many descriptors: never more than an eighth of them."""
    return max(1, min(most, descriptors // 8))


class Expected:
    """A pair whose sender has been told the token and the key."""

    def __init__(self) -> None:
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self.key = secrets.token_bytes(KEY_BYTES)
        self._arrived: queue.SimpleQueue[tuple[socket.socket, TcpHello] | str] = queue.SimpleQueue()

    def wait(self, timeout_s: float) -> tuple[socket.socket, TcpHello]:
        """The sender's connection. Raises `PairBroken`."""
        try:
            arrived = self._arrived.get(timeout=timeout_s)
        except queue.Empty:
            raise PairBroken("the sender did not come in time") from None
        if isinstance(arrived, str):
            raise PairBroken(arrived)
        return arrived

    def deliver(self, connection: socket.socket, hello: TcpHello) -> None:
        self._arrived.put((connection, hello))

    def abandon(self, why: str = "the rendezvous was abandoned") -> None:
        """Make `wait` fail now. From any thread."""
        self._arrived.put(why)

    def close(self) -> None:
        """Close a connection that nobody waits for any more."""
        while not self._arrived.empty():
            arrived = self._arrived.get_nowait()
            if not isinstance(arrived, str):
                arrived[0].close()


class TcpListener:
    """Listens on one address from the first `expect` on. `on_stranger(reason)` is called in the listener's thread for every
    connection that was closed because it did not prove a key."""

    def __init__(self, host: str, on_stranger: Callable[[str], None]) -> None:
        self.host = host
        self._on_stranger = on_stranger
        self._lock = threading.Lock()
        self._expected: dict[bytes, Expected] = {}  # by token; shared with the threads of pairs, under the lock
        self._thread: threading.Thread | None = None
        self._socket: socket.socket | None = None
        self._wake = -1
        self._closed = False
        self._selector: selectors.BaseSelector
        self._pending: OrderedDict[socket.socket, tuple[float, bytearray]] = OrderedDict()
        """Connections that have not said their hello: the time until which they may, and what they have said. In the order of
        their arrival."""
        self._pending_max = pending_limit(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        self._resume_at: float | None = None

    # --- from the threads of pairs ---

    def expect(self) -> tuple[Expected, int]:
        """A new token and key, and the port. Raises `OSError` where it cannot listen."""
        expected = Expected()
        with self._lock:
            if self._closed:
                raise OSError(errno.ESHUTDOWN, "the listener is closed")
            listening = self._socket or self._start()
            self._expected[expected.token] = expected
            port: int = listening.getsockname()[1]
        return expected, port

    def accept(self, expected: Expected, timeout_s: float) -> tuple[socket.socket, bytes]:
        """Wait for the pair's sender. Returns its connection, on which both ends have proved the key, and the key of its
        records. The token is then invalid. Raises `PairBroken` or `OSError`."""
        try:
            connected, said = expected.wait(timeout_s)
        finally:
            self.forget(expected)
        nonce = secrets.token_bytes(NONCE_BYTES)
        try:
            connected.sendall(answer(said, expected.key, nonce))
        except OSError:
            connected.close()
            raise
        return connected, record_key(expected.key, said.nonce, nonce)

    def forget(self, expected: Expected) -> None:
        with self._lock:
            self._expected.pop(expected.token, None)
        expected.close()

    def close(self) -> None:
        """Close the socket and end the thread. Repeating it does no harm."""
        with self._lock:
            self._closed = True
            thread = self._thread
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)
        if thread is not None:
            thread.join(_JOIN_S)

    def _start(self) -> socket.socket:
        family = socket.getaddrinfo(self.host, None, type=socket.SOCK_STREAM)[0][0]
        listening = socket.socket(family, socket.SOCK_STREAM)
        wake = -1
        thread = threading.Thread(target=self._run, args=(listening,), name="kv-tcp-listener", daemon=True)
        try:
            listening.bind((self.host, 0))
            listening.listen(_BACKLOG)
            listening.setblocking(False)
            wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            self._selector = selectors.DefaultSelector()
            self._selector.register(listening, selectors.EVENT_READ)
            self._selector.register(wake, selectors.EVENT_READ)
            self._wake = wake
            thread.start()
        except (OSError, RuntimeError):  # no descriptor or no thread is left
            listening.close()
            if wake >= 0:
                os.close(wake)
            self._wake = -1
            raise
        self._socket, self._thread = listening, thread
        return listening

    # --- in the listener's thread ---

    def _run(self, listening: socket.socket) -> None:
        why = "the listener is closed"
        try:
            while not self._closed:
                self._serve(listening)
        except Exception as error:
            why = f"the listener failed: {error!r}"
            raise
        finally:
            self._end(listening, why)

    def _end(self, listening: socket.socket, why: str) -> None:
        """After a failure the next `expect` begins anew, with another port. Pairs that were waiting can be tried again."""
        with self._lock:
            self._socket = self._thread = self._resume_at = None
            os.close(self._wake)
            self._wake = -1
            for connection in self._pending:
                connection.close()
            self._pending.clear()
            self._selector.close()
            listening.close()
            expected, self._expected = self._expected, {}
        for each in expected.values():
            each.abandon(why)

    def _serve(self, listening: socket.socket) -> None:
        oldest = next(iter(self._pending.values()), (math.inf, None))[0]
        next_at = oldest if self._resume_at is None else min(oldest, self._resume_at)
        ready = self._selector.select(None if next_at == math.inf else max(0.0, next_at - time.monotonic()))
        now = time.monotonic()
        for key, _ in ready:
            connection = key.fileobj
            if connection is listening:
                self._accept(listening, now)
            elif isinstance(connection, socket.socket) and connection in self._pending:
                self._hear(connection)
        for connection in [one for one, (until, _) in self._pending.items() if until <= now]:
            self._turn_away(connection, "it did not say its hello in time")
        if self._resume_at is not None and now >= self._resume_at:
            self._resume_at = None
            self._selector.register(listening, selectors.EVENT_READ)

    def _accept(self, listening: socket.socket, now: float) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                connection, _ = listening.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno not in _NO_ROOM:
                    continue  # this connection ended before it was accepted
                if not self._pending:
                    self._selector.unregister(listening)
                    self._resume_at = now + _PAUSE_S
                    return
                self._turn_away(next(iter(self._pending)), "there was no descriptor left for others")
                continue
            connection.setblocking(False)
            self._selector.register(connection, selectors.EVENT_READ)
            self._pending[connection] = (now + HELLO_TIMEOUT_S, bytearray())
            if len(self._pending) > self._pending_max:
                self._turn_away(next(iter(self._pending)), "too many connections were silent")

    def _hear(self, connection: socket.socket) -> None:
        _, said = self._pending[connection]
        try:
            said += connection.recv(HELLO_BYTES - len(said)) or self._ended()
            if len(said) < HELLO_BYTES:
                return
            hello = read_hello(bytes(said))
            with self._lock:
                expected = self._expected.get(hello.token)
            if expected is None:
                raise HandshakeFailed("no pair is expected by its token")
            verify_hello(hello, expected.key)
        except BlockingIOError:
            return
        except (OSError, HandshakeFailed) as error:
            self._turn_away(connection, str(error))
            return
        self._selector.unregister(connection)
        del self._pending[connection]
        with self._lock:
            if self._expected.pop(hello.token, None) is None:  # given up in this moment
                connection.close()
            else:
                expected.deliver(connection, hello)

    def _ended(self) -> bytes:
        raise HandshakeFailed("it ended before its hello was said")

    def _turn_away(self, connection: socket.socket, reason: str) -> None:
        self._selector.unregister(connection)
        del self._pending[connection]
        connection.close()
        self._on_stranger(reason)
