"""One pair of processes that exchange KV, and the one thread that owns it.

The thread meets the peer, then has its channel work through the pair's segments, and posts what became of them to the event
loop. Everything that can block, blocks there. When anything fails, the pair is broken for good: its sessions fail at once,
but what they have in flight is answered only when nothing touches its blocks any more.

Answers, all on the loop: `on_ready` at most once; `on_segments` with every submitted segment exactly once, with its digest, or
empty if it was not transferred; `on_broken` exactly once, unless the pair was closed; `on_down` exactly once, last.
"""

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvtransfer.rate_limiter import Lane, RateLimiter
from kvtransfer.transports import registry
from kvtransfer.transports.transport import (
    MAX_QUEUED_SEGMENTS,
    Channel,
    Inbox,
    Listener,
    LocalEnd,
    PairBroken,
    Rendezvous,
    SegmentJob,
)

_ANSWERS_HELD_MAX = 128  # they still count towards MAX_QUEUED_SEGMENTS


@dataclass(frozen=True, slots=True)
class Listen:
    """How the receiver meets: by the first of these transports that can listen; `on_listening` is called on the loop."""

    transports: tuple[str, ...]
    why: str  # the reason against better ones
    on_listening: Callable[[Rendezvous], None]


@dataclass(frozen=True, slots=True)
class PairEvents:
    """Where a pair's answers go; called on the event loop."""

    on_ready: Callable[[], None]
    on_segments: Callable[[Sequence[tuple[SegmentJob, bytes]]], None]
    on_broken: Callable[[str, Exception], None]
    on_down: Callable[[], None]


class NoResources(Exception):
    """This process has no descriptor, thread or memory left for a pair."""


class Pair:
    """Made on the event loop, whose thread calls everything public. The thread starts at once. `how` is a `Rendezvous` on the
    sender. Raises `NoResources`."""

    def __init__(
        self,
        how: Listen | Rendezvous,
        local: LocalEnd,
        events: PairEvents,
        name: str,
        rate_limiter: RateLimiter | None = None,
    ) -> None:
        self.is_down = False
        self._rate_limiter, self._lane = rate_limiter, Lane()
        self._how = how
        self._local = local
        self._events = events
        self._loop = asyncio.get_running_loop()
        try:
            self._inbox = Inbox()
        except OSError as error:
            raise NoResources(f"no descriptor is left for another pair: {error.strerror}") from None
        self._unanswered: dict[int, SegmentJob] = {}
        self._answers: list[tuple[SegmentJob, bytes]] = []
        self._lock = threading.Lock()
        self._listener: Listener | None = None
        self._channel: Channel | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            self._inbox.release()
            raise NoResources(f"no thread is left for another pair: {error}") from None

    @property
    def queued(self) -> int:
        """Segments submitted and not answered."""
        return len(self._unanswered)

    def submit(self, *jobs: SegmentJob) -> None:
        """Queue segments; also while the pair is still meeting. The caller keeps within MAX_QUEUED_SEGMENTS."""
        assert not self.is_down
        for job in jobs:
            assert self.queued < MAX_QUEUED_SEGMENTS and job.sequence not in self._unanswered
            assert job.blocks <= self._local.segment_blocks
            self._unanswered[job.sequence] = job
        if self._rate_limiter is None:
            self._inbox.put(*jobs)
            return
        for job in jobs:
            self._rate_limiter.start(self._lane, partial(self._wanted_bytes, job), partial(self._begin, job))

    def _wanted_bytes(self, job: SegmentJob) -> int:
        return 0 if job.block_ids is None else job.blocks * self._local.rows.layout.block_bytes

    def _begin(self, job: SegmentJob) -> None:
        if not self.is_down:
            self._inbox.put(job)

    def cancel(self, owner: object) -> None:
        """Receives and discards the rest of one session's segments. Each is still answered."""
        for job in self._unanswered.values():
            if job.owner is owner:
                job.block_ids = None
                if self._channel is not None:
                    self._channel.revoke(job)

    def close(self, settle_limit_ms: int | None = None) -> None:
        """Let the thread end as soon as it can; `on_down` says when it has, at the latest after this limit if there is one.
        Repeating it does no harm."""
        if self.is_down:
            return
        self._inbox.close(settle_limit_ms)
        with self._lock:
            if self._listener is not None:
                self._listener.abandon()

    # --- on the loop, posted by the thread ---

    def _answered(self, answers: list[tuple[SegmentJob, bytes]]) -> None:
        for job, _ in answers:
            del self._unanswered[job.sequence]
        self._events.on_segments(answers)

    def _went_down(self) -> None:
        self.is_down = True
        self._inbox.release()
        self._events.on_down()
        unanswered, self._unanswered = self._unanswered, {}
        if unanswered:
            self._events.on_segments([(job, b"") for job in unanswered.values()])

    # --- in the thread ---

    def _run(self) -> None:
        try:
            self._work()
        finally:
            self._channel = None
            self._tell()
            self._post(self._went_down)

    def _work(self) -> None:
        try:
            self._channel = self._meet()
            self._post(self._events.on_ready)
            self._channel.work(self._inbox, self._answer)
        except Exception as error:  # noqa: BLE001 -- whatever it is, the sessions must learn that this pair is of no use
            reason = str(error) if isinstance(error, PairBroken) else f"{type(error).__name__}: {error}"
            self._post(self._events.on_broken, (reason.splitlines() or [""])[0][:300], error)
        if self._channel is not None:
            self._channel.settle(self._inbox, self._answer)

    def _answer(self, job: SegmentJob, segment_digest: bytes) -> None:
        """Collect answers and post several at once, because each post wakes the event loop. A session's last segment is posted
        at once, since the session waits for it. Half of the segments in flight are enough for a post, because a sender
        announces more when half its window is free."""
        self._answers.append((job, segment_digest))
        following = self._unanswered.get(job.sequence + 1)
        enough = len(self._answers) >= min(_ANSWERS_HELD_MAX, len(self._unanswered) / 2)
        if enough or following is None or following.owner is not job.owner:
            self._tell()

    def _tell(self) -> None:
        answers, self._answers = self._answers, []
        if answers:
            self._post(self._answered, answers)

    def _post(self, function: Callable[..., None], *arguments: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            return  # the loop is closed: nobody is left to be told

    def _meet(self) -> Channel:
        how = self._how
        if isinstance(how, Rendezvous):
            return registry.connect(self._local, how)
        listener = registry.listen(self._local, how.transports, how.why)
        with self._lock:
            self._listener = listener
            if self._inbox.closed:
                listener.abandon()
        try:
            self._post(how.on_listening, listener.meeting)
            return listener.meet()
        finally:
            with self._lock:
                self._listener = None
