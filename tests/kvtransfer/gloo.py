"""The transport `gloo`, a stand-in for NCCL where no GPU is: messages over TCP. Received KV is staged in buffers, so a late,
short or foreign message never touches a pool.

A message crosses when its receive is posted, and the sender is told of that over the same connection. So two are always under
way, and the second one's data follows the first's without a pause. A third buffer is that of the segment before, which is
copied and digested meanwhile.

gloo's receive cannot be interrupted; after a peer is killed amid a message it returns only at its timeout. An operation that
failed makes the whole group unusable.
"""

import time
from collections import deque
from datetime import timedelta
from typing import Any

from torch import distributed

from kvtransfer.memory.digests import of_packed, of_segment, unpack
from kvtransfer.memory.pool import as_bytes
from kvtransfer.transports import rendezvous
from kvtransfer.transports.registry import TRANSPORTS
from kvtransfer.transports.rendezvous import RECEIVER_RANK, SENDER_RANK
from kvtransfer.transports.transport import (
    Answer,
    Channel,
    Inbox,
    Listener,
    LocalEnd,
    Rendezvous,
    SegmentJob,
    Transport,
)

_c10d: Any = distributed
_SET_UP = "set up"
UNDER_WAY = 2
BUFFERS = UNDER_WAY + 1


class _GlooChannel(Channel):
    """Works through segments in order, of which UNDER_WAY have been given to gloo."""

    def __init__(self, local: LocalEnd, group: Any) -> None:
        self._rows = local.rows
        self._timeout_s = local.settings.segment_timeout_ms / 1e3
        self._group = group
        self._buffers = deque(self._rows.buffer(local.segment_blocks) for _ in range(BUFFERS))
        """The next one to use first. Each is used again only when what it was used for is over."""
        self._under_way: deque[tuple[SegmentJob, Any, Any]] = deque()
        """Operations under way, with their data, or where that lands."""

    def work(self, inbox: Inbox, answer: Answer) -> None:
        announced: deque[SegmentJob] = deque()
        while not inbox.closed:
            if not self._under_way and not announced:
                inbox.wait()
            announced += inbox.take()
            self._begin(announced)
            if self._under_way and not inbox.closed:
                job, data, operation = self._under_way.popleft()
                operation.wait(timedelta(seconds=self._timeout_s))
                announced += inbox.take()
                self._begin(announced)
                answer(job, self._done(job, data))
        deadline = time.monotonic() + self._timeout_s
        for _, _, operation in self._under_way:  # they cannot be interrupted, and their buffers must live
            operation.wait(timedelta(seconds=max(0.001, deadline - time.monotonic())))

    def _begin(self, announced: deque[SegmentJob]) -> None:
        while announced and len(self._under_way) < UNDER_WAY:
            job, buffer = announced.popleft(), self._buffers[0]
            self._buffers.rotate(-1)
            self._under_way.append((job, *self._start(job, buffer)))

    def _start(self, job: SegmentJob, buffer: Any) -> tuple[Any, Any]:
        """(data, operation)."""
        raise NotImplementedError

    def _done(self, job: SegmentJob, data: Any) -> bytes:
        """The digest."""
        raise NotImplementedError


class _Sending(_GlooChannel):
    def __init__(self, local: LocalEnd, group: Any) -> None:
        super().__init__(local, group)
        self._digests = local.digests

    def _start(self, job: SegmentJob, buffer: Any) -> tuple[Any, Any]:
        assert job.block_ids is not None
        packed = self._rows.packed(job.block_ids, buffer)
        return packed, self._group.send([packed], RECEIVER_RANK, job.sequence)

    def _done(self, job: SegmentJob, data: Any) -> bytes:
        assert job.block_ids is not None
        if job.digest:
            return job.digest
        if self._digests is not None:
            return self._digests.digest(job.block_ids)
        return of_segment(of_packed(as_bytes(data).reshape(-1), self._rows.layout.block_bytes))


class _Receiving(_GlooChannel):
    def _start(self, job: SegmentJob, buffer: Any) -> tuple[Any, Any]:
        # Always room for the largest segment: a message over its buffer would end this process, whoever announced it wrongly.
        return buffer, self._group.recv([buffer], SENDER_RANK, job.sequence)

    def _done(self, job: SegmentJob, data: Any) -> bytes:
        """Copies what has landed to its blocks, if it is still wanted."""
        block_ids = job.block_ids
        return b"" if block_ids is None else unpack(data[: job.blocks], self._rows, block_ids)


class _GlooListener(Listener):
    def __init__(self, local: LocalEnd) -> None:
        self._local = local
        self._store = rendezvous.StoreListener(local.listen_host, local.settings.rendezvous_timeout_ms / 1e3)
        self.meeting = Rendezvous(Gloo.name, local.listen_host, self._store.port, self._store.secret)

    def meet(self) -> Channel:
        return _Receiving(self._local, self._store.meet(gloo_group))

    def abandon(self) -> None:
        self._store.abandon()


class Gloo(Transport):
    name = "gloo"

    def unusable(self, local: LocalEnd, same_host: bool) -> str:
        return ""

    def pair_bytes(self, segment_bytes: int) -> int:
        return BUFFERS * segment_bytes

    def listen(self, local: LocalEnd) -> Listener:
        return _GlooListener(local)

    def connect(self, local: LocalEnd, meeting: Rendezvous) -> Channel:
        timeout_s = local.settings.rendezvous_timeout_ms / 1e3
        return _Sending(local, rendezvous.connect(gloo_group, meeting.host, meeting.port, meeting.secret, timeout_s))


class _TemporaryStore(distributed.Store):  # type: ignore[misc, name-defined, unused-ignore]
    """Passes on to another store until it is ended. A group keeps its store for as long as it lives, and with it the listening
    socket of a TCPStore; gloo needs neither once it is set up."""

    def __init__(self, store: Any) -> None:
        super().__init__()
        self._store = store

    def set(self, key: str, value: bytes) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> Any:
        return self._store.get(key)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        if timeout is None:
            self._store.wait(keys)
        else:
            self._store.wait(keys, timeout)

    def end(self) -> None:
        self._store = None


def gloo_group(store: Any, rank: int, host: str, timeout_s: float) -> Any:
    """A gloo group of two, its sockets on `host`. Blocks until the other rank is there too. It does not keep the store."""
    gloo = _c10d.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timedelta(seconds=timeout_s)
    options._devices = [gloo.create_device(hostname=host)]
    options._threads = 1
    temporary = _TemporaryStore(store)
    try:
        group: Any = gloo(temporary, rank, 2, options)
        if rank == SENDER_RANK:
            store.set(_SET_UP, "here")
        else:
            store.wait(
                [_SET_UP], timedelta(seconds=timeout_s)
            )  # the store is ours, and the sender may still read from it
    finally:
        temporary.end()
    return group


TRANSPORTS.setdefault(Gloo.name, Gloo())
"""Whoever imports this module can use it, also by the name alone."""
