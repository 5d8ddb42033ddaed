"""The transport `shm`: the sender copies once, straight into the receiver's blocks. For two processes of one host and user.

The receiver's pool lies in an anonymous file that the sender maps. Segments cross in four moves: the announcement (control
link), the receiver's grant of target blocks, the sender's copy, and its word that it is done; then the receiver digests the
blocks where they lie. Messages and proof of life are in `shm_socket`.

What a stale write could do is prevented by order, not by trust in time: granted blocks are nobody else's until the sender
says DONE or SKIPPED or its lifeline has ended. A receiver that no longer wants a segment writes its sequence to the *board*,
a page shared by the two; the sender looks there before each piece and skips the rest. That makes the answer come sooner, but
only the answer counts.
"""

import os
import select
import struct
import time
from collections import deque
from itertools import islice

import torch

from kvtransfer.copying import Copier
from kvtransfer.device_copy import DeviceCopier, DeviceDigester
from kvtransfer.digests import Digester
from kvtransfer.layout import blocks_of
from kvtransfer.memory import Pages, SharedMemory, map_shared
from kvtransfer.pool import PoolRows
from kvtransfer.settings import WINDOW_SEGMENTS_MAX
from kvtransfer.shm_meeting import Board, cannot_grant, check_fit, check_sealed, ready, send_hello
from kvtransfer.shm_socket import (
    DESCRIPTORS,
    DONE,
    GRANT,
    GRANT_BLOCKS_MAX,
    READY,
    SKIPPED,
    WRITTEN,
    Connection,
    Door,
    knock,
    pack_grants,
    receive_with_descriptors,
    unpack_grants,
)
from kvtransfer.transport import (
    Answer,
    Channel,
    Inbox,
    Listener,
    Local,
    Meeting,
    PairBroken,
    SegmentJob,
    Transport,
)

_HELLO = struct.Struct("<8sQQQQ")
"""Magic, bytes of the pool's memory, blocks in it, cells in a block, bytes of a cell."""
_MAGIC = b"cdkvshm2"
PART_BYTES = 16 << 20
"""Of a segment, digested by the receiver while the sender writes on; far longer than a word to a thread that sleeps."""
UNWANTED = b"\0" * 8
"""The sender's digest of a segment that the receiver did not want: its session there is over."""


