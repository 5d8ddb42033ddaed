"""The simulated coordinator process: the production `Core` and `Outbox`, driven as `coordinator.main` drives them. The usage
ledger consists of its rows only: rows that its thread has committed outlive the process, others are lost with it.
"""

from collections import Counter

from coordinator.accounting.billing import Closed, Entry, Opened, Past
from coordinator.core import Core
from coordinator.events import (
    Action,
    Configured,
    Event,
    PeerDown,
    PeerUp,
    ProtocolViolation,
    Received,
    Send,
    StateChanged,
    Tick,
)
from coordinator.outbox import Outbox
from coordinator.policy_versions import tenants_of
from coordinator.recovery.stall_detector import StallDetector
from proto.drain import Drained, Draining, DrainRequest, Flip, FlipRequest
from proto.errors import Interrupt, RemoteProtocolError
from proto.fields import HandOverMs
from proto.limits import PROTOCOL_VERSION
from proto.messages import Hello, Interrupted, Message, Prefill, Reserve, Role, WorkFailed
from runtime.link.failure_detector import FailureDetector
from scheduler.lifecycle import TERMINAL, RequestState
from tests.world.faults.ledger import UNIX_S
from tests.world.faults.oracles import stream_of
from tests.world.faults.surroundings import FaultSurroundings
from tests.world.invariants import check
from tests.world.links import HEARTBEAT_MS, Link, SimulatedServer
from tests.world.world import Alarm, SimulatedProcess, SimulationViolation

CHECK_EVERY = 16
"""Events between two checks of all the core's invariants."""


