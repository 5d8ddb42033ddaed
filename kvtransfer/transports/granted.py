"""Both ends of a pair whose receiver says where its sender writes each segment, as in `shm` and `cuda_ipc`.

Segments cross in four moves: the announcement (control link), the receiver's grant, the sender's copy, and its word that it is
done. Messages and proof of life are in `unix_socket`.
"""

import select
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvtransfer.session.limits import WINDOW_SEGMENTS_MAX
from kvtransfer.transports.transport import (
    MAX_QUEUED_SEGMENTS,
    UNWANTED,
    Answer,
    Channel,
    Inbox,
    LocalEnd,
    PairBroken,
    SegmentJob,
)
from kvtransfer.transports.unix_socket import DONE, GRANT, SKIPPED, UnixConnection

Where = TypeVar("Where")  # that a grant names


class GrantedWriter(Channel, Generic[Where]):
    """The sender's end: writes where it is granted."""

    def __init__(self, local: LocalEnd, connection: UnixConnection) -> None:
        self._connection = connection
        self._timeout_s = local.settings.segment_timeout_ms / 1e3

    @abstractmethod
    def _unpack(self, payload: bytes) -> Sequence[Where]:
        """Read what a message grants to segments that follow each other. Raises `PairBroken`."""

    @abstractmethod
    def _write(self, job: SegmentJob, where: Where, go_on: Callable[[int], bool]) -> bytes:
        """Write a segment and return its digest; empty if the receiver does not want it, or `go_on` returned false. Raises
        `PairBroken` if it does not fit there."""

    def work(self, inbox: Inbox, answer: Answer) -> None:
        jobs: deque[SegmentJob] = deque()
        grants: deque[tuple[int, Where]] = deque()
        poll = select.poll()
        poll.register(inbox, select.POLLIN)
        poll.register(self._connection, select.POLLIN)
        waiting_since = 0.0
        while not inbox.closed:
            left_s = waiting_since + self._timeout_s - time.monotonic()
            if not poll.poll(max(0.0, left_s) * 1e3 if jobs else None):
                raise PairBroken(f"the receiver granted no room in {self._timeout_s:g} s")
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
        self._connection.close()

    def _hear(self, grants: deque[tuple[int, Where]]) -> None:
        """Add what was granted since: sequences, and the place of each."""
        while (message := self._connection.receive()) is not None:
            kind, sequence, payload = message
            if kind != GRANT:
                raise PairBroken(f"the receiver broke the protocol: message {kind} of {len(payload)} bytes")
            grants += enumerate(self._unpack(payload), sequence)
            if len(grants) > WINDOW_SEGMENTS_MAX:
                raise PairBroken(f"the receiver broke the protocol: it granted room for {len(grants)} segments at once")

    def _carry_out(self, job: SegmentJob, sequence: int, where: Where, inbox: Inbox) -> bytes:
        """Returns the digest; `UNWANTED` if the receiver does not want it; empty if this pair is being closed."""
        if sequence != job.sequence:
            raise PairBroken(f"the receiver granted room for segment {sequence}, which is segment {job.sequence}")
        segment_digest = self._write(job, where, lambda _: not inbox.closed)
        if inbox.closed:
            return b""
        if not self._connection.send(DONE if segment_digest else SKIPPED, sequence):
            raise PairBroken("the receiver does not read what it is told")
        return segment_digest or UNWANTED


@dataclass(slots=True, eq=False)
class Granted(Generic[Where]):
    """A segment that waits for its grant, or whose sender has yet to say that it is done with it."""

    job: SegmentJob
    where: Where | None = None  # None: it is not wanted
    answered: bool = False  # it was given up meanwhile


class GrantingReceiver(Channel, Generic[Where]):
    """The receiver's end: grants places to segments, and digests what is written there."""

    def __init__(self, local: LocalEnd, connection: UnixConnection) -> None:
        self._connection = connection
        self._timeout_s = local.settings.segment_timeout_ms / 1e3
        self._outbox: deque[Granted[Where]] = deque()
        self._granted: deque[Granted[Where]] = deque()  # in order
        self._inbox: Inbox | None = None

    @abstractmethod
    def _grant(self) -> bool:
        """Grant places to the next segments, several in one message, up to one window. The limit is needed because a sender
        finishes a segment before it is digested here, and would announce more and more. Returns False if the connection has
        no room for the message now."""

    @abstractmethod
    def _written(self, one: Granted[Where], is_done: bool) -> bytes:
        """The sender has written this segment, or skipped it. Returns its digest; empty if it is not wanted. Raises
        `PairBroken` if the sender had to do the other."""

    def work(self, inbox: Inbox, answer: Answer) -> None:
        self._inbox = inbox
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
            self._take_in(inbox, answer)
            while not inbox.closed and self._hear(answer):
                heard_at = time.monotonic()
                self._take_in(inbox, answer)
            poll.modify(self._connection, select.POLLIN | (0 if self._grant() else select.POLLOUT))

    def settle(self, inbox: Inbox, answer: Answer) -> None:
        self._connection.close()

    def _take_in(self, inbox: Inbox, answer: Answer) -> None:
        self._outbox += [Granted(job) for job in inbox.take()]
        if len(self._outbox) > MAX_QUEUED_SEGMENTS:
            raise PairBroken(f"the sender broke the protocol: {len(self._outbox)} segments are announced at once")
        self._grant()

    def _hear(self, answer: Answer) -> bool:
        """Handle the sender's next message. Returns False if there is none."""
        message = self._connection.receive()
        if message is None:
            return False
        kind, sequence, _ = message
        if kind not in (DONE, SKIPPED) or not self._granted or self._granted[0].job.sequence != sequence:
            raise PairBroken(f"the sender broke the protocol: message {kind} about segment {sequence}")
        one = self._granted.popleft()
        segment_digest = self._written(one, kind == DONE)
        if not one.answered:
            answer(one.job, segment_digest)
        return True
