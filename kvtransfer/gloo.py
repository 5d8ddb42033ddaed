"""The transport `gloo`: messages over TCP, between any two hosts. Received KV is staged in a buffer of the channel, so a late,
short or foreign message never touches a pool.

gloo's receive cannot be interrupted; after a peer is killed amid a message it returns only at its timeout. An operation that
failed makes the whole group unusable.
"""

from datetime import timedelta

from kvtransfer import rendezvous
from kvtransfer.pool import digest
from kvtransfer.rendezvous import RECEIVER_RANK, SENDER_RANK, Group
from kvtransfer.transport import Answer, Channel, Inbox, Listener, Local, Meeting, SegmentJob, Transport


class _GlooChannel(Channel):
    def __init__(self, local: Local, group: Group) -> None:
        self._rows = local.rows
        self._timeout = timedelta(milliseconds=local.settings.segment_timeout_ms)
        self._group = group
        self._buffer = self._rows.buffer(local.segment_blocks)

    def work(self, inbox: Inbox, answer: Answer) -> None:
        while True:
            inbox.wait()
            for job in inbox.take():
                if inbox.closed:
                    return
                answer(job, self._run(job))
            if inbox.closed:
                return

    def _run(self, job: SegmentJob) -> bytes:
        raise NotImplementedError


class _Sending(_GlooChannel):
    def _run(self, job: SegmentJob) -> bytes:
        assert job.block_ids is not None
        packed = self._rows.packed(job.block_ids, self._buffer)
        segment_digest = digest(packed)
        self._group.send([packed], RECEIVER_RANK, job.sequence).wait(self._timeout)
        return segment_digest


class _Receiving(_GlooChannel):
    def _run(self, job: SegmentJob) -> bytes:
        # Always room for the largest segment: a message over its buffer would end this process, whoever announced it wrongly.
        self._group.recv([self._buffer], SENDER_RANK, job.sequence).wait(self._timeout)
        packed = self._buffer[: job.blocks]
        block_ids = job.block_ids
        if block_ids is None:
            return b""
        self._rows.spread(block_ids, packed)
        return digest(packed)


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

    def listen(self, local: Local) -> Listener:
        return _GlooListener(local)

    def connect(self, local: Local, meeting: Meeting) -> Channel:
        timeout_s = local.settings.rendezvous_timeout_ms / 1e3
        return _Sending(
            local, rendezvous.connect(rendezvous.gloo_group, meeting.host, meeting.port, meeting.secret, timeout_s)
        )
