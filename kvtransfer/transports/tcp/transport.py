"""The transport `tcp`: KV over plain sockets between any two hosts, authenticated and, where the two want it, encrypted.

The receiver's process has one listening socket (`listener`). For each pair it makes a token and a key, which reach the
sender over the control link; the sender connects, and both prove that they know the key (`handshake`). Then segments
cross in the order in which they were announced, as records (`segments`, `stream`). The sender streams them as fast as
the connection takes them. The receiver reads a segment once it was announced, straight into the granted blocks where they
lie in one piece of host memory, and else by a buffer.

Only the receiver writes to its blocks. So when its thread has left `work`, nobody does, and `settle` need not wait. A segment
that is not wanted any more is read to its end and thrown away.
"""

import secrets
import select
import socket
import time

from kvtransfer.transports.side_channel import wait_readable
from kvtransfer.transports.tcp.handshake import (
    ANSWER_BYTES,
    KEY_BYTES,
    NONCE_BYTES,
    TOKEN_BYTES,
    HandshakeFailed,
    hello,
    record_key,
    verify_answer,
)
from kvtransfer.transports.tcp.listener import TcpListener
from kvtransfer.transports.tcp.segments import SegmentDigest, SegmentTarget, Source, record_bytes_max, records_of
from kvtransfer.transports.tcp.stream import PairClosing, RecordReader, RecordWriter, TcpConnection
from kvtransfer.transports.transport import (
    Answer,
    Channel,
    Inbox,
    Listener,
    LocalEnd,
    PairBroken,
    Rendezvous,
    SegmentJob,
    Transport,
)

_TRIES_MAX = 8  # of a sender for one pair, where connections are closed without an answer


class _TcpChannel(Channel):
    """Carries out one segment after the other."""

    def __init__(self, local: LocalEnd, connection: TcpConnection) -> None:
        self._connection = connection
        self._sub_block_bytes = local.rows.layout.block_bytes
        self._timeout_s = local.settings.segment_timeout_ms / 1e3

    def work(self, inbox: Inbox, answer: Answer) -> None:
        connection = self._connection
        connection.open(inbox)
        try:
            while True:
                if not connection.jobs:
                    self._idle(connection)
                    continue
                job = connection.jobs.popleft()
                answer(job, self._carry_out(job, time.monotonic() + self._timeout_s))
        except PairClosing:
            return

    def settle(self, inbox: Inbox, answer: Answer) -> None:
        self._connection.close()

    def _idle(self, connection: TcpConnection) -> None:
        raise NotImplementedError

    def _carry_out(self, job: SegmentJob, deadline: float) -> bytes:
        """The segment's digest. Raises `PairBroken` or `PairClosing`."""
        raise NotImplementedError


class Sending(_TcpChannel):
    def __init__(self, local: LocalEnd, connection: TcpConnection, key: bytes | None) -> None:
        super().__init__(local, connection)
        self._digests = local.digests
        self._source = Source(local.rows)
        self._records = RecordWriter(connection, key, record_bytes_max(self._sub_block_bytes))

    def _idle(self, connection: TcpConnection) -> None:
        if connection.wait(select.POLLIN | select.POLLRDHUP, None):  # the receiver says nothing after its answer
            raise PairBroken("the peer is gone: its connection has ended")

    def _carry_out(self, job: SegmentJob, deadline: float) -> bytes:
        assert job.block_ids is not None
        known = bool(job.digest) or self._digests is not None
        digest = SegmentDigest(self._sub_block_bytes)
        for number, record in enumerate(records_of(job.blocks, self._sub_block_bytes)):
            payload = self._source.read(job.block_ids, record)
            if not known:
                digest.add(payload)
            self._records.write(job.sequence, number, payload, deadline)
        if not known:
            return digest.digest()
        return job.digest or (self._digests.digest(job.block_ids) if self._digests is not None else b"")


