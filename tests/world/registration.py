"""A simulated worker's standing link to the coordinator: a thin model of `worker.registration`."""

from collections.abc import Callable

import msgspec

from proto.drain import Drained, Draining, Flip, FlipFailed
from proto.limits import MAX_CACHE_CHANGES
from proto.messages import CacheEvents, Finished, Hello, Message
from proto.parts import Held
from tests.world.links import Client, Link, OnMessage
from tests.world.world import SimulatedProcess
from worker.changeover import Changeover
from worker.service import IN_DOUBT_S, Service

Reports = list[tuple[float, Finished]]


class SimulatedRegistration:
    """A worker's standing link to the coordinator; as `worker.registration.SimulatedRegistration`."""

    def __init__(
        self,
        process: SimulatedProcess,
        hello: Hello,
        *,
        held: Callable[[], tuple[Held, ...]],
        on_message: OnMessage,
        on_lost: Callable[[str], None],
        is_idle: Callable[[], bool],
        on_may_go: Callable[[], None],
        on_registered: Callable[[], None],
        is_quiet: Callable[[], bool],
        changeover: Changeover,
        on_flipped: Callable[[], None],
        finished: Reports,
    ) -> None:
        """`finished`: earlier reports of this process, each with the time at which it was sent."""
        self._process, self._hello, self.held, self._on_lost = process, hello, held, on_lost
        self._on_message, self._is_idle, self._on_may_go = on_message, is_idle, on_may_go
        self._on_registered, self._is_quiet = on_registered, is_quiet
        self._changeover, self._on_flipped = changeover, on_flipped
        changeover.add(self)
        self.service = Service()
        self._finished, self._lost_at = finished, float("inf")
        self._link: Link | None = None
        self._unsaid: list[Message] = []
        self.client = Client(
            process, "coordinator", hello=self._hello_now, on_up=self._up, on_message=self._message, on_down=self._down
        )

    @property
    def up(self) -> bool:
        return self._link is not None

    def send(self, message: Message) -> None:
        if isinstance(message, Finished):
            self._finished.append((self._process.now(), message))
        if self._link is not None:
            self._link.send(message)
        else:
            self._unsaid.append(message)
        self.look()

    def leave(self, grace_s: float) -> None:
        draining = self.service.leave(grace_s, self._process.now())
        self._changeover.ordered(self, None)
        if self._link is not None:
            self._link.send(draining)
        self.look()

    def look(self) -> None:
        service = self.service
        if service.leaving and service.may_go(up=self.up, empty=not self.held() and self._is_idle()):
            self._on_may_go()
        elif self.could_flip:
            self._changeover.look()

    @property
    def could_flip(self) -> bool:
        return self.service.may_flip(empty=not self.held() and self._is_idle() and self._is_quiet())

    def flip(self) -> None:
        self._on_flipped()

    def ready_to_flip(self) -> None:
        self.service.is_ready = True
        self.look()

    def not_ready_to_flip(self) -> None:
        self.service.is_ready = False

    def cannot_flip(self, why: str) -> None:
        self.service.keep_role()
        self._changeover.ordered(self, None)
        self.send(FlipFailed(why))

    def _overdue(self) -> None:
        if self.service.flips_to is not None and self.service.flip_overdue_s(self._process.now()) >= 0.0:
            self.cannot_flip("overdue")

    def _message(self, link: Link, message: Message, blob: bytes) -> None:
        if isinstance(message, Draining | Drained | Flip):
            flips = self.service.flips_to is not None
            self.service.ordered(message, self._process.now())
            if isinstance(message, Flip) and self.service.flips_to is not None:
                self._process.after(-self.service.flip_overdue_s(self._process.now()) + 0.01, self._overdue)
                self._changeover.ordered(self, message.role)
            elif flips and self.service.flips_to is None:
                self._changeover.ordered(self, None)
            self.look()
        else:
            self._on_message(link, message, blob)

    def report_cache(self, take_changes: Callable[[int], tuple[bytes, bytes]]) -> None:
        if self._link is None:
            return
        inserted, evicted = take_changes(MAX_CACHE_CHANGES)
        if inserted or evicted:
            self._link.send(CacheEvents(inserted, evicted))

    def _hello_now(self) -> Hello:
        self._unsaid.clear()
        hand_over_ms = self.service.hand_over_ms(self._process.now())
        return msgspec.structs.replace(self._hello, held=self.held(), hand_over_ms=hand_over_ms)

    def _up(self, link: Link) -> None:
        self._link = link
        if self.service.leaving:
            link.send(self.service.draining(self._process.now()))
        unsaid, self._unsaid = self._unsaid, []
        in_doubt = [message for at, message in self._finished if at >= self._lost_at - IN_DOUBT_S]
        for message in [*in_doubt, *(message for message in unsaid if not isinstance(message, Finished))]:
            link.send(message)
        self._lost_at = float("inf")
        self._on_registered()

    def _down(self, _: Link, reason: str) -> None:
        self._link, self._lost_at = None, self._process.now()
        if self.service.flips_to is not None:
            self._changeover.ordered(self, None)
        self.service.link_lost()
        self._on_lost(reason)
        self.look()
