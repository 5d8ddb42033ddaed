"""The base class of the sender's and the receiver's drivers. It keeps live and ended sessions, their timers and the pairs, and
shuts them down."""

import asyncio
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Generic, TypeVar

import torch

from kvtransfer.memory.digests import BlockDigests
from kvtransfer.memory.layout import KvLayout
from kvtransfer.memory.pool import PoolRows, rows_of
from kvtransfer.peer import Key, KvPeer
from kvtransfer.ports import TransferOwner
from kvtransfer.rate_limiter import RateLimiter
from kvtransfer.session.limits import KvSettings
from kvtransfer.session.session import (
    Action,
    LocalAbort,
    PairLost,
    SegmentDone,
    SegmentDropped,
    SendMessage,
    SessionEnded,
    Tick,
    TransferSession,
    Violation,
)
from kvtransfer.transports.pair import Listen, NoResources, Pair, PairEvents
from kvtransfer.transports.registry import TRANSPORTS, host_id
from kvtransfer.transports.tcp.listener import TcpListener
from kvtransfer.transports.transport import LocalEnd, PoolMemory, Rendezvous, SegmentJob
from proto.kv import PairClosed
from proto.messages import Message

S = TypeVar("S", bound=TransferSession)


class TransferDriver(ABC, Generic[S]):
    """Turns actions into I/O and I/O results into events. All methods run on the event loop that it was made on.

    `clock` is in seconds.
    """

    def __init__(
        self,
        layout: KvLayout,
        pool: torch.Tensor | Sequence[torch.Tensor],
        incarnation: int,
        clock: Callable[[], float],
        owner: TransferOwner,
        settings: KvSettings,
        listen_host: str = "",
        memory: PoolMemory | None = None,
    ) -> None:
        unknown = set(settings.transports) - set(TRANSPORTS)
        if unknown:
            raise ValueError(f"no transport is called {', '.join(sorted(unknown))}; there are {', '.join(TRANSPORTS)}")
        self.layout = layout
        self.counters: Counter[str] = Counter()
        """Totals since start: bytes, segments, sessions, sessions_failed, pairs, pairs_lost, refused_pairs (no descriptor or
        thread was left), stale_frames and violations. Each transport also has pairs_NAME, broken_NAME and bytes_NAME."""
        self._pool = pool
        self._rows = rows_of(pool, layout)
        self._listen_host, self._memory = listen_host, memory
        self._digests: BlockDigests | None = None
        self._host_id = host_id()
        self._incarnation = incarnation
        self._clock = clock
        self._send: Callable[[int, Message, bytes], None] = owner.send
        self._pair_failed: Callable[[Exception], None] = owner.pair_failed
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self._live: dict[Key, S] = {}
        self._ended: OrderedDict[Key, S] = OrderedDict()
        self._peers: dict[int, KvPeer] = {}  # by incarnation; those being closed are not here
        self._pairs: set[Pair] = set()
        self._all_down = asyncio.Event()
        self._all_down.set()
        self._closed = False
        self._rate_limiter: RateLimiter | None = None
        self._tcp_listener: TcpListener | None = None

    @property
    def sessions(self) -> int:
        return len(self._live)

    def peer_lost(self, peer_incarnation: int, reason: str) -> None:
        """Drop the pair with this peer and fail its sessions, because the link to it is gone."""
        peer = self._peers.get(peer_incarnation)
        if peer is not None:
            self._drop(peer, f"peer lost: {reason}", tell_peer=False)

    def abort(self, request_id: str, attempt: int, reason: str) -> None:
        """Abort a session. Its result still follows, once the transfer thread no longer touches its blocks."""
        self._feed_known((request_id, attempt), LocalAbort(reason))

    async def close(self) -> None:
        """Abort all sessions, end all threads and wait for them. This takes at most the time limits of one rendezvous and one
        segment."""
        self._closed = True
        for session in list(self._live.values()):
            self._feed(session, LocalAbort("shutting down"))
        for peer in list(self._peers.values()):
            self._drop(peer, "shutting down", tell_peer=True)
        for pair in self._pairs:
            pair.close(self._settings.segment_timeout_ms)
        limit_ms = self._settings.rendezvous_timeout_ms + self._settings.segment_timeout_ms
        try:
            async with asyncio.timeout(limit_ms / 1e3 + 1.0):
                await self._all_down.wait()
        finally:
            if self._tcp_listener is not None:
                self._tcp_listener.close()

    # --- for the two drivers ---

    @abstractmethod
    def _carry_out(self, session: S, action: Action) -> None:
        """Carry out an action that concerns segments."""

    @abstractmethod
    def _report(self, session: S, ended: SessionEnded) -> None: ...

    def _begin(self, session: S, peer: KvPeer) -> None:
        key = session.key
        assert not self._closed and key not in self._live and key not in self._ended
        session.peer = peer
        self._live[key] = peer.sessions[key] = session
        peer.used_at = self._clock()
        self.counters["sessions"] += 1

    def _find(self, peer_incarnation: int, key: Key) -> S | None:
        """Returns the live or ended session that a frame belongs to. Returns None, and counts a stale frame, if the session is
        unknown or belongs to another peer."""
        session = self._live.get(key) or self._ended.get(key)
        if session is None or session.peer.incarnation != peer_incarnation:
            self.counters["stale_frames"] += 1
            return None
        return session

    def _feed_known(self, key: Key, event: object) -> None:
        session = self._live.get(key)
        if session is not None:
            self._feed(session, event)

    def _feed(self, session: S, *events: object) -> None:
        now = self._clock()
        self._perform(session, [action for event in events for action in session.handle(event, now)])

    def _perform(self, session: S, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, SendMessage):
                self._send(session.peer.incarnation, action.message, action.blob)
            elif isinstance(action, Violation):
                self.counters["violations"] += 1
            elif isinstance(action, SessionEnded):
                self._end(session, action)
            else:
                self._carry_out(session, action)
        if session.key in self._live:
            self._arm(session)

    def _end(self, session: S, ended: SessionEnded) -> None:
        if session.timer is not None:
            session.timer.cancel()
            session.timer = None
        del self._live[session.key]
        del session.peer.sessions[session.key]
        session.ended_at = session.peer.used_at = self._clock()
        self._ended[session.key] = session
        self._forget_old(session.ended_at)
        self._report(session, ended)
        session.forget_payload()

    def _forget_old(self, now: float) -> None:
        until, ended = now - self._settings.remembered_ms / 1e3, self._ended
        while len(ended) > self._settings.remembered_max or next(iter(ended.values())).ended_at < until:
            ended.popitem(last=False)

    def _arm(self, session: S) -> None:
        """Schedule a `Tick` at the session's deadline. A timer that fires early is armed again, so a later deadline needs no
        new timer."""
        deadline = session.next_deadline()
        if deadline is None or (session.timer is not None and session.timer_at <= deadline):
            return
        if session.timer is not None:
            session.timer.cancel()
        session.timer_at = deadline
        session.timer = self._loop.call_later(max(0.0, deadline - self._clock()), self._ticked, session)

    def _ticked(self, session: S) -> None:
        session.timer = None
        self._feed(session, Tick())

    # --- pairs ---

    def _rows_of(self, block_size: int) -> PoolRows:
        """The pool in blocks of this size, which divides our own."""
        return self._rows if block_size == self.layout.block_size else rows_of(self._pool, self.layout, block_size)

    def _segment_blocks(self, peer: KvPeer) -> int:
        return peer.rows.layout.segment_blocks(self._settings.segment_bytes)

    def _local_of(self, peer: KvPeer) -> LocalEnd:
        digests, segment_blocks = self._digests_of(peer), self._segment_blocks(peer)
        return LocalEnd(
            peer.rows,
            segment_blocks,
            self._settings,
            self._listen_host,
            self._memory,
            digests,
            self._tcp_listener,
            peer.encrypt,
        )

    def _digests_of(self, peer: KvPeer) -> BlockDigests | None:
        """Returns the block digests if the pair's blocks have our own size, else None."""
        return self._digests if peer.rows is self._rows else None

    def _has_room(self, new_pair: bool) -> bool:
        """Returns whether there is room for one more session and, if needed, its pair. Pairs that are closing count, because
        each has a thread."""
        pairs = max(len(self._peers), len(self._pairs))
        return len(self._live) < self._settings.sessions_max and not (new_pair and pairs >= self._settings.pairs_max)

    def _make_room(self, offered: tuple[str, ...]) -> None:
        """Drop idle pairs, the least recently used first, until the buffers of one more pair fit. Its size is that of the
        costliest of the offered transports. A busy pair is never dropped: with too few idle ones, the limit is exceeded."""

        def pair_bytes(names: tuple[str, ...]) -> int:
            known = [TRANSPORTS[name] for name in names if name in TRANSPORTS]
            return max((one.pair_bytes(self._settings.segment_bytes) for one in known), default=0)

        peers = sorted(self._peers.values(), key=lambda peer: peer.used_at)
        sizes = [pair_bytes((peer.transport,) if peer.transport else peer.offered) for peer in peers]
        over = sum(sizes) + pair_bytes(offered) - self._settings.pairs_bytes
        for peer, size in zip(peers, sizes, strict=True):
            if over > 0 and peer.ready and not peer.sessions:
                over -= size
                self._drop(peer, "idle, and another pair needs its memory", tell_peer=True)

    def _start_pair(self, peer: KvPeer, how: Listen | Rendezvous) -> None:
        """Start the peer's pair. If this process has no descriptor or thread left for it, drop the peer and fail its
        sessions."""

        def is_current() -> bool:
            return peer.pair is pair

        def broken(reason: str, error: Exception) -> None:
            if is_current() and not peer.dropped:
                self._pair_broke(peer, reason)
            self._pair_failed(error)

        events = PairEvents(
            lambda: self._pair_ready(peer) if is_current() and not peer.dropped else None,
            lambda answers: self._segments_answered(peer, answers),
            broken,
            lambda: self._pair_down(pair),
        )
        name = f"kv-{self._incarnation & 0xFFFF:04x}-{peer.pair_id}"
        try:
            pair = Pair(how, self._local_of(peer), events, name, self._rate_limiter)
        except NoResources as error:
            self.counters["refused_pairs"] += 1
            self._drop(peer, str(error), tell_peer=True)
            return
        peer.pair = pair
        self._pairs.add(pair)
        self._all_down.clear()
        self.counters["pairs"] += 1

    def _give_time_to_meet(self, peer: KvPeer, fault: str) -> None:
        self._stop_timer(peer)
        timeout_s = self._settings.rendezvous_timeout_ms / 1e3
        peer.timer = self._loop.call_later(timeout_s, self._drop, peer, fault, True)

    def _pair_ready(self, peer: KvPeer) -> None:
        """Record that the two ends have met."""
        self._stop_timer(peer)
        peer.ready = True
        self.counters[f"pairs_{peer.transport}"] += 1

    def _pair_broke(self, peer: KvPeer, reason: str) -> None:
        """Count the failure of the peer's current pair, and drop it."""
        self.counters[f"broken_{peer.transport}"] += 1
        self._drop(peer, f"pair {peer.pair_id}, {peer.transport}: {reason}", tell_peer=True)

    def _segments_freed(self, peer: KvPeer) -> None:
        """Called when segments of this pair were answered, so that others may be sent."""

    def _segments_answered(self, peer: KvPeer, answers: Sequence[tuple[SegmentJob, bytes]]) -> None:
        """Count the answered segments and pass them to their sessions. All segments of one session are passed together, which
        saves most of the work."""
        if moved := [job.blocks for job, segment_digest in answers if segment_digest]:
            kv_bytes = sum(moved) * peer.rows.layout.block_bytes
            self.counters["segments"] += len(moved)
            self.counters["bytes"] += kv_bytes
            self.counters[f"bytes_{peer.transport}"] += kv_bytes
        for owner, its in groupby(answers, lambda answer: answer[0].owner):
            if owner is not None:
                self._feed(
                    owner, *(SegmentDone(job.segment, d) if d else SegmentDropped(job.segment) for job, d in its)
                )
        self._segments_freed(peer)

    def _pair_down(self, pair: Pair) -> None:
        self._pairs.discard(pair)
        if not self._pairs:
            self._all_down.set()

    def _drop(self, peer: KvPeer, reason: str, tell_peer: bool) -> None:
        """Drop a peer with its pair and fail its sessions. Sessions with segments in flight end when the pair's thread has
        answered."""
        if peer.dropped:
            return
        peer.dropped = True
        self.counters["pairs_lost"] += 1
        if self._peers.get(peer.incarnation) is peer:
            del self._peers[peer.incarnation]
        self._stop_timer(peer)
        if peer.pair is not None:
            # A process that shuts down does not need proof that no peer writes to its memory any more.
            peer.pair.close(self._settings.segment_timeout_ms if self._closed else None)
        if tell_peer:
            self._send(peer.incarnation, PairClosed(peer.pair_id, reason[:512]), b"")
        for session in list(peer.sessions.values()):
            self._feed(session, PairLost(reason))

    def _stop_timer(self, peer: KvPeer) -> None:
        if peer.timer is not None:
            peer.timer.cancel()
            peer.timer = None
