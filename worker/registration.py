"""A worker's permanent link to the coordinator. It registers the worker, registers it again after a loss, passes orders on,
and reports that the worker leaves."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from itertools import chain
from operator import itemgetter
from typing import Protocol

import msgspec

from proto import limits
from proto.drain import Drained, Draining, Flip, FlipFailed
from proto.messages import CacheEvents, Finished, Hello, Message, Role, Welcome
from proto.parts import Held
from runtime.link.client import LinkClient
from runtime.link.peer import LinkCounters
from runtime.link.server import LinkSettings, Peer, is_orderly
from runtime.link.waiting import WaitNotice
from runtime.process import clock
from runtime.process.driver import Stop
from runtime.process.log import Log
from runtime.settings.workers import WorkerSettings
from worker.service import FLIP_AFTER_S, GO_AFTER_S, IN_DOUBT_S, Service

FINISHED_MAX = 4096


class Registered(Protocol):
    """The part of a worker that its `Registration` uses."""

    def held(self) -> tuple[Held, ...]: ...

    def is_idle(self) -> bool:
        """Returns whether nothing waits to be done or sent, apart from what is `held`. Call `Registration.look` when this
        changes."""

    def is_quiet(self) -> bool:
        """Whether no transfer can touch a block."""

    def order(self, message: Message, blob: bytes) -> None: ...

    def registered(self) -> None: ...

    def coordinator_lost(self, reason: str) -> None: ...

    def flip_ordered(self, role: Role | None) -> None:
        """The coordinator orders a role change, so prepare it and call `ready_to_flip`. None: the order is withdrawn."""

    def may_flip(self) -> None: ...


class Registration:
    def __init__(
        self, owner: Registered, *, settings: WorkerSettings, hello: Hello, log: Log, links: LinkSettings
    ) -> None:
        self._service = Service()
        self._may_go = asyncio.Event()
        self._flipped = asyncio.Event()
        self._owner = owner
        self._flip_timer: asyncio.TimerHandle | None = None
        self._hello = hello
        self._log = log
        self._peer: Peer | None = None
        self._unsaid: list[Message] = []
        """Messages from the time between the last `Hello` and its `Welcome`. That `Hello` still counts the allocations that
        these messages release."""
        self._finished: deque[tuple[float, Finished]] = deque(maxlen=FINISHED_MAX)
        """The latest reports, each with the time at which it was sent. If the coordinator is lost, it may have missed them."""
        self._lost_at = float("inf")
        self._client = LinkClient(
            address=settings.coordinator,
            hello=self._hello_now,
            on_up=self._up,
            on_message=self._message,
            on_down=self._down,
            settings=links,
        )
        self._waiting = WaitNotice(log, settings.coordinator, lambda: self._client.last_error)

    def report_cache(self, take_changes: Callable[[int], tuple[bytes, bytes]]) -> None:
        """Tell the coordinator what a prefix cache has gained and lost; while it is away, the changes stay where they are."""
        if self._peer is None:
            return
        inserted, evicted = take_changes(limits.MAX_CACHE_CHANGES)
        if inserted or evicted:
            self._peer.send(CacheEvents(inserted, evicted))

    async def start(self, address: str) -> None:
        """`address` is where other workers reach this one; empty if they need not."""
        self._hello = msgspec.structs.replace(self._hello, address=address)
        self._waiting.begin()
        await self._client.start()

    async def close(self) -> None:
        if self._flip_timer is not None:
            self._flip_timer.cancel()
        await self._client.close()
        self._waiting.end()

    @property
    def counters(self) -> LinkCounters:
        return self._client.counters

    def not_ready(self) -> str | None:
        """Why this worker gets no work, or None."""
        return None if self.up else "the coordinator cannot be reached"

    @property
    def up(self) -> bool:
        return self._peer is not None

    def send(self, message: Message) -> None:
        """Send a message to the coordinator if it is connected. If not, the next registration reports what is still held.
        Requests that finished while it was away, or so shortly before that it may not have recorded them, are reported again.
        So an answer is charged by its real length, not by an estimate."""
        if isinstance(message, Finished):
            now = clock.now()
            self._finished.append((now, message))
            while self._finished[0][0] < min(now, self._lost_at) - IN_DOUBT_S:
                self._finished.popleft()
        if self._peer is not None:
            self._peer.send(message)
        else:
            self._unsaid.append(message)
        self.look()

    async def leave(self, grace_s: float, stop: Stop) -> None:
        """Drain the worker before it ends. Running streams have `grace_s` seconds to end by themselves before they are handed
        over. The wait is bounded, and a second signal ends it."""
        self._log.info("draining", attempts=len(self._owner.held()), within_s=grace_s)
        draining = self._service.leave(grace_s, clock.now())
        self._keep_role()
        if self._peer is not None:
            self._peer.send(draining)
        self.look()
        await stop.unless_at_once(self._may_go.wait(), grace_s + GO_AFTER_S)
        if left := len(self._owner.held()):
            self._log.warning("ends before it is drained", attempts=left)

    def look(self) -> None:
        """Check whether the worker may end, or may change its role, and act on it."""
        service = self._service
        if service.leaving:
            owed = self._in_doubt()
            if service.may_go(up=self.up, empty=not owed and not self._owner.held() and self._owner.is_idle()):
                self._may_go.set()
        elif self.could_flip:
            self._owner.may_flip()

    # --- change of role -------------------------------------------------------------------------------------------------

    @property
    def could_flip(self) -> bool:
        return self._service.may_flip(empty=not self._owner.held() and self._owner.is_idle() and self._owner.is_quiet())

    def flip(self) -> None:
        """End this registration, since the role change is decided."""
        self._flipped.set()

    async def has_flipped(self) -> None:
        await self._flipped.wait()

    def ready_to_flip(self) -> None:
        self._service.is_ready = True
        self.look()

    def not_ready_to_flip(self) -> None:
        self._service.is_ready = False

    def cannot_flip(self, why: str) -> None:
        """Keep the present role, and report why to the coordinator."""
        self._service.keep_role()
        self._keep_role()
        self._log.error("keeps its role", error=why)
        self.send(FlipFailed(why[:500]))

    def succeeds(self, earlier: "Sequence[Registration]") -> None:
        """Take over the reports of this process's earlier registrations, which the coordinator may not have received."""
        owed = sorted(chain.from_iterable(one._finished for one in earlier), key=itemgetter(0))
        self._finished.extend(owed)

    def _flip(self, order: Flip) -> None:
        self._log.info("changing role", role=order.role, attempts=len(self._owner.held()), within_ms=order.hand_over_ms)
        if self._flip_timer is not None:
            self._flip_timer.cancel()
        after_s = -self._service.flip_overdue_s(clock.now())
        self._flip_timer = asyncio.get_running_loop().call_later(after_s, self._flip_overdue)
        self._owner.flip_ordered(order.role)

    def _flip_overdue(self) -> None:
        if self._service.flips_to is not None and not self._flipped.is_set():
            what = "its new role is not ready" if not self._service.is_ready else "something is left on it"
            self.cannot_flip(f"{what} {FLIP_AFTER_S:.0f} s after the hand-over")

    def _keep_role(self) -> None:
        self._owner.flip_ordered(None)

    def _in_doubt(self) -> list[Finished]:
        """The reports that the lost coordinator may not have received, or not written."""
        return [message for at, message in self._finished if at >= self._lost_at - IN_DOUBT_S]

    def _message(self, peer: Peer, message: Message, blob: bytes) -> None:
        if isinstance(message, Draining | Drained | Flip):
            flips = self._service.flips_to is not None
            self._service.ordered(message, clock.now())
            if isinstance(message, Flip) and self._service.flips_to is not None:
                self._flip(message)
            elif flips and self._service.flips_to is None:
                self._keep_role()
            self.look()
        else:
            self._owner.order(message, blob)

    def _hello_now(self) -> Hello:
        self._unsaid.clear()
        hand_over_ms = self._service.hand_over_ms(clock.now())
        return msgspec.structs.replace(self._hello, held=self._owner.held(), hand_over_ms=hand_over_ms)

    def _up(self, peer: Peer, welcome: Welcome) -> None:
        self._peer = peer
        self._waiting.end()
        if self._service.leaving:
            peer.send(self._service.draining(clock.now()))
        unsaid, self._unsaid = self._unsaid, []
        for message in [*self._in_doubt(), *(message for message in unsaid if not isinstance(message, Finished))]:
            peer.send(message)
        self._lost_at = float("inf")
        self._log.info("registered", coordinator_incarnation=welcome.incarnation)
        self._owner.registered()

    def _down(self, _: Peer, reason: str) -> None:
        self._peer = None
        self._lost_at = clock.now()
        self._waiting.begin()
        if is_orderly(reason):
            self._log.info("coordinator left", reason=reason)
        else:
            self._log.warning("coordinator lost", reason=reason)
        if self._service.flips_to is not None:
            self._keep_role()
        self._service.link_lost()
        self._owner.coordinator_lost(reason)
        self.look()
