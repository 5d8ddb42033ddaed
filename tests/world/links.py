"""Links over the simulated network: a thin model of `runtime.link.server`, `runtime.link.connection_pool` and
`worker.registration`, whose code is bound to sockets and an event loop. The rules are the same: Hello comes first and
once; each link has a version and an incarnation; one connection is one link, and its loss is reported once. A client comes
back with a new connection and a new Hello. Messages to a link that is gone are lost. Single heartbeats are not sent:
`Network.suspect` knows which processes would miss them.
"""

from collections.abc import Callable
from dataclasses import dataclass

from proto.errors import RemoteProtocolError
from proto.limits import PROTOCOL_VERSION
from proto.messages import Bye, Hello, Message, Refused, Role, Welcome
from tests.world.network import CLIENT, SERVER, FrameHandler, Wire, network_of
from tests.world.world import SimulatedProcess, Timer

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


class SimulatedServer:
    def __init__(
        self,
        process: SimulatedProcess,
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
        network.listeners[address] = FrameHandler(
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
        link.send(Welcome(self.process.incarnation, HEARTBEAT_MS, PROTOCOL_VERSION))
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
    """A client of one peer at a time; it connects again with backoff until it is closed."""

    def __init__(
        self,
        process: SimulatedProcess,
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
        self._handler = FrameHandler(process, self._frame, self._wire_closed, self._is_up, self._failure_detector)
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
        """Gives the link up: nothing goes out any more, and the owner hears of it in an event of its own."""
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