class CoordinatorProcess(SimulatedProcess):
    def __init__(self, cluster: FaultSurroundings, name: str = "coordinator") -> None:
        super().__init__(cluster, name)
        self.cluster = cluster
        self.core = Core(cluster.plan.limits)
        self.stall_detector = StallDetector(FailureDetector(HEARTBEAT_MS, 0.0).limit_s)
        self.outbox = Outbox()
        self.links: dict[int, Link] = {}
        self.drained: set[int] = set()
        """Workers that this incarnation knows to be drained."""
        self.made_room: Counter[str] = Counter()
        """How often each request was interrupted so that other tenants got their share."""
        self.events = 0
        self._pending: list[Event] = []
        self._busy = False
        self._alarm = Alarm(self, lambda: self.post(Tick()))
        self._entries: list[Entry] = []
        self._writing = False
        self.server: SimulatedServer

    def start(self) -> None:
        self.put_in_force(self.cluster.ledger.past(self.world.now))
        self.server = SimulatedServer(
            self, "coordinator", accept=self.core.refusal, on_up=self._up, on_message=self._message, on_down=self._down
        )
        self.stall_detector.begin(self.now())
        self._look_for_stall()

    def put_in_force(self, past: Past | None = None) -> None:
        versions = self.cluster.versions
        self.post(Configured(tenants_of(versions), UNIX_S + self.world.now - self.now(), past, versions.in_force))

    def _look_for_stall(self) -> None:
        if self.stall_detector.was_away(self.now()):
            self.cluster.begins_anew(self)
        else:
            self.after(self.stall_detector.limit_s / 8, self._look_for_stall)

    # --- the core -------------------------------------------------------------------------------------------------------

    def post(self, event: Event) -> None:
        """As `runtime.process.driver.CoreDriver`."""
        self._pending.append(event)
        if self._busy:
            return
        self._busy = True
        try:
            while self._pending:
                for action in self._handle(self._pending.pop(0)):
                    self._perform(action)
                self._check()
        finally:
            self._busy = False
        self._alarm.set(None if self.stall_detector.away_s else self.core.next_deadline())

    def _handle(self, event: Event) -> list[Action]:
        return [] if self.stall_detector.was_away(self.now()) else self.core.handle(event, self.now())

    def _check(self) -> None:
        self.events += 1
        if self.events % CHECK_EVERY == 0:
            check(self.core)
        self.cluster.oracles.after_decision(self.core)

    def _perform(self, action: Action) -> None:
        match action:
            case Send():
                self._watch(action)
                if self.outbox.pass_or_hold(action):
                    self._send(action)
            case Opened() | Closed():
                self._record_usage(action)
            case StateChanged(request_id, state=RequestState.QUEUED):
                alive = self.core.cluster.requests
                self.cluster.oracles.taken(self.incarnation, alive[request_id].submit, len(alive), self.now())
            case StateChanged(request_id, attempt, state, why):
                if state in TERMINAL:
                    self.log(f"{state.value} {request_id}/{attempt}", why)
                    self.cluster.oracles.moved(self.incarnation, action)
            case ProtocolViolation(incarnation, reason):
                link = self.links.get(incarnation)
                self.cluster.oracles.protocol_violation(incarnation, reason)
                if link is not None:
                    self.after(0.0, self.server.drop, link, reason)

    # --- the ledger ----------------------------------------------------------------------------------------------------

    def _record_usage(self, entry: Entry) -> None:
        if isinstance(entry, Opened):
            self.outbox.opened(entry.request_id)
        self._entries.append(entry)
        if not self._writing:
            self._writing = True
            slow_s = self.cluster.slow_disk_s
            self.after(self.world.random.uniform(0.001, 0.008) + slow_s, self.commit)

    def commit(self) -> None:
        batch, self._entries, self._writing = self._entries, [], False
        for entry in batch:
            self.cluster.ledger.write(entry, self.world.now)
        opened = [entry.request_id for entry in batch if isinstance(entry, Opened)]
        for send in self.outbox.committed(opened):
            self._send(send)

    # --- links ----------------------------------------------------------------------------------------------------------

    def _up(self, link: Link) -> None:
        earlier = self.links.get(link.incarnation)
        if earlier is not None:
            self.server.drop(earlier, "connected again")
        self.outbox.forget(link.incarnation)
        self.links[link.incarnation] = link
        self._heard_of_drain(link.incarnation, link.hello.hand_over_ms)
        self.post(PeerUp(link.incarnation, link.hello))

    def _down(self, link: Link, reason: str) -> None:
        if self.links.get(link.incarnation) is link:
            del self.links[link.incarnation]
            self.outbox.forget(link.incarnation)
            self.post(PeerDown(link.incarnation, reason))

    def _message(self, link: Link, message: Message, blob: bytes) -> None:
        if self.links.get(link.incarnation) is not link:
            raise RemoteProtocolError("this link was replaced by a newer one")
        if isinstance(message, WorkFailed):
            self.cluster.oracles.failed(message)
        if isinstance(message, Draining):
            self._heard_of_drain(link.incarnation, message.hand_over_ms)
        self.post(Received(link.incarnation, message, blob))

    # --- drains ---------------------------------------------------------------------------------------------------------

    def ask(self, request: DrainRequest | FlipRequest) -> None:
        """Sends a request as `crossdock drain` and `flip` do; the answer is the last message on its link."""
        if self.alive:
            self.call(self._asked, request)

    def _asked(self, request: DrainRequest | FlipRequest) -> None:
        observer = Hello(PROTOCOL_VERSION, Role.OBSERVER, 1, "drain")
        self.post(PeerUp(observer.incarnation, observer))
        self.post(Received(observer.incarnation, request))
        self.post(PeerDown(observer.incarnation, "said goodbye"))

    def _heard_of_drain(self, incarnation: int, hand_over_ms: HandOverMs) -> None:
        (self.drained.discard if hand_over_ms is None else self.drained.add)(incarnation)

    def _watch(self, send: Send) -> None:
        """Checks a message when it is decided. A message that waits for its row in the ledger leaves later."""
        match send.message:
            case Draining(hand_over_ms):
                self._heard_of_drain(send.incarnation, hand_over_ms)
            case Flip(_, hand_over_ms):
                self._heard_of_drain(send.incarnation, hand_over_ms)
            case Drained() if send.incarnation in self.core.members.flipping:
                self.cluster.oracles.lets_flip(self.core, send.incarnation)
            case Prefill() | Reserve() if send.incarnation in self.drained:
                name = self.links[send.incarnation].hello.name if send.incarnation in self.links else send.incarnation
                raise SimulationViolation(
                    "draining", f"something new is placed on {name}", stream_of(send.message.request_id)
                )
            case Interrupted(request_id, reason=Interrupt.PREEMPTED, message=why) if "its share" in why:
                self.made_room[request_id] += 1
                if self.made_room[request_id] > 3:
                    raise SimulationViolation(
                        "bounded retries", "it made room for others a fourth time", stream_of(request_id)
                    )

    def _send(self, send: Send) -> None:
        link = self.links.get(send.incarnation)
        if link is not None:
            self.cluster.oracles.said(send.message)
            link.send(send.message, send.blob)