class Writes(Channel):
    """The sender's end: writes to the blocks that it is granted."""

    def __init__(
        self,
        local: Local,
        connection: Connection,
        copier: Copier | DeviceCopier,
        target_cells: int,
        board: Board,
        lifeline: int,
    ) -> None:
        self._connection = connection
        self._lifeline = lifeline
        self._timeout_s = local.settings.segment_timeout_ms / 1e3
        self._copier: Copier | DeviceCopier | None = copier
        self._target_cells = target_cells
        self._part_blocks = max(1, PART_BYTES // local.rows.layout.block_bytes)
        self._board: Board | None = board

    def work(self, inbox: Inbox, answer: Answer) -> None:
        jobs: deque[SegmentJob] = deque()
        grants: deque[tuple[int, list[int]]] = deque()
        poll = select.poll()
        poll.register(inbox, select.POLLIN)
        poll.register(self._connection, select.POLLIN)
        waiting_since = 0.0
        while not inbox.closed:
            left_s = waiting_since + self._timeout_s - time.monotonic()
            if not poll.poll(max(0.0, left_s) * 1e3 if jobs else None):
                raise PairBroken(f"the receiver granted no blocks in {self._timeout_s:g} s")
            if not jobs:
                waiting_since = time.monotonic()
            jobs += inbox.take()
            self._hear(grants)
            while jobs and grants and not inbox.closed:
                job, grant = jobs.popleft(), grants.popleft()
                if not (jobs and grants):
                    # Now, so that nothing is waited for when the loop has been woken: it is to work while the next is copied.
                    jobs += inbox.take()
                    self._hear(grants)
                segment_digest = self._carry_out(job, *grant, inbox)
                if segment_digest:
                    answer(job, segment_digest)
                waiting_since = time.monotonic()

    def settle(self, inbox: Inbox, answer: Answer) -> None:
        # Unmapped first: the end of the lifeline says that nothing is written any more.
        self._copier = self._board = None
        os.close(self._lifeline)
        self._connection.close()

    def _hear(self, grants: deque[tuple[int, list[int]]]) -> None:
        """Add what was granted since: sequences, and the blocks of each."""
        while (message := self._connection.receive()) is not None:
            kind, sequence, payload = message
            if kind != GRANT:
                raise PairBroken(f"the receiver broke the protocol: message {kind} of {len(payload)} bytes")
            grants += enumerate(unpack_grants(payload, self._target_cells), sequence)
            if len(grants) > WINDOW_SEGMENTS_MAX:
                raise PairBroken(
                    f"the receiver broke the protocol: it granted blocks for {len(grants)} segments at once"
                )

    def _carry_out(self, job: SegmentJob, sequence: int, target_ids: list[int], inbox: Inbox) -> bytes:
        """The digest; `UNWANTED` if the receiver does not want it; empty if this pair is being closed."""
        assert job.block_ids is not None and self._copier is not None and self._board is not None
        if sequence != job.sequence or len(target_ids) not in (0, job.blocks):
            raise PairBroken(
                f"the receiver granted {len(target_ids)} blocks for segment {sequence}, which is segment {job.sequence}"
                f" of {job.blocks}"
            )
        board, told = self._board, 0

        def go_on(written: int) -> bool:
            nonlocal told
            if written >= told + self._part_blocks:
                # Only to have it digested early: where there is no room for the message now, DONE will do.
                self._connection.send(WRITTEN, sequence, written.to_bytes(4, "little"))
                told = written
            return not inbox.closed and not board.is_revoked(sequence)

        segment_digest = self._copier.copy(job.block_ids, target_ids, go_on, job.digest) if target_ids else b""
        if inbox.closed:
            return b""
        if not self._connection.send(DONE if segment_digest else SKIPPED, sequence):
            raise PairBroken("the receiver does not read what it is told")
        return segment_digest or UNWANTED


class Grants(Channel):
    """The receiver's end: grants target blocks, and digests them when they are written."""

    def __init__(
        self, local: Local, connection: Connection, digester: Digester | DeviceDigester, board: Board, lifeline: int
    ) -> None:
        self._connection = connection
        self._lifeline = lifeline
        self._timeout_s = local.settings.segment_timeout_ms / 1e3
        self._rows = local.rows
        self._memory = local.memory
        self._digester = digester
        self._board = board
        self._outbox: deque[SegmentJob] = deque()
        """Not granted yet."""
        self._granted: deque[tuple[SegmentJob, bool]] = deque()
        """In order; whether any blocks were granted, or it was called unwanted."""
        self._begun: list[bytes] = []
        """Digests of the first blocks of the first of them."""

    def work(self, inbox: Inbox, answer: Answer) -> None:
        poll = select.poll()
        poll.register(inbox, select.POLLIN)
        poll.register(self._connection, select.POLLIN)
        heard_at = 0.0
        while not inbox.closed:
            left_s = heard_at + self._timeout_s - time.monotonic()
            if not poll.poll(max(0.0, left_s) * 1e3 if self._granted or self._outbox else None):
                raise PairBroken(f"the sender moved nothing in {self._timeout_s:g} s")
            if not self._granted:
                heard_at = time.monotonic()
            self._outbox += inbox.take()
            self._grant()
            while not inbox.closed and self._hear(answer):
                heard_at = time.monotonic()
                self._outbox += inbox.take()
                self._grant()
            poll.modify(self._connection, select.POLLIN | (0 if self._grant() else select.POLLOUT))

    def settle(self, inbox: Inbox, answer: Answer) -> None:
        for job, _ in self._granted:
            job.block_ids = None
            self._board.revoke(job.sequence)
        self._connection.hang_up()
        poll = select.poll()
        for source in (inbox, self._connection, self._lifeline):
            poll.register(source, select.POLLIN)
        while self._granted:
            ready = dict(poll.poll(inbox.settle_limit_ms))
            inbox.take()
            try:
                if self._connection.fileno() in ready:
                    self._hear(answer)
                elif not ready or self._lifeline in ready:
                    break
            except PairBroken:
                # Whatever it says now, or if it says nothing any more, it may still write: only its lifeline counts.
                poll.unregister(self._connection)
        os.close(self._lifeline)
        self._connection.close()

    def revoke(self, job: SegmentJob) -> None:
        self._board.revoke(job.sequence)

    def _grant(self) -> bool:
        """Name the target blocks of the next segments, by the handful, but of no more than a window: a sender is done with a
        segment before we have digested it, and would announce more and more. False if the connection has no room now."""
        while self._outbox and len(self._granted) < WINDOW_SEGMENTS_MAX:
            targets: list[tuple[int, ...]] = []
            blocks = 0
            for job in islice(self._outbox, WINDOW_SEGMENTS_MAX - len(self._granted)):
                blocks += job.blocks
                if blocks > GRANT_BLOCKS_MAX:
                    break
                targets.append(job.block_ids or ())
            if isinstance(self._memory, SharedMemory):
                ratio = self._rows.ratio
                for block_ids in targets:
                    self._memory.provide(blocks_of(block_ids, ratio), self._rows.layout.block_bytes * ratio)
            if not self._connection.send(GRANT, self._outbox[0].sequence, pack_grants(targets)):
                return False
            self._granted.extend((self._outbox.popleft(), bool(block_ids)) for block_ids in targets)
        return True

    def _hear(self, answer: Answer) -> bool:
        """Take in what the sender says, up to a segment that it is done with; False if it says nothing."""
        written = -1
        while (message := self._connection.receive()) is not None:
            kind, sequence, payload = message
            if kind not in (WRITTEN, DONE, SKIPPED) or not self._granted or self._granted[0][0].sequence != sequence:
                raise PairBroken(f"the sender broke the protocol: message {kind} about segment {sequence}")
            if kind != WRITTEN:
                self._take(kind, sequence, answer)
                return True
            before, written = written, int.from_bytes(payload, "little")
            if not before < written <= self._granted[0][0].blocks:
                raise PairBroken(f"the sender broke the protocol: {written} blocks are written, after {before}")
        if written >= 0:
            self._begin_to_digest(self._granted[0][0], written)
        return written >= 0

    def _take(self, kind: int, sequence: int, answer: Answer) -> None:
        job, with_blocks = self._granted.popleft()
        begun, self._begun = self._begun, []
        block_ids = job.block_ids if with_blocks else None
        if kind == SKIPPED and block_ids is not None:
            raise PairBroken(f"the sender skipped segment {sequence}, which is wanted")
        answer(job, b"" if block_ids is None else self._digester.digest(block_ids, begun))

    def _begin_to_digest(self, job: SegmentJob, written: int) -> None:
        block_ids = job.block_ids
        if not isinstance(self._digester, Digester):
            raise PairBroken("the sender broke the protocol: it says what is written to a GPU")
        if block_ids is not None:
            self._begun += self._digester.each(block_ids[len(self._begun) : written])


class _ShmListener(Listener):
    def __init__(self, local: Local) -> None:
        self._local = local
        self._door = Door()
        self.meeting = Meeting(Shm.name, "", 0, self._door.name)

    def meet(self) -> Channel:
        local, memory = self._local, self._local.memory
        assert isinstance(memory, SharedMemory)
        timeout_ms = local.settings.rendezvous_timeout_ms
        connected = self._door.accept(timeout_ms)
        lifeline, their_lifeline = os.pipe()
        try:
            rows = local.rows
            hello = _HELLO.pack(_MAGIC, memory.bytes, rows.cells // rows.ratio, rows.ratio, rows.layout.block_bytes)
            board = send_hello(connected, hello, [memory.descriptor], their_lifeline)
            connection = ready(connected, timeout_ms)
        except (OSError, PairBroken):
            os.close(lifeline)
            connected.close()
            raise
        return Grants(local, connection, Digester(local.rows), board, lifeline)

    def abandon(self) -> None:
        self._door.abandon()


class Shm(Transport):
    name = "shm"
    devices = ("cpu",)
    skips_unwanted = True

    def unusable(self, local: Local, same_host: bool) -> str:
        if not isinstance(local.memory, SharedMemory):
            return "the KV pool is not in memory that others can map"
        return cannot_grant(local, same_host)

    def listen(self, local: Local) -> Listener:
        return _ShmListener(local)

    def connect(self, local: Local, meeting: Meeting) -> Channel:
        connected = knock(meeting.secret)
        try:
            timeout_ms = local.settings.rendezvous_timeout_ms
            message, descriptors = receive_with_descriptors(connected, _HELLO.size, timeout_ms)
            try:
                target, pages, board = _mapped(local, message, descriptors)
                connection = Connection(connected)
                connection.send(READY, 0)
                lifeline = descriptors.pop()
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)
        except (OSError, PairBroken):
            connected.close()
            raise
        copier = Copier(local.rows, target, local.digests or Digester(local.rows), pages)
        return Writes(local, connection, copier, target.cells, board, lifeline)


def _mapped(local: Local, message: bytes, descriptors: list[int]) -> tuple[PoolRows, Pages, Board]:
    """The receiver's pool and board, mapped. Nothing that it says is believed before it is checked: a size that can still
    change could end this process. Raises `PairBroken` or `OSError`."""
    if len(message) != _HELLO.size or len(descriptors) != DESCRIPTORS:
        raise PairBroken(f"the receiver sent {len(message)} bytes and {len(descriptors)} descriptors for a pool")
    magic, pool_bytes, blocks, ratio, cell_bytes = _HELLO.unpack(message)
    if magic != _MAGIC:
        raise PairBroken("the receiver speaks another version of shm")
    cells = local.rows.layout
    used = check_fit(cells, pool_bytes, blocks, ratio, cell_bytes)
    for descriptor, size in zip(descriptors[:2], (pool_bytes, Board.SIZE), strict=True):
        check_sealed(descriptor, size)
    mapped = map_shared(descriptors[0], pool_bytes)
    pool = torch.frombuffer(mapped, dtype=torch.uint8, count=used)
    return PoolRows.of_bytes(pool, cells, ratio), Pages(mapped), Board(descriptors[1])
