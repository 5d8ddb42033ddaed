"""Connections between simulated processes, and what can happen to them. Modelled on ZeroMQ over TCP:

- A connection is ordered and loses nothing while it lives. It dies as a whole, and the last messages may be lost with it.
  Either both ends hear of its end, or neither does (`hole`), and then heartbeats show it.
- A partition holds frames back, as TCP does, in one direction or both; they arrive when it ends, if the connection lives.
- If a process is killed, its kernel closes its connections after all messages that it had sent, or after a part of them. A
  stopped process sends nothing, and gets the messages for it when it goes on.
- `hostile` stands for no real network: single frames of a live connection are lost, doubled and swapped. It shows that
  handlers are idempotent. Connections that lost frames are broken when healing begins, since nothing else can repair them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from proto.codec import decode, to_frames
from proto.messages import Bye, Hello, Message, Welcome
from tests.world.world import SimulatedProcess, World

Frame = tuple[Message, bytes]


CLIENT, SERVER = SIDES = 0, 1


@dataclass
class FrameHandler:
    """One end's reaction to what comes over a connection."""

    process: SimulatedProcess
    on_frame: Callable[["Wire", Message, bytes], None]
    on_closed: Callable[["Wire"], None]
    is_up: Callable[["Wire"], bool]
    """Whether heartbeats of this end would arrive."""
    on_suspicion: Callable[["Wire", float], None]


@dataclass(frozen=True)
class Hostility:
    drop: float = 0.0
    double: float = 0.0
    swap: float = 0.0


class Wire:
    """One connection, from its first SYN to its end. `side` and `sender` name the sending side."""

    def __init__(self, network: "Network", client: FrameHandler, server: FrameHandler) -> None:
        self.network = network
        self.ends = (client, server)
        self.closed = [False, False]
        """Whether each side has closed its end, or has heard that the other end has."""
        self.hole = [False, False]
        """Whether messages from each side vanish."""
        self.robbed = False
        self._last = [0.0, 0.0]
        self._stuck: tuple[list[Frame | None], list[Frame | None]] = ([], [])

    @property
    def processes(self) -> tuple[SimulatedProcess, SimulatedProcess]:
        return self.ends[0].process, self.ends[1].process

    def send(self, side: int, message: Message, blob: bytes = b"") -> None:
        if self.closed[side] or self.hole[side]:
            return
        message, blob = decode(to_frames(message, blob))  # as on a socket: a value out of its range ends the link
        hostility, random = self.network.hostility, self.network.world.random
        if hostility is not None and not isinstance(message, Hello | Welcome):
            chance = random.random()
            if chance < hostility.drop:
                self.robbed = True
                self.network.count("frame dropped", message)
                return
            chance -= hostility.drop
            if chance < hostility.double:
                self.network.count("frame doubled", message)
                self._pass(side, (message, blob), random.choice((0.0, 0.02)))
            elif chance - hostility.double < hostility.swap:
                self.robbed = True  # a frame that comes too early may be ignored for good
                self.network.count("frame late", message)
                self._pass(side, (message, blob), random.uniform(0.0, 0.03), keep_order=False)
                return
        self._pass(side, (message, blob))

    def close(self, side: int) -> None:
        """Closes this end; the other end hears of it after the messages that were sent before."""
        if not self.closed[side]:
            self.closed[side] = True
            if not self.hole[side]:
                self._pass(side, None)
        self.network.forget_if_over(self)

    def cut(self, lose: float) -> None:
        """Cuts the connection. Both ends hear of it; the last of the messages on their way may be lost."""
        for side in SIDES:
            if self.network.world.random.random() < lose:
                self.hole[side] = True
            self.network.world.after(self.network.latency(self, side), self._reset, side)

    def release(self, side: int) -> None:
        """Lets messages go on that a partition held back; later messages wait behind them."""
        if self._stuck[side]:
            self.network.world.after(self.network.latency(self, side), self._drain, side)

    def _drain(self, side: int) -> None:
        stuck = self._stuck[side][:]
        self._stuck[side].clear()
        for frame in stuck:
            self._arrive(side, frame)

    def silent(self, side: int) -> bool:
        """Whether this side hears nothing from the other side."""
        other = self.ends[1 - side]
        return (
            self.hole[1 - side]
            or not other.process.alive
            or other.process.paused
            or self.network.blocked(other.process, self.ends[side].process)
            or not other.is_up(self)
        )

    def _reset(self, side: int) -> None:
        if not self.closed[side]:
            self.closed[side] = True
            self.ends[side].process.call(self.ends[side].on_closed, self)
        self.network.forget_if_over(self)

    def _pass(self, side: int, frame: Frame | None, more_s: float = 0.0, keep_order: bool = True) -> None:
        network = self.network
        at = network.world.now + network.latency(self, side) + more_s
        if keep_order:
            at = self._last[side] = max(at, self._last[side] + 1e-6)
        network.world.at(at, self._arrive, side, frame)

    def _arrive(self, side: int, frame: Frame | None) -> None:
        receiver = self.ends[1 - side]
        if self.closed[1 - side] or self.hole[side] or not receiver.process.alive:
            return
        if self._stuck[side] or self.network.blocked(self.ends[side].process, receiver.process):
            self._stuck[side].append(frame)
        elif frame is None:
            receiver.process.call(self._hear_close, 1 - side)
        else:
            receiver.process.call(self._hear, 1 - side, frame)

    def _hear(self, side: int, frame: Frame) -> None:
        if not self.closed[side]:
            self.ends[side].process.log("<- " + self.ends[1 - side].process.name, frame[0])
            self.ends[side].on_frame(self, *frame)

    def _hear_close(self, side: int) -> None:
        if not self.closed[side]:
            self.closed[side] = True
            self.ends[side].on_closed(self)
        self.network.forget_if_over(self)


