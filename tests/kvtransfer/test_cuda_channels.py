"""Both ends of a `cuda_ipc` pair over pools in host memory: their copies and checksums run on any device."""

import fcntl
import os
import queue
import socket
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from kvtransfer.memory.pool import PoolRows
from kvtransfer.memory.shared import SEALS
from kvtransfer.session.limits import KvSettings
from kvtransfer.transports.cuda_ipc import CancelFlags, CudaReceiver, CudaWriter
from kvtransfer.transports.transport import UNWANTED, Channel, Inbox, LocalEnd, PairBroken, SegmentJob
from kvtransfer.transports.unix_socket import DONE, SKIPPED, UnixConnection
from tests.kvtransfer.ends import LAYOUT, WAIT_S, filled_pool, same_bytes


class RunningEnd:
    """A channel in a thread of its own."""

    def __init__(self, channel: Channel) -> None:
        self.inbox, self.fault = Inbox(), ""
        self.answers: queue.SimpleQueue[tuple[int, bytes]] = queue.SimpleQueue()
        self._channel = channel
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        def answer(job: SegmentJob, segment_digest: bytes) -> None:
            self.answers.put((job.sequence, segment_digest))

        try:
            self._channel.work(self.inbox, answer)
        except PairBroken as error:
            self.fault = str(error)
        self._channel.settle(self.inbox, answer)

    def answer(self) -> tuple[int, bytes]:
        return self.answers.get(timeout=WAIT_S)

    def close(self, settle_limit_ms: int | None = None) -> None:
        self.inbox.close(settle_limit_ms)
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()


class PairOfEnds:
    def __init__(self, *, with_sender: bool = True) -> None:
        settings = KvSettings(segment_timeout_ms=20_000)
        self.source, self.target = filled_pool(LAYOUT, 16, 1), filled_pool(LAYOUT, 16, 2)
        sources, targets = PoolRows(self.source, LAYOUT), PoolRows(self.target, LAYOUT)
        board = os.memfd_create("board", os.MFD_ALLOW_SEALING)
        os.ftruncate(board, CancelFlags.SIZE)
        fcntl.fcntl(board, fcntl.F_ADD_SEALS, SEALS)
        self.board = CancelFlags(board)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        lifeline, self.their_lifeline = os.pipe()
        receiver = CudaReceiver(LocalEnd(targets, 4, settings), UnixConnection(ours), self.board, lifeline, -1)
        self.receiver = RunningEnd(receiver)
        self.connection = UnixConnection(theirs)
        if with_sender:
            mapping: Any = SimpleNamespace(close=lambda: None)
            told: Any = SimpleNamespace(digest_every=1, board=CancelFlags(board))
            writer = CudaWriter(
                LocalEnd(sources, 4, settings), self.connection, mapping, targets, told, self.their_lifeline
            )
            self.sender = RunningEnd(writer)
        os.close(board)


def test_segments_cross_to_their_blocks() -> None:
    """Wanted segments land in their blocks with one digest at both ends, and an unwanted one leaves the pool as it is."""
    ends = PairOfEnds()
    before = ends.target.clone()
    ends.receiver.inbox.put(
        SegmentJob(None, 0, 0, 2, (3, 4)), SegmentJob(None, 1, 1, 3, None), SegmentJob(None, 2, 2, 3, (9, 7, 5))
    )
    ends.sender.inbox.put(
        SegmentJob(None, 0, 0, 2, (0, 1)), SegmentJob(None, 1, 1, 3, (2, 3, 4)), SegmentJob(None, 2, 2, 3, (5, 8, 6))
    )
    sent = [ends.sender.answer() for _ in range(3)]
    received = [ends.receiver.answer() for _ in range(3)]
    assert sent[1] == (1, UNWANTED) and received[1] == (1, b"")
    assert sent[::2] == received[::2] and all(digest for _, digest in sent)
    for at, block in {3: 0, 4: 1, 9: 5, 7: 8, 5: 6}.items():
        assert same_bytes(ends.target[at], ends.source[block])
        before[at] = ends.source[block]
    assert same_bytes(ends.target, before)
    ends.sender.close()
    ends.receiver.close()
    assert not ends.receiver.fault or "gone" in ends.receiver.fault


def test_settling_waits_for_the_sender() -> None:
    """A receiver that ends answers a granted segment only when its sender says that it is done with it."""
    ends = PairOfEnds(with_sender=False)
    job = SegmentJob(None, 0, 0, 2, (3, 4))
    ends.receiver.inbox.put(job)
    deadline = time.monotonic() + WAIT_S
    while ends.connection.receive() is None:
        assert time.monotonic() < deadline
    ends.receiver.inbox.close(None)
    with pytest.raises(queue.Empty):
        ends.receiver.answers.get(timeout=0.2)
    assert job.block_ids is None and ends.board.is_revoked(0), "the sender can see that it is not wanted"
    assert ends.connection.send(SKIPPED, 0)
    assert ends.receiver.answer() == (0, b"")
    ends.receiver.close()
    os.close(ends.their_lifeline)


@pytest.mark.parametrize(("kind", "sequence"), [(SKIPPED, 0), (DONE, 1), (77, 0)])
def test_wrong_word_breaks_the_pair(kind: int, sequence: int) -> None:
    """A sender that skips a wanted segment, or speaks of another one, breaks the pair."""
    ends = PairOfEnds(with_sender=False)
    ends.receiver.inbox.put(SegmentJob(None, 0, 0, 2, (3, 4)))
    deadline = time.monotonic() + WAIT_S
    while ends.connection.receive() is None:
        assert time.monotonic() < deadline
    assert ends.connection.send(kind, sequence)
    while not ends.receiver.fault:
        assert time.monotonic() < deadline
    assert "sender" in ends.receiver.fault
    ends.receiver.close(100)
    os.close(ends.their_lifeline)
