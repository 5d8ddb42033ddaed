"""Records on a connected `tcp` pair: a fixed header, the payload, and with encryption a tag.

    header (16 bytes)   sequence of the segment, place of the record in it, length of the payload
    payload             in the clear, or encrypted with AES-256-GCM
    tag (16 bytes)      only with encryption; covers the header too

A nonce is the number of the record on this connection, which both ends count; its key is used for one connection and one
direction. The receiver knows what header comes next, so one that differs ends the connection before anything is read for it:
no length is ever taken from the wire. Calls wait on the connection and on the pair's inbox together.
"""

import select
import socket
import struct
import time
from collections import deque
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from kvtransfer.transports.transport import Inbox, PairBroken, SegmentJob

_HEADER = struct.Struct("<IIQ")
_NONCE = struct.Struct("<4xQ")
HEADER_BYTES: Final = _HEADER.size
TAG_BYTES: Final = 16
_WOKEN_AT_BYTES: Final = 256 << 10  # that wake a waiting reader: a wake-up for each packet costs more than copying


class PairClosing(Exception):
    """The inbox was closed: what is under way is given up."""


class TcpConnection:
    """A non-blocking socket of a pair that waits together with its inbox. Bytes that come into the inbox are kept in `jobs`."""

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(False)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connected
        self._low_water = 1
        self.jobs: deque[SegmentJob] = deque()
        self._poll = select.poll()
        self._poll.register(connected, select.POLLRDHUP)

    def open(self, inbox: Inbox) -> None:
        self._inbox = inbox
        self._poll.register(inbox, select.POLLIN)

    def wait(self, events: int, deadline: float | None) -> int:
        """The connection's events, when there are any, or 0 when something came into the inbox. Raises `PairBroken` at the
        deadline and `PairClosing` when the inbox is closed."""
        self._poll.modify(self.socket, events)
        ready = dict(self._poll.poll(None if deadline is None else max(0.0, deadline - time.monotonic()) * 1e3))
        self.jobs += self._inbox.take()
        if self._inbox.closed:
            raise PairClosing
        if not ready:
            raise PairBroken("the peer moved nothing in time")
        return ready.get(self.socket.fileno(), 0)

    def wait_readable(self, wanted: int, deadline: float) -> None:
        """Wait until `wanted` bytes can be read, or so many of them that reading is worth a wake-up, or the peer has ended."""
        low_water = min(wanted, _WOKEN_AT_BYTES)
        if low_water != self._low_water:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, low_water)
            self._low_water = low_water
        self.wait(select.POLLIN, deadline)

    def close(self) -> None:
        self.socket.close()


class RecordWriter:
    def __init__(self, connection: TcpConnection, key: bytes | None, record_bytes_max: int) -> None:
        """Records are sent in the clear without a key."""
        self._connection = connection
        self._cipher = None if key is None else AESGCM(key)
        self._sent = 0
        room = 0 if key is None else HEADER_BYTES + record_bytes_max + TAG_BYTES
        self._buffer = memoryview(bytearray(room))

    def write(self, sequence: int, number: int, payload: memoryview, deadline: float) -> None:
        """Returns when all of it is in the kernel. Raises `PairBroken` or `PairClosing`."""
        header = _HEADER.pack(sequence, number, len(payload))
        if self._cipher is None:
            self._write([memoryview(header), payload], deadline)
            return
        size = HEADER_BYTES + len(payload) + TAG_BYTES
        self._buffer[:HEADER_BYTES] = header
        self._cipher.encrypt_into(_NONCE.pack(self._sent), payload, header, self._buffer[HEADER_BYTES:size])
        self._sent += 1
        self._write([self._buffer[:size]], deadline)

    def _write(self, parts: list[memoryview], deadline: float) -> None:
        while parts:
            try:
                sent = self._connection.socket.sendmsg(parts)
            except BlockingIOError:
                self._connection.wait(select.POLLOUT, deadline)
                continue
            except OSError as error:
                raise PairBroken(f"the peer is gone: {error.strerror}") from None
            while parts and sent >= len(parts[0]):
                sent -= len(parts.pop(0))
            if sent:
                parts[0] = parts[0][sent:]


class RecordReader:
    def __init__(self, connection: TcpConnection, key: bytes | None, record_bytes_max: int) -> None:
        self._connection = connection
        self._cipher = None if key is None else AESGCM(key)
        self._received = 0
        self._header = memoryview(bytearray(HEADER_BYTES))
        self._buffer = memoryview(bytearray(0 if key is None else record_bytes_max + TAG_BYTES))

    def read(self, sequence: int, number: int, target: memoryview, deadline: float) -> None:
        """Fill `target` with the payload of this record, which has exactly its length. Raises `PairBroken` or `PairClosing`;
        what is in `target` then means nothing."""
        rest = len(target) + (0 if self._cipher is None else TAG_BYTES)
        self._read(self._header, rest, deadline)
        if _HEADER.unpack(self._header) != (sequence, number, len(target)):
            raise PairBroken("the sender broke the protocol: another record was to come")
        if self._cipher is None:
            self._read(target, 0, deadline)
            return
        sealed = self._buffer[:rest]
        self._read(sealed, 0, deadline)
        try:
            self._cipher.decrypt_into(_NONCE.pack(self._received), sealed, self._header, target)
        except InvalidTag:
            raise PairBroken("a record was changed on its way") from None
        self._received += 1

    def _read(self, target: memoryview, more: int, deadline: float) -> None:
        """Fill it; `more` bytes are to come behind it."""
        read = 0
        while read < len(target):
            try:
                got = self._connection.socket.recv_into(target[read:])
            except BlockingIOError:
                self._connection.wait_readable(len(target) - read + more, deadline)
                continue
            except OSError as error:
                raise PairBroken(f"the peer is gone: {error.strerror}") from None
            if not got:
                raise PairBroken("the peer is gone: its connection has ended")
            read += got
