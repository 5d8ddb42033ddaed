"""The transport `gloo`: messages over TCP, between any two hosts. Received KV is staged in a buffer of the channel, so a late,
short or foreign message never touches a pool.

gloo's receive cannot be interrupted; after a peer is killed amid a message it returns only at its timeout. An operation that
failed makes the whole group unusable.
"""

from collections import deque
from datetime import timedelta
from typing import Any

from kvtransfer import rendezvous
from kvtransfer.digests import land, of_packed, of_segment
from kvtransfer.pool import as_bytes
from kvtransfer.rendezvous import RECEIVER_RANK, SENDER_RANK, Group
from kvtransfer.transport import Answer, Channel, Inbox, Listener, Local, Meeting, SegmentJob, Transport


class _GlooChannel(Channel):
    def __init__(self, local: Local, group: Group) -> None:
        self._rows = local.rows
        self._timeout = timedelta(milliseconds=local.settings.segment_timeout_ms)
        self._group = group
        self._buffer = self._rows.buffer(local.segment_blocks)


class _Sending(_GlooChannel):
    def __init__(self, local: Local, group: Group) -> None:
        super().__init__(local, group)
        self._digests = local.digests

    def work(self, inbox: Inbox, answer: Answer) -> None:
        while not inbox.closed:
            inbox.wait()
            for job in inbox.take():
                if inbox.closed:
                    return
                answer(job, self._send(job))

    def _send(self, job: SegmentJob) -> bytes:
        assert job.block_ids is not None
        packed = self._rows.packed(job.block_ids, self._buffer)
        sending = self._group.send([packed], RECEIVER_RANK, job.sequence)
        if self._digests is not None:
            segment_digest = self._digests.digest(job.block_ids)
        else:  # while it leaves
            segment_digest = of_segment(of_packed(as_bytes(packed).reshape(-1), self._rows.layout.block_bytes))
        sending.wait(self._timeout)
        return segment_digest


class _Receiving(_GlooChannel):
    """Two buffers: the next segment lands in one while the last one is digested in the other."""

    def __init__(self, local: Local, group: Group) -> None:
        super().__init__(local, group)
        self._next_buffer = self._rows.buffer(local.segment_blocks)

    def work(self, inbox: Inbox, answer: Answer) -> None:
        announced: deque[SegmentJob] = deque()
        receiving: tuple[SegmentJob, Any] | None = None
        while not inbox.closed:
            if receiving is None and not announced:
                inbox.wait()
            announced += inbox.take()
            if receiving is not None:
                job, operation = receiving
                operation.wait(self._timeout)
                announced += inbox.take()
                self._buffer, self._next_buffer = self._next_buffer, self._buffer
                receiving = self._begin(announced)
                answer(job, self._settled(job))
            else:
                receiving = self._begin(announced)
        if receiving is not None:
            receiving[1].wait(self._timeout)  # it cannot be interrupted, and its buffer must live

    def _begin(self, announced: deque[SegmentJob]) -> tuple[SegmentJob, Any] | None:
        # Always room for the largest segment: a message over its buffer would end this process, whoever announced it wrongly.
        if not announced:
            return None
        job = announced.popleft()
        return job, self._group.recv([self._next_buffer], SENDER_RANK, job.sequence)

    def _settled(self, job: SegmentJob) -> bytes:
        """Copy what has landed to its blocks, if it is still wanted."""
        block_ids = job.block_ids
        if block_ids is None:
            return b""
        return land(self._buffer[: job.blocks], self._rows, block_ids)


class _GlooListener(Listener):
    def __init__(self, local: Local) -> None:
        self._local = local
        self._store = rendezvous.Listener(local.listen_host, local.settings.rendezvous_timeout_ms / 1e3)
        self.meeting = Meeting(Gloo.name, local.listen_host, self._store.port, self._store.secret)

    def meet(self) -> Channel:
        return _Receiving(self._local, self._store.meet(rendezvous.gloo_group))

    def abandon(self) -> None:
        self._store.abandon()


class Gloo(Transport):
    name = "gloo"

    def unusable(self, local: Local, same_host: bool) -> str:
        return ""

    def pair_bytes(self, segment_bytes: int) -> int:
        return 2 * segment_bytes

    def listen(self, local: Local) -> Listener:
        return _GlooListener(local)

    def connect(self, local: Local, meeting: Meeting) -> Channel:
        timeout_s = local.settings.rendezvous_timeout_ms / 1e3
        return _Sending(
            local, rendezvous.connect(rendezvous.gloo_group, meeting.host, meeting.port, meeting.secret, timeout_s)
        )
