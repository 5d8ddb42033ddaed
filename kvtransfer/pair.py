"""One process group of two, and the one thread that owns it.

The thread meets the peer, then runs the pair's segments one after the other from a bounded queue, and posts what
became of them to the event loop. Everything that can block, blocks there: gloo's receive cannot be interrupted, and
after a peer is killed amid a message it returns only at its timeout. When anything fails, the group is dropped and
the pair is down for good.

Answers, all on the loop: `on_ready` at most once; `on_segment` exactly once for every submitted segment, with its
digest, or None if it was not transferred; `on_down` exactly once, before the None answers. After `on_down` the thread
touches nothing any more.
"""

import asyncio
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from kvtransfer.pool import PoolRows, digest
from kvtransfer.rendezvous import RECEIVER_RANK, SENDER_RANK, Group, Listener, connect
from kvtransfer.settings import KvSettings

MAX_QUEUED_SEGMENTS = 256
"""Segments a pair holds at once. A correct sender stays within its window, of at most 64."""


@dataclass(slots=True, eq=False)
class SegmentJob:
    """One segment on its way. `sequence` is its place and tag on the pair.

    `block_ids` are read when sending. When receiving, they are where it goes; None while it runs means: receive and
    discard.
    """

    owner: object
    segment: int
    sequence: int
    blocks: int
    block_ids: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class Listen:
    """How the receiver meets: it listens on `host` and says so on the loop through `on_listening(port, secret)`."""

    host: str
    on_listening: Callable[[int, str], None]


@dataclass(frozen=True, slots=True)
class Connect:
    """How the sender meets: it joins the receiver listening here."""

    host: str
    port: int
    secret: str


@dataclass(frozen=True, slots=True)
class PairEvents:
    """Where a pair's answers go; called on the event loop."""

    on_ready: Callable[[], None]
    on_segment: Callable[[SegmentJob, bytes | None], None]
    on_down: Callable[[str], None]


class Pair:
    """Made on the event loop, whose thread calls everything public. The thread starts at once."""

    def __init__(
        self,
        meeting: Listen | Connect,
        rows: PoolRows,
        segment_blocks: int,
        events: PairEvents,
        settings: KvSettings,
        name: str,
    ) -> None:
        self.is_down = False
        self._meeting = meeting
        self._rows = rows
        self._segment_blocks = segment_blocks
        self._events = events
        self._settings = settings
        self._timeout = timedelta(milliseconds=settings.segment_timeout_ms)
        self._loop = asyncio.get_running_loop()
        self._jobs: queue.Queue[SegmentJob | None] = queue.Queue(MAX_QUEUED_SEGMENTS + 1)
        self._unanswered: dict[int, SegmentJob] = {}
        self._closing = threading.Event()
        self._listener: Listener | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def queued(self) -> int:
        """Segments submitted and not answered."""
        return len(self._unanswered)

    def jobs_of(self, owner: object) -> list[SegmentJob]:
        """The unanswered segments of one session."""
        return [job for job in self._unanswered.values() if job.owner is owner]

    def submit(self, job: SegmentJob) -> None:
        """Queue a segment; also while the pair is still meeting. The caller keeps within MAX_QUEUED_SEGMENTS."""
        assert not self.is_down and self.queued < MAX_QUEUED_SEGMENTS and job.sequence not in self._unanswered
        assert job.blocks <= self._segment_blocks
        if job.block_ids is not None:
            self._rows.check(job.block_ids)
        self._unanswered[job.sequence] = job
        self._jobs.put_nowait(job)

    def close(self) -> None:
        """Let the thread end after the segment it is at; `on_down` says when it has. Repeating it does no harm."""
        if not self._closing.is_set():
            self._closing.set()
            self._jobs.put_nowait(None)
            if self._listener is not None:
                self._listener.abandon()

    # --- on the loop, posted by the thread ---

    def _answer(self, job: SegmentJob, segment_digest: bytes) -> None:
        del self._unanswered[job.sequence]
        self._events.on_segment(job, segment_digest)

    def _went_down(self, reason: str) -> None:
        self.is_down = True
        self._events.on_down(reason)
        unanswered, self._unanswered = self._unanswered, {}
        for job in unanswered.values():
            self._events.on_segment(job, None)

    # --- in the thread ---

    def _run(self) -> None:
        reason = "closed"
        try:
            self._work(self._meet())
        except Exception as error:  # noqa: BLE001 -- whatever it is, the sessions must learn that this thread is gone
            reason = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        self._post(self._went_down, reason)

    def _post(self, function: Callable[..., None], *arguments: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            return  # the loop is closed: nobody is left to be told

    def _meet(self) -> Group:
        timeout_s = self._settings.rendezvous_timeout_ms / 1e3
        if isinstance(self._meeting, Connect):
            there = self._meeting
            return connect(self._settings.transport, there.host, there.port, there.secret, timeout_s)
        listener = Listener(self._meeting.host, timeout_s)
        self._listener = listener
        if self._closing.is_set():
            listener.abandon()
        self._post(self._meeting.on_listening, listener.port, listener.secret)
        try:
            return listener.meet(self._settings.transport)
        finally:
            self._listener = None

    def _work(self, group: Group) -> None:
        """Run segments until closed. Raises what the group raises; it and the buffer go with this frame."""
        self._post(self._events.on_ready)
        buffer = self._rows.buffer(self._segment_blocks)
        run = self._send if isinstance(self._meeting, Connect) else self._receive
        while (job := self._jobs.get()) is not None and not self._closing.is_set():
            self._post(self._answer, job, run(group, job, buffer))

    def _send(self, group: Group, job: SegmentJob, buffer: torch.Tensor) -> bytes:
        assert job.block_ids is not None
        packed = self._rows.packed(job.block_ids, buffer)
        segment_digest = digest(packed)
        group.send([packed], RECEIVER_RANK, job.sequence).wait(self._timeout)
        return segment_digest

    def _receive(self, group: Group, job: SegmentJob, buffer: torch.Tensor) -> bytes:
        packed = buffer[: job.blocks]
        group.recv([packed], SENDER_RANK, job.sequence).wait(self._timeout)
        block_ids = job.block_ids
        if block_ids is None:
            return b""
        self._rows.spread(block_ids, packed)
        return digest(packed)
