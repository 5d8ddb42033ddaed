"""The links that a simulated worker opens: to peers when needed, and to its coordinator; see 'links'."""

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from proto.drain import Drained, Draining
from proto.fields import Peer as Destination
from proto.held import Held
from proto.limits import MAX_CACHE_CHANGES
from proto.messages import CacheEvents, Hello, Message
from runtime.worker.service import Service
from simulation.world.links import HANDSHAKE_S, Client, Link, OnMessage
from simulation.world.world import Process, Timer


@dataclass(eq=False)
class _Outlet:
    client: Client
    timer: Timer | None = None
    link: Link | None = None
    waiting: list[tuple[Message, bytes]] = field(default_factory=list)


class ConnectionPool:
    """Links that a worker opens by itself; as `runtime.link.connection_pool.Outbound`."""

    def __init__(
        self,
        process: Process,
        hello: Hello,
        on_message: OnMessage,
        on_lost: Callable[[int, str], None],
        on_idle: Callable[[], None] = lambda: None,
    ) -> None:
        self.process = process
        self._hello, self._on_message, self._on_lost, self._on_idle = hello, on_message, on_lost, on_idle
        self._outlets: dict[int, _Outlet] = {}

    @property
    def idle(self) -> bool:
        return not any(outlet.waiting for outlet in self._outlets.values())

    def connect(self, to: Destination) -> None:
        self._outlet(to)

    def send(self, to: Destination, message: Message, blob: bytes = b"") -> None:
        outlet = self._outlet(to)
        if outlet.link is not None:
            outlet.link.send(message, blob)
        else:
            outlet.waiting.append((message, blob))

    def _outlet(self, to: Destination) -> _Outlet:
        outlet = self._outlets.get(to.incarnation)
        if outlet is not None:
            return outlet
        client = Client(
            self.process,
            to.address,
            hello=lambda: self._hello,
            on_up=lambda link: self._up(to.incarnation, link),
            on_message=self._on_message,
            on_down=lambda _, reason: self._lose(to.incarnation, reason),
        )
        outlet = self._outlets[to.incarnation] = _Outlet(client)
        outlet.timer = self.process.after(HANDSHAKE_S, self._too_late, to.incarnation)
        self.process.after(0.0, client.start)
        return outlet

    def _too_late(self, incarnation: int) -> None:
        outlet = self._outlets.get(incarnation)
        if outlet is not None and outlet.link is None:
            self._lose(incarnation, "could not be reached in time")

    def _up(self, incarnation: int, link: Link) -> None:
        outlet = self._outlets.get(incarnation)
        if outlet is None:
            return
        if link.incarnation != incarnation:
            self._lose(incarnation, "another incarnation answers there")
            return
        outlet.link = link
        if outlet.timer is not None:
            outlet.timer.cancel()
        waiting, outlet.waiting = outlet.waiting, []
        for message, blob in waiting:
            link.send(message, blob)
        if waiting and self.idle:
            self._on_idle()

    def _lose(self, incarnation: int, reason: str) -> None:
        outlet = self._outlets.pop(incarnation, None)
        if outlet is None:
            return
        if outlet.timer is not None:
            outlet.timer.cancel()
        outlet.client.close()
        self._on_lost(incarnation, reason)
        if self.idle:
            self._on_idle()


class Registration:
    """A worker's standing link to the coordinator; as `runtime.worker.registration.Registration`."""

    def __init__(
        self,
        process: Process,
        hello: Hello,
        *,
        held: Callable[[], tuple[Held, ...]],
        on_message: OnMessage,
        on_lost: Callable[[str], None],
        is_idle: Callable[[], bool],
        on_may_go: Callable[[], None],
    ) -> None:
        self._process, self._hello, self.held, self._on_lost = process, hello, held, on_lost
        self._on_message, self._is_idle, self._on_may_go = on_message, is_idle, on_may_go
        self.service = Service()
        self._link: Link | None = None
        self._unsaid: list[Message] = []
        self.client = Client(
            process, "coordinator", hello=self._hello_now, on_up=self._up, on_message=self._message, on_down=self._down
        )

    @property
    def up(self) -> bool:
        return self._link is not None

    def send(self, message: Message) -> None:
        if self._link is not None:
            self._link.send(message)
        else:
            self._unsaid.append(message)
        self.look()

    def leave(self, grace_s: float) -> None:
        draining = self.service.leave(grace_s, self._process.now())
        if self._link is not None:
            self._link.send(draining)
        self.look()

    def look(self) -> None:
        service = self.service
        if service.leaving and service.may_go(up=self.up, empty=not self.held() and self._is_idle()):
            self._on_may_go()

    def _message(self, link: Link, message: Message, blob: bytes) -> None:
        if isinstance(message, Draining | Drained):
            self.service.ordered(message, self._process.now())
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
        for message in unsaid:
            link.send(message)

    def _down(self, _: Link, reason: str) -> None:
        self._link = None
        self.service.link_lost()
        self._on_lost(reason)
        self.look()
