"""Records of `tcp`: what was not agreed on, is cut short, changed or said twice ends the pair."""

import os
import socket
import struct
from dataclasses import replace

import pytest

from kvtransfer.memory.pool import PoolRows
from kvtransfer.transports.tcp.stream import HEADER_BYTES, RecordWriter, TcpConnection
from kvtransfer.transports.tcp.transport import TcpReceiving
from kvtransfer.transports.transport import Inbox, LocalEnd, PairBroken, SegmentJob
from tests.kvtransfer.ends import LAYOUT, SMALL, WAIT_S, filled_pool, same_bytes

RECORD_KEY = bytes(range(32))


def connected_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        one = socket.create_connection(listening.getsockname())
        return one, listening.accept()[0]


class Played:
    """A receiving channel, and the other end of its connection, by which a test plays the sender."""

    def __init__(self, key: bytes | None) -> None:
        self.pool = filled_pool(LAYOUT, 8, 2)
        self.before = self.pool.clone()
        ours, self.theirs = connected_pair()
        self.theirs.settimeout(WAIT_S)
        local = LocalEnd(PoolRows(self.pool, LAYOUT), 3, replace(SMALL, segment_timeout_ms=300))
        self.channel = TcpReceiving(local, TcpConnection(ours), key)
        self.inbox = Inbox()
        self.inbox.put(SegmentJob(None, 0, 0, 3, (2, 3, 4)))
        self.answers: list[bytes] = []

    def write(self, key: bytes | None, payload: bytes, sequence: int = 0, number: int = 0) -> None:
        connection = TcpConnection(self.theirs)
        connection.open(self.inbox)
        writer = RecordWriter(connection, key, max(len(payload), 1))
        writer.write(sequence, number, memoryview(payload), float("inf"))

    def breaks(self, why: str) -> None:
        """It ends with this, and nothing but the granted blocks has changed."""
        with pytest.raises(PairBroken, match=why):
            self.channel.work(self.inbox, lambda job, digest: self.answers.append(digest))
        self.channel.settle(self.inbox, lambda job, digest: None)
        self.theirs.close()
        assert not self.answers
        assert same_bytes(self.pool[[0, 1, 5, 6, 7]], self.before[[0, 1, 5, 6, 7]])


GOOD = os.urandom(3 * LAYOUT.block_bytes)


@pytest.mark.parametrize("key", [None, RECORD_KEY], ids=["plain", "encrypted"])
@pytest.mark.parametrize(
    ("header", "why"),
    [
        (struct.pack("<IIQ", 0, 0, 1 << 60), "another record"),
        (struct.pack("<IIQ", 0, 0, len(GOOD) + 1), "another record"),
        (struct.pack("<IIQ", 0, 0, len(GOOD) - 1), "another record"),
        (struct.pack("<IIQ", 0, 0, 0), "another record"),
        (struct.pack("<IIQ", 1, 0, len(GOOD)), "another record"),
        (struct.pack("<IIQ", 0, 1, len(GOOD)), "another record"),
        (b"\xff" * 16, "another record"),
        (b"\0" * 5, "ended"),
    ],
)
def test_unexpected_record_ends_connection(key: bytes | None, header: bytes, why: str) -> None:
    """A record with an unexpected header ends its connection and changes granted blocks at most."""
    played = Played(key)
    played.theirs.sendall(header + os.urandom(4 * LAYOUT.block_bytes) * (len(header) == HEADER_BYTES))
    if len(header) < HEADER_BYTES:
        played.theirs.shutdown(socket.SHUT_WR)
    played.breaks(why)


@pytest.mark.parametrize("key", [None, RECORD_KEY], ids=["plain", "encrypted"])
def test_truncated_record_ends_the_pair(key: bytes | None) -> None:
    """A record that ends early ends the pair."""
    played = Played(key)
    played.theirs.sendall(struct.pack("<IIQ", 0, 0, len(GOOD)) + b"x" * 100)
    played.theirs.shutdown(socket.SHUT_WR)
    played.breaks("ended")


@pytest.mark.parametrize("key", [None, RECORD_KEY], ids=["plain", "encrypted"])
def test_stalled_record_times_out(key: bytes | None) -> None:
    """A record that stops arriving ends the pair in time."""
    played = Played(key)
    played.theirs.sendall(struct.pack("<IIQ", 0, 0, len(GOOD)) + b"x" * 100)
    played.breaks("in time")


def test_wrong_key_records_are_refused() -> None:
    """Records with another key or in the clear are refused where a key was agreed on."""
    played = Played(RECORD_KEY)
    played.write(b"another" + bytes(25), GOOD)
    played.breaks("changed on its way")
    played = Played(RECORD_KEY)
    played.theirs.sendall(struct.pack("<IIQ", 0, 0, len(GOOD)) + GOOD + b"\0" * 16)
    played.breaks("changed on its way")


def test_repeated_record_is_refused() -> None:
    """The same bytes again are another record by their count."""
    played = Played(RECORD_KEY)
    played.inbox.put(SegmentJob(None, 1, 0, 3, (2, 3, 4)))
    kept: list[bytes] = []
    one, other = connected_pair()
    connection = TcpConnection(one)
    connection.open(played.inbox)
    RecordWriter(connection, RECORD_KEY, len(GOOD)).write(0, 0, memoryview(GOOD), float("inf"))
    one.close()
    while more := other.recv(1 << 16):
        kept.append(more)
    other.close()
    played.theirs.sendall(b"".join(kept) * 2)
    with pytest.raises(PairBroken, match="changed on its way"):
        played.channel.work(played.inbox, lambda job, digest: played.answers.append(digest))
    assert len(played.answers) == 1
    played.theirs.close()