class Network:
    def __init__(self, world: World) -> None:
        self.world = world
        self.hostility: Hostility | None = None
        self.listeners: dict[str, FrameHandler] = {}
        """Listeners by address."""
        self.wires: list[Wire] = []
        self.corrupt = 0.0
        """Chance that a segment arrives damaged."""
        self.rendezvous: dict[str, Any] = {}
        """Ends of pairs that wait for their other end, by secret."""
        self.slow: dict[str, float] = {}
        """Added latency of all that a process (by name) sends, in seconds."""
        self._cuts: list[tuple[str, str]] = []
        """(from, to), by name; an empty name stands for all processes."""

    def connect(self, client: FrameHandler, address: str) -> Wire | None:
        """Connects to an address. Returns None if no process listens there. If the way is blocked, the first frame shows
        it."""
        server = self.listeners.get(address)
        if server is None or not server.process.alive:
            return None
        wire = Wire(self, client, server)
        self.wires.append(wire)
        return wire

    def latency(self, wire: Wire, side: int) -> float:
        base = self.world.random.uniform(0.0001, 0.001)
        return base + self.slow.get(wire.ends[side].process.name, 0.0) if self.slow else base

    def blocked(self, source: SimulatedProcess, target: SimulatedProcess) -> bool:
        return bool(self._cuts) and any(
            a in ("", source.name) and b in ("", target.name) and source.name != target.name for a, b in self._cuts
        )

    def partition(self, *ways: tuple[str, str]) -> None:
        self._cuts += ways
        self.suspect_all()

    def mend(self, *ways: tuple[str, str]) -> None:
        for way in ways:
            self._cuts.remove(way)
        for wire in list(self.wires):
            for side in SIDES:
                if not self.blocked(wire.ends[side].process, wire.ends[1 - side].process):
                    wire.release(side)

    def suspect_all(self) -> None:
        """Lets the other ends of silent processes notice the silence, as `runtime.link.failure_detector` does."""
        for wire in list(self.wires):
            for side in SIDES:
                if wire.silent(side):
                    self.suspect(wire, side)

    def suspect(self, wire: Wire, side: int) -> None:
        since, end = self.world.now, wire.ends[side]
        end.process.after(self.world.random.uniform(1.5, 2.0), self._look, wire, side, since)

    def _look(self, wire: Wire, side: int, since: float) -> None:
        end = wire.ends[side]
        if wire.closed[side] or not end.is_up(wire) or not wire.silent(side):
            return
        if self.world.now - end.process.resumed_at < 0.3:
            # The process was stopped itself, so unread messages may contain a heartbeat.
            end.process.after(self.world.random.uniform(0.3, 0.6), self._look, wire, side, since)
            return
        end.on_suspicion(wire, self.world.now - since)

    def process_died(self, process: SimulatedProcess, *, in_order: bool = False) -> None:
        """Closes what the process had open, as its kernel would. `in_order`: it has said goodbye, and nothing that it sent is
        lost."""
        for address, handler in list(self.listeners.items()):
            if handler.process is process:
                del self.listeners[address]
        for wire in list(self.wires):
            for side in SIDES:
                if wire.ends[side].process is process:
                    if in_order:
                        wire.send(side, Bye("shutting down"))
                        wire.close(side)
                    elif self.world.random.random() < 0.5:
                        wire.cut(0.5)
                    else:
                        wire.close(side)

    def break_robbed(self) -> None:
        for wire in list(self.wires):
            if wire.robbed or True in wire.hole:
                wire.cut(0.0)

    def forget_if_over(self, wire: Wire) -> None:
        if all(wire.closed) and wire in self.wires:
            self.wires.remove(wire)

    def count(self, what: str, message: Message) -> None:
        self.world.injected[what] += 1
        self.world.log("network", what, message)


class NetworkedWorld(World):
    """A world whose processes reach each other over a network."""

    network: Network


def network_of(process: SimulatedProcess) -> Network:
    assert isinstance(process.world, NetworkedWorld)
    return process.world.network
