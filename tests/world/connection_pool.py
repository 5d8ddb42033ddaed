"""Links that a simulated worker opens by itself: a thin model of `runtime.link.connection_pool`."""

from collections.abc import Callable
from dataclasses import dataclass, field

from proto.messages import Destination, Hello, Message
from tests.world.links import HANDSHAKE_S, Client, Link, OnMessage
from tests.world.world import SimulatedProcess, Timer


@dataclass(eq=False)
class _Outlet:
    client: Client
    timer: Timer | None = None
    link: Link | None = None
    waiting: list[tuple[Message, bytes]] = field(default_factory=list)


class SimulatedConnectionPool:
    """Links that a worker opens by itself; as `runtime.link.connection_pool.SimulatedConnectionPool`."""

    def __init__(
        self,
        process: SimulatedProcess,
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