class TcpReceiving(_TcpChannel):
    def __init__(self, local: LocalEnd, connection: TcpConnection, key: bytes | None) -> None:
        super().__init__(local, connection)
        self._target = SegmentTarget(local.rows)
        self._records = RecordReader(connection, key, record_bytes_max(self._sub_block_bytes))

    def _idle(self, connection: TcpConnection) -> None:
        # Bytes that come before their announcement wait in the kernel.
        if connection.wait(select.POLLRDHUP, None):
            raise PairBroken("the peer is gone: its connection has ended")

    def _carry_out(self, job: SegmentJob, deadline: float) -> bytes:
        digest, wanted = SegmentDigest(self._sub_block_bytes), True
        for number, record in enumerate(records_of(job.blocks, self._sub_block_bytes)):
            block_ids = job.block_ids  # the event loop may set it to None at any time
            wanted = wanted and block_ids is not None
            room = self._target.room(block_ids if wanted else None, record)
            self._records.read(job.sequence, number, room, deadline)
            if wanted and block_ids is not None:
                self._target.filled(block_ids, record)
                digest.add(room)
        return digest.digest() if wanted and job.block_ids is not None else b""


class _TcpListener(Listener):
    def __init__(self, local: LocalEnd, listener: TcpListener) -> None:
        self._local, self._listener = local, listener
        self._expected, port = listener.expect()
        self.meeting = Rendezvous(
            Tcp.name,
            local.listen_host,
            port,
            "",
            token=self._expected.token,
            key=self._expected.key,
            encrypted=local.encrypt,
        )

    def meet(self) -> Channel:
        connected, key = self._listener.accept(self._expected, self._local.settings.rendezvous_timeout_ms / 1e3)
        return TcpReceiving(self._local, TcpConnection(connected), key if self.meeting.encrypted else None)

    def abandon(self) -> None:
        self._expected.abandon()


class Tcp(Transport):
    name = "tcp"
    confidential = True

    def unusable(self, local: LocalEnd, same_host: bool) -> str:
        return ""

    def pair_bytes(self, segment_bytes: int) -> int:
        return 4 << 20

    def listen(self, local: LocalEnd) -> Listener:
        if not isinstance(local.listener, TcpListener):
            raise PairBroken("this process has no address to receive KV on")
        return _TcpListener(local, local.listener)

    def connect(self, local: LocalEnd, meeting: Rendezvous) -> Channel:
        if local.encrypt and not meeting.encrypted:
            raise PairBroken("the receiver would take KV unencrypted, which --transfer-encryption forbids here")
        connected, key = connect_tcp(meeting, meeting.port, local.settings.rendezvous_timeout_ms / 1e3)
        return Sending(local, TcpConnection(connected), key if meeting.encrypted else None)


def connect_tcp(meeting: Rendezvous, port: int, timeout_s: float) -> tuple[socket.socket, bytes]:
    """A connection whose other end has proved the key, and the key of its records. A listener under a flood of strangers may
    drop ours with them; then it is made again. Raises `OSError` or `PairBroken`."""
    if len(meeting.token) != TOKEN_BYTES or len(meeting.key) != KEY_BYTES:
        raise PairBroken("the receiver told no key")
    deadline = time.monotonic() + timeout_s
    for tries_left in reversed(range(_TRIES_MAX)):
        connected = socket.create_connection((meeting.host, port), max(0.001, deadline - time.monotonic()))
        try:
            return connected, _shake_hands(connected, meeting, deadline)
        except ConnectionError:
            connected.close()
            if not tries_left or time.monotonic() >= deadline:
                raise PairBroken("the receiver closed the connection without an answer") from None
        except (OSError, PairBroken):
            connected.close()
            raise
    raise AssertionError("the last try returns or raises")


def _shake_hands(connected: socket.socket, meeting: Rendezvous, deadline: float) -> bytes:
    nonce = secrets.token_bytes(NONCE_BYTES)
    connected.sendall(hello(meeting.token, meeting.key, nonce))
    said = b""
    while len(said) < ANSWER_BYTES:
        wait_readable(connected, deadline, "the receiver did not answer")
        more = connected.recv(ANSWER_BYTES - len(said))
        if not more:
            raise ConnectionError("the connection ended")
        said += more
    try:
        receiver_nonce = verify_answer(said, meeting.token, meeting.key, nonce)
    except HandshakeFailed as error:
        raise PairBroken(str(error)) from None
    return record_key(meeting.key, nonce, receiver_nonce)
