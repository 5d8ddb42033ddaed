"""KV hand-over between simulated workers: the production sessions under a thin model of their drivers.

`kvtransfer.sender`, `receiver` and `driver` hold tensors, threads and an event loop. Their work around the sessions is
repeated here, with the same order of effects. Pairs are opened, used, dropped and reported as there. Ended sessions answer
late frames, announced blocks are sent and received, and a job's blocks are read when the thread gets to it. `SimulatedPair`
stands for a transport and its thread. There is one transport; choosing and demoting them is not modelled.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvtransfer.session.limits import KvSettings
from kvtransfer.session.session import (
    Action,
    AnnounceOrder,
    LocalAbort,
    PairLost,
    SegmentDone,
    SegmentDropped,
    SendMessage,
    SendSegment,
    SessionEnded,
    Tick,
    Violation,
)
from proto.kv import PairClosed, PairListen
from proto.messages import Message
from tests.world.toy_model import Toy
from tests.world.transfers.connections import PoolProcess, SimulatedPair, TransferJob
from tests.world.world import Timer

TOKEN_BYTES = 256
TRANSPORT = "tcp"
SETTINGS = KvSettings(transports=(TRANSPORT,), segment_bytes=12 * TOKEN_BYTES)
Key = tuple[str, int]


@dataclass(eq=False)
class SimulatedRoute:
    peer_incarnation: int
    pair_id: int
    block_size: int
    """Size of the blocks that cross."""
    ratio: int
    """The number of our blocks to those."""
    pair: SimulatedPair | None = None
    sessions: "dict[Key, SimulatedLive]" = field(default_factory=dict)
    timer: Timer | None = None
    dropped: bool = False
    # of a sender's
    waiting: "deque[tuple[SimulatedLive, SendSegment]]" = field(default_factory=deque)
    ready: bool = False
    announced: int = 0
    # of a receiver's
    order: AnnounceOrder = field(default_factory=AnnounceOrder)
    listening: PairListen | None = None

    @property
    def block_bytes(self) -> int:
        return self.block_size * TOKEN_BYTES


@dataclass(eq=False)
class SimulatedLive:
    key: Key
    session: Any
    """A `SenderSession` or a `ReceiverSession`."""
    route: SimulatedRoute
    timer_at: float = 1e18


class SimulatedDriver:
    """Shared base of both ends; as `kvtransfer.driver.TransferDriver`."""

    def __init__(self, process: PoolProcess, toy: Toy, send: Callable[[int, Message, bytes], None]) -> None:
        self.process = process
        self.toy = toy
        self.violations = 0
        self._send = send
        self._live: dict[Key, SimulatedLive] = {}
        self._ended: dict[Key, SimulatedLive] = {}
        self._routes: dict[int, SimulatedRoute] = {}

    @property
    def idle(self) -> bool:
        return not self._live

    def peer_lost(self, peer_incarnation: int, reason: str) -> None:
        route = self._routes.get(peer_incarnation)
        if route is not None:
            self._drop(route, f"peer lost: {reason}", tell_peer=False)

    def abort(self, request_id: str, attempt: int, reason: str) -> None:
        self._feed_known((request_id, attempt), LocalAbort(reason))

    def break_pair(self) -> None:
        """A fault: the group of one pair fails."""
        pairs = [r.pair for r in self._routes.values() if r.pair is not None and not r.pair.is_down]
        if pairs:
            pairs[0].fail("connection reset")

    def _begin(self, key: Key, session: Any, route: SimulatedRoute) -> SimulatedLive:
        assert key not in self._live and key not in self._ended
        live = self._live[key] = route.sessions[key] = SimulatedLive(key, session, route)
        return live

    def _find(self, peer_incarnation: int, key: Key) -> SimulatedLive | None:
        live = self._live.get(key) or self._ended.get(key)
        return live if live is not None and live.route.peer_incarnation == peer_incarnation else None

    def _feed_known(self, key: Key, event: object) -> None:
        live = self._live.get(key)
        if live is not None:
            self._feed(live, event)

    def _feed(self, live: SimulatedLive, event: object) -> None:
        self._perform(live, live.session.handle(event, self.process.now()))

    def _perform(self, live: SimulatedLive, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, SendMessage):
                self._send(live.route.peer_incarnation, action.message, action.blob)
            elif isinstance(action, Violation):
                self.violations += 1
            elif isinstance(action, SessionEnded):
                self._end(live, action)
            else:
                self._carry_out(live, action)
        if live.key in self._live:
            self._arm(live)

    def _end(self, live: SimulatedLive, ended: SessionEnded) -> None:
        del self._live[live.key]
        del live.route.sessions[live.key]
        self._ended[live.key] = live
        self._report(live, ended)
        live.session.forget_payload()

    def _arm(self, live: SimulatedLive) -> None:
        deadline = live.session.next_deadline()
        if deadline is None or live.timer_at <= deadline:
            return
        live.timer_at = deadline
        self.process.after(deadline - self.process.now(), self._ticked, live, deadline)

    def _ticked(self, live: SimulatedLive, deadline: float) -> None:
        if live.timer_at == deadline and live.key in self._live:
            live.timer_at = 1e18
            self._feed(live, Tick())

    def _answered(self, route: SimulatedRoute, job: TransferJob, digest: bytes | None) -> None:
        if isinstance(job.owner, SimulatedLive):
            done = SegmentDropped(job.segment) if not digest else SegmentDone(job.segment, digest)
            self._feed(job.owner, done)
        self._segment_freed(route)

    def _pair_down(self, route: SimulatedRoute, reason: str) -> None:
        self._drop(route, f"pair {route.pair_id}: {reason}", tell_peer=True)

    def _drop(self, route: SimulatedRoute, reason: str, tell_peer: bool) -> None:
        if route.dropped:
            return
        route.dropped = True
        if self._routes.get(route.peer_incarnation) is route:
            del self._routes[route.peer_incarnation]
        if route.timer is not None:
            route.timer.cancel()
        if route.pair is not None:
            route.pair.close()
        if tell_peer:
            self._send(route.peer_incarnation, PairClosed(route.pair_id, reason[:512]), b"")
        for live in list(route.sessions.values()):
            self._feed(live, PairLost(reason))

    def _carry_out(self, live: SimulatedLive, action: Action) -> None:
        raise NotImplementedError

    def _report(self, live: SimulatedLive, ended: SessionEnded) -> None:
        raise NotImplementedError

    def _segment_freed(self, route: SimulatedRoute) -> None:
        """There is room for another segment on this pair."""
