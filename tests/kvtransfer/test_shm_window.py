"""The receiver of `shm` and its window, against a sender that the test plays."""

import ctypes
import queue
import socket
import threading
from collections.abc import Iterator

import pytest
import torch

from kvtransfer.memory.digests import Digester
from kvtransfer.memory.pool import PoolRows
from kvtransfer.memory.shared import SharedMemory
from kvtransfer.transports.shm import ShmReceives, unpack_places
from kvtransfer.transports.transport import MAX_QUEUED_SEGMENTS, Inbox, LocalEnd, PairBroken, SegmentJob
from kvtransfer.transports.unix_socket import DONE, GRANT, READY, SKIPPED, UnixConnection
from tests.kvtransfer.ends import LAYOUT, SMALL, filled_pool, same_bytes


class OneEnd:
    """The receiver's channel in a thread of its own, and a sender played by the test, who does what it likes."""

    def __init__(self, sub_block_tokens: int = LAYOUT.block_size) -> None:
        one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sender = UnixConnection(other)
        self.pool = filled_pool(LAYOUT, 16, seed=2)
        self.rows = PoolRows(self.pool, LAYOUT, sub_block_tokens)
        self.sub_block_bytes = self.rows.layout.block_bytes
        self.memory = SharedMemory(4 * self.sub_block_bytes)
        self.channel = ShmReceives(LocalEnd(self.rows, 2, SMALL), UnixConnection(one), self.memory)
        self.inbox = Inbox()
        self.answers: queue.SimpleQueue[tuple[SegmentJob, bytes]] = queue.SimpleQueue()
        self.fault = ""
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.channel.work(self.inbox, lambda job, segment_digest: self.answers.put((job, segment_digest)))
        except PairBroken as error:
            self.fault = str(error)
        self.channel.settle(self.inbox, lambda job, segment_digest: None)

    def announce(self, first: int, *segments: tuple[int, ...]) -> list[SegmentJob]:
        """Segments from this sequence on, by their target blocks; all are there before the thread looks."""
        jobs = [SegmentJob("session", at, at, len(blocks), blocks) for at, blocks in enumerate(segments, first)]
        self.inbox.put(*jobs)
        return jobs

    def granted(self) -> tuple[int, list[int | None]]:
        kind, sequence, payload = self.sender.wait(20_000)
        assert kind == GRANT
        return sequence, unpack_places(payload)

    def write(self, place: int, blocks: torch.Tensor) -> None:
        raw = blocks.contiguous().view(torch.uint8).view(-1)
        self.memory.tensor[place * self.sub_block_bytes :][: raw.numel()] = raw

    def close(self) -> None:
        self.inbox.close(None)
        self.thread.join(20)
        assert not self.thread.is_alive()
        self.inbox.release()
        self.sender.close()
        self.memory.close()


@pytest.fixture
def receiving() -> Iterator[OneEnd]:
    one = OneEnd()
    yield one
    one.close()


def test_late_window_writes_change_nothing(receiving, monkeypatch):
    """It rewrites its window at the worst moments: as soon as a piece was copied, and after the digest. What is digested is
    what lies in the pool."""
    kv, other = filled_pool(LAYOUT, 2, seed=5), filled_pool(LAYOUT, 2, seed=6)
    memmove = ctypes.memmove

    def move_and_rewrite(target: int, source: int, size: int) -> None:
        memmove(target, source, size)
        receiving.write(0, other)

    receiving.announce(0, (7, 3))
    assert receiving.granted() == (0, [0])
    receiving.write(0, kv)
    monkeypatch.setattr("kvtransfer.memory.digests.ctypes.memmove", move_and_rewrite)
    receiving.sender.send(DONE, 0)
    _, segment_digest = receiving.answers.get(timeout=20)
    kept = receiving.pool[[7, 3]].clone()
    receiving.write(0, filled_pool(LAYOUT, 2, seed=8))
    assert segment_digest == Digester(PoolRows(receiving.pool, LAYOUT)).digest([7, 3])
    assert same_bytes(receiving.pool[[7, 3]], kept)
    assert same_bytes(kept[0], kv[0]) and not same_bytes(kept[1], kv[1]), "or nothing was rewritten in between"


def test_other_block_sizes_ignore_late_writes(monkeypatch):
    """There copy and digest are not made piece by piece, so what both are made of is a copy of its own."""
    spread, one = PoolRows.spread, OneEnd(sub_block_tokens=LAYOUT.block_size // 2)

    def spread_and_rewrite(rows: PoolRows, block_ids: list[int], packed: torch.Tensor) -> None:
        spread(rows, block_ids, packed)
        one.memory.tensor.fill_(0x5A)

    monkeypatch.setattr(PoolRows, "spread", spread_and_rewrite)
    try:
        one.announce(0, (5, 8))
        assert one.granted() == (0, [0])
        one.write(0, filled_pool(LAYOUT, 1, seed=5))
        one.sender.send(DONE, 0)
        _, segment_digest = one.answers.get(timeout=20)
        assert segment_digest == Digester(one.rows).digest([5, 8])
    finally:
        one.close()


def test_abandoned_place_is_reused_later(receiving):
    """A segment given up is answered at once, and its place is used again when the sender is done."""
    jobs = receiving.announce(0, (1, 2), (3, 4), (5, 6))
    assert receiving.granted() == (0, [0, 2])
    before = receiving.pool.clone()
    for job in jobs:
        job.block_ids = None
        receiving.channel.revoke(job)
    assert {id(receiving.answers.get(timeout=20)[0]) for _ in jobs} == {id(job) for job in jobs}
    receiving.announce(3, (9, 10))
    receiving.write(0, filled_pool(LAYOUT, 4, seed=5))
    assert receiving.granted() == (2, [None])
    assert receiving.sender.send(DONE, 0)
    assert receiving.granted() == (3, [0])
    for kind, sequence in ((DONE, 1), (SKIPPED, 2), (DONE, 3)):
        assert receiving.sender.send(kind, sequence)
    job, segment_digest = receiving.answers.get(timeout=20)
    assert job.sequence == 3 and segment_digest
    changed = [block for block in range(16) if not same_bytes(receiving.pool[block], before[block])]
    assert changed == [9, 10]


def test_grants_fit_the_window(receiving):
    """No more segments are granted than the window has room for."""
    receiving.announce(0, (0, 1), (2, 3), (4, 5), (6, 7), (8, 9))
    assert receiving.granted() == (0, [0, 2])
    for sequence, place in enumerate((0, 2, 0)):
        receiving.sender.send(DONE, sequence)
        assert receiving.granted() == (sequence + 2, [place])


@pytest.mark.parametrize("word", [(DONE, 1), (SKIPPED, 0), (READY, 0), (GRANT, 0), (77, 0)])
def test_protocol_violation_breaks_pair(word, receiving):
    """A receiver leaves a sender that says something out of order or of an unknown kind."""
    receiving.announce(0, (1,))
    receiving.granted()
    receiving.sender.send(*word)
    receiving.thread.join(20)
    assert "the sender broke the protocol" in receiving.fault


def test_excess_announcements_break_the_pair(receiving):
    """Also where most were given up: a sender that never answers must not fill our memory."""
    for first in range(0, 2 * MAX_QUEUED_SEGMENTS, 64):
        jobs = receiving.announce(first, *[(1,)] * 64)
        for job in jobs:
            job.block_ids = None
        receiving.channel.revoke(jobs[0])
    receiving.thread.join(20)
    assert "announced at once" in receiving.fault
