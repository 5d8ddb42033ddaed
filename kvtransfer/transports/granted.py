"""Both ends of a pair whose sender writes directly to the receiver's blocks, as `cuda_ipc` does.

Segments cross in four moves: the announcement (control link), the receiver's grant of target blocks, the sender's copy, and its
word that it is done; then the receiver digests the blocks where they lie. Messages and proof of life are in `unix_socket`.

Stale writes are prevented by order, not by timeouts: granted blocks are not reused until the sender says DONE or SKIPPED or
its lifeline has ended. A receiver that no longer wants a segment writes its sequence to the *board*, a page shared by the two;
the sender looks there before each piece and skips the rest. This only makes the answer come sooner; the blocks stay granted
until the answer.
"""

import os
import select
import time
from collections import deque
from itertools import islice

from kvtransfer.memory.device_copy import DeviceCopier, DeviceDigester
from kvtransfer.session.limits import WINDOW_SEGMENTS_MAX
from kvtransfer.transports.transport import UNWANTED, Answer, Channel, Inbox, LocalEnd, PairBroken, SegmentJob
from kvtransfer.transports.unix_rendezvous import CancelFlags
from kvtransfer.transports.unix_socket import (
    DONE,
    GRANT,
    GRANT_BLOCKS_MAX,
    SKIPPED,
    UnixConnection,
    pack_grants,
    unpack_grants,
)


class RemoteWriter(Channel):
    """The sender's end: writes to the blocks that it is granted."""

    def __init__(
        self,
        local: LocalEnd,
        connection: UnixConnection,
        copier: DeviceCopier,
        target_sub_blocks: int,
        board: CancelFlags,
        lifeline: int,
    ) -> None:
        self._connection = connection
        self._lifeline = lifeline
        self._timeout_s = local.settings.segment_timeout_ms / 1e3
        self._copier: DeviceCopier | None = copier
        self._target_sub_blocks = target_sub_blocks
        self._board: CancelFlags | None = board

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
                    # Read now, so that the next copy can start at once while the event loop handles this answer.
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
            grants += enumerate(unpack_grants(payload, self._target_sub_blocks), sequence)
            if len(grants) > WINDOW_SEGMENTS_MAX:
                raise PairBroken(
                    f"the receiver broke the protocol: it granted blocks for {len(grants)} segments at once"
                )

    def _carry_out(self, job: SegmentJob, sequence: int, target_ids: list[int], inbox: Inbox) -> bytes:
        """Copy a granted segment and return its digest: `UNWANTED` if the receiver does not want it, empty if this pair is
        being closed."""
        assert job.block_ids is not None and self._copier is not None and self._board is not None
        if sequence != job.sequence or len(target_ids) not in (0, job.blocks):
            raise PairBroken(
                f"the receiver granted {len(target_ids)} blocks for segment {sequence}, which is segment {job.sequence}"
                f" of {job.blocks}"
            )
        board = self._board

        def go_on(_: int) -> bool:
            return not inbox.closed and not board.is_revoked(sequence)

        segment_digest = self._copier.copy(job.block_ids, target_ids, go_on, job.digest) if target_ids else b""
        if inbox.closed:
            return b""
        if not self._connection.send(DONE if segment_digest else SKIPPED, sequence):
            raise PairBroken("the receiver does not read what it is told")
        return segment_digest or UNWANTED


class WriteCredits(Channel):
    """The receiver's end: grants target blocks, and digests them when they are written."""

    def __init__(
        self, local: LocalEnd, connection: UnixConnection, digester: DeviceDigester, board: CancelFlags, lifeline: int
    ) -> None:
        self._connection = connection
        self._lifeline = lifeline
        self._timeout_s = local.settings.segment_timeout_ms / 1e3
        self._digester = digester
        self._board = board
        self._outbox: deque[SegmentJob] = deque()
        self._granted: deque[tuple[SegmentJob, bool]] = deque()
        """The granted segments in order, each with whether blocks were granted (False: the segment is unwanted)."""

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
                # The connection is of no use now, but the sender may still write: only the end of its lifeline proves
                # otherwise.
                poll.unregister(self._connection)
        os.close(self._lifeline)
        self._connection.close()

    def revoke(self, job: SegmentJob) -> None:
        self._board.revoke(job.sequence)

    def _grant(self) -> bool:
        """Grant the target blocks of the next segments, several in one message, up to one window. The limit is needed because
        a sender finishes a segment before we have digested it, and would announce more and more. Returns False if the
        connection has no room now."""
        while self._outbox and len(self._granted) < WINDOW_SEGMENTS_MAX:
            targets: list[tuple[int, ...]] = []
            blocks = 0
            for job in islice(self._outbox, WINDOW_SEGMENTS_MAX - len(self._granted)):
                blocks += job.blocks
                if blocks > GRANT_BLOCKS_MAX:
                    break
                targets.append(job.block_ids or ())
            if not self._connection.send(GRANT, self._outbox[0].sequence, pack_grants(targets)):
                return False
            self._granted.extend((self._outbox.popleft(), bool(block_ids)) for block_ids in targets)
        return True

    def _hear(self, answer: Answer) -> bool:
        """Handle the sender's next message. Returns False if there is none."""
        message = self._connection.receive()
        if message is None:
            return False
        kind, sequence, _ = message
        if kind not in (DONE, SKIPPED) or not self._granted or self._granted[0][0].sequence != sequence:
            raise PairBroken(f"the sender broke the protocol: message {kind} about segment {sequence}")
        self._take(kind, sequence, answer)
        return True

    def _take(self, kind: int, sequence: int, answer: Answer) -> None:
        job, with_blocks = self._granted.popleft()
        block_ids = job.block_ids if with_blocks else None
        if kind == SKIPPED and block_ids is not None:
            raise PairBroken(f"the sender skipped segment {sequence}, which is wanted")
        answer(job, b"" if block_ids is None else self._digester.digest(block_ids))
