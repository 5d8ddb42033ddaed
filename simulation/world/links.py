"""Links over the simulated network: a thin model of `runtime.link.server`, `runtime.link.connection_pool` and
`runtime.worker.registration`, whose code is bound to sockets and an event loop. The same rules: Hello first and once, a
version and an incarnation on each link, one connection is one link, a lost one is told once, a client comes back with a new
connection and a new Hello, what is sent to a link that is gone is gone. Heartbeats are not sent one by one:
`Network.suspect` knows who would miss them.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from proto.drain import Drained, Draining
from proto.errors import RemoteProtocolError
from proto.held import Held
from proto.limits import MAX_CACHE_CHANGES, PROTOCOL_VERSION
from proto.messages import Bye, CacheEvents, Hello, Message, Refused, Role, Welcome
from proto.messages import Peer as Destination
from runtime.worker.service import Service
from simulation.world.network import CLIENT, SERVER, Handler, Wire, network_of
from simulation.world.world import Process, Timer

CLOSED_NOTICE_S = 0.02
HANDSHAKE_S = 5.0
RECONNECT_S, RECONNECT_S_MAX = 0.05, 1.0
HEARTBEAT_MS = 500


@dataclass(eq=False)
class Link:
    """The other end, as `runtime.link.peer.Peer`."""

    incarnation: int
    hello: Hello
    wire: Wire
    side: int
    open: bool = True

    def send(self, message: Message, blob: bytes = b"") -> bool:
        if self.open:
            self.wire.send(self.side, message, blob)
        return self.open


OnMessage = Callable[[Link, Message, bytes], None]
OnDown = Callable[[Link, str], None]


class Server:
    def __init__(
        self,
        process: Process,
        address: str,
        *,
        accept: Callable[[Hello], str | None],
        on_up: Callable[[Link], None],
        on_message: OnMessage,
        on_down: OnDown,
    ) -> None:
        self.process = process
        self.links: dict[Wire, Link] = {}
        self.protocol_errors = 0
        self._accept, self._on_up, self._on_message, self._on_down = accept, on_up, on_message, on_down
        network = network_of(process)
        network.listeners[address] = Handler(
            process, self._frame, self._closed, self.links.__contains__, self._failure_detector
        )

    def drop(self, link: Link, reason: str) -> None:
        if self.links.pop(link.wire, None) is None:
            return
        link.open = False
        link.wire.send(SERVER, Refused(reason[:500]))
        self.process.log(f"drops {link.hello.name}", reason)
        self._on_down(link, reason)

    def _frame(self, wire: Wire, message: Message, blob: bytes) -> None:
        link = self.links.get(wire)
        try:
            if link is None:
                self._shake_hands(wire, message)
            elif isinstance(message, Bye):
                self.drop(link, f"said goodbye: {message.reason}")
            elif isinstance(message, Hello | Welcome | Refused):
                raise RemoteProtocolError(f"unexpected {type(message).__name__}")
            else:
                self._on_message(link, message, blob)
        except RemoteProtocolError as error:
            self.protocol_errors += 1
            if link is not None:
                self.drop(link, f"protocol error: {error}")

    def _shake_hands(self, wire: Wire, message: Message) -> None:
        if not isinstance(message, Hello):
            wire.send(SERVER, Refused("say Hello first"))
            return
        refusal = self._accept(message)
        if refusal is not None:
            wire.send(SERVER, Refused(refusal[:500]))
            return
        link = self.links[wire] = Link(message.incarnation, message, wire, SERVER)
        link.send(Welcome(self.process.incarnation, HEARTBEAT_MS))
        self._on_up(link)
        network_of(self.process).suspect(wire, SERVER)

    def _closed(self, wire: Wire) -> None:
        self.process.after(CLOSED_NOTICE_S, self._gone, wire, "send failed")

    def _failure_detector(self, wire: Wire, seconds: float) -> None:
        self._gone(wire, f"no heartbeat for {seconds:.1f} s")

    def _gone(self, wire: Wire, reason: str) -> None:
        link = self.links.get(wire)
        if link is not None:
            self.drop(link, reason)


class Client:
    """One peer at a time, connected again with backoff until closed."""

    def __init__(
        self,
        process: Process,
        address: str,
        *,
        hello: Callable[[], Hello],
        on_up: Callable[[Link], None],
        on_message: OnMessage,
        on_down: OnDown,
    ) -> None:
        self.process = process
        self.address = address
        self._hello, self._on_up, self._on_message, self._on_down = hello, on_up, on_message, on_down
        self._handler = Handler(process, self._frame, self._wire_closed, self._is_up, self._failure_detector)
        self._wire: Wire | None = None
        self._link: Link | None = None
        self._timer: Timer | None = None
        self._pause_s = RECONNECT_S
        self._over = False

    def start(self) -> None:
        if self._over:
            return
        self._wire = network_of(self.process).connect(self._handler, self.address)
        if self._wire is None:
            self.process.after(0.001, self._again)
            return
        self._wire.send(CLIENT, self._hello())
        self._timer = self.process.after(HANDSHAKE_S, self._give_up, self._wire, "no answer")

    def close(self) -> None:
        self._over = True
        if self._link is not None:
            self._link.send(Bye("shutting down"))
            self._link.open = False
            self._link = None
        self._end_wire()

    def _is_up(self, wire: Wire) -> bool:
        return wire is self._wire and self._link is not None and self._link.open

    def _frame(self, wire: Wire, message: Message, blob: bytes) -> None:
        link = self._link
        if wire is not self._wire or (link is not None and not link.open):
            return
        if link is None:
            self._answered(wire, message)
            return
        if isinstance(message, Refused | Bye):
            self._give_up(wire, message.reason)
            return
        try:
            if isinstance(message, Hello | Welcome):
                raise RemoteProtocolError(f"unexpected {type(message).__name__}")
            self._on_message(link, message, blob)
        except RemoteProtocolError as error:
            self._give_up(wire, f"protocol error: {error}")

    def _answered(self, wire: Wire, message: Message) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if not isinstance(message, Welcome):
            self._give_up(wire, f"answered with {type(message).__name__}")
            return
        self._pause_s = RECONNECT_S
        self._link = Link(message.incarnation, self._hello_of(message), wire, CLIENT)
        self._on_up(self._link)
        if wire.silent(CLIENT):
            network_of(self.process).suspect(wire, CLIENT)

    def _hello_of(self, welcome: Welcome) -> Hello:
        return Hello(PROTOCOL_VERSION, Role.COORDINATOR, welcome.incarnation, self.address)

    def _wire_closed(self, wire: Wire) -> None:
        self.process.after(CLOSED_NOTICE_S, self._give_up, wire, "connection closed")

    def _failure_detector(self, wire: Wire, seconds: float) -> None:
        self._give_up(wire, f"no heartbeat for {seconds:.1f} s")

    def _give_up(self, wire: Wire, reason: str) -> None:
        """Nothing goes out any more; the owner hears of it in an event of its own."""
        if wire is not self._wire or (self._link is not None and not self._link.open):
            return
        if self._timer is not None:
            self._timer.cancel()
        if self._link is not None:
            self._link.open = False
        self.process.after(0.0005, self._down, wire, reason)

    def _down(self, wire: Wire, reason: str) -> None:
        if wire is not self._wire or self._over:
            return
        self._end_wire()
        link, self._link = self._link, None
        if link is not None:
            self.process.log(f"loses {self.address}", reason)
            self._on_down(link, reason)
        self._again()

    def _again(self) -> None:
        pause_s = self._pause_s * self.process.world.random.uniform(0.5, 1.0)
        self._pause_s = min(2 * self._pause_s, RECONNECT_S_MAX)
        self.process.after(pause_s, self.start)

    def _end_wire(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        wire, self._wire = self._wire, None
        if wire is not None:
            wire.close(CLIENT)


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
