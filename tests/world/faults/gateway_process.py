"""The simulated gateway process: the production `StreamKeeper`, driven as `gateway.backend` drives it, and its clients."""

from gateway.streams.keeper import StreamKeeper
from gateway.streams.types import (
    Action,
    Admitted,
    ClientGone,
    Deliver,
    Ended,
    Event,
    LinkDown,
    LinkUp,
    Noticed,
    Open,
    SendCancel,
    SendNames,
    SendSubmit,
    Tick,
    TokensReceived,
    Why,
    Work,
    WorkerDown,
)
from gateway.text.block_hashes import BlockNames
from proto.codec import pack_tokens
from proto.errors import RemoteProtocolError
from proto.limits import PROTOCOL_VERSION
from proto.messages import (
    Accepted,
    AttemptTimes,
    ClusterState,
    Hello,
    Interrupted,
    Message,
    Rejected,
    Role,
    Submit,
    Tokens,
    WaitReport,
)
from proto.progress import EndSession
from tests.world.faults.plan import Asked
from tests.world.faults.surroundings import FaultSurroundings
from tests.world.faults.worker_process import MODEL
from tests.world.links import Client, Link, SimulatedServer
from tests.world.world import Alarm, SimulatedProcess


class _Piece:
    __slots__ = ("stop", "text")

    def __init__(self, stop: str) -> None:
        self.text = ""
        self.stop = stop


class _Sink:
    """Receives text in which one token is the stop string."""

    def __init__(self, stop_word: int) -> None:
        self._stop_word = stop_word

    def push(self, token: int) -> _Piece:
        return _Piece("stop" if token == self._stop_word else "")

    def finish(self) -> _Piece:
        return _Piece("")


class SimulatedGateway(SimulatedProcess):
    def __init__(self, cluster: FaultSurroundings, name: str) -> None:
        super().__init__(cluster, name)
        self.cluster = cluster
        self.keeper = StreamKeeper(cluster.plan.stream_limits)
        self.hello = Hello(PROTOCOL_VERSION, Role.GATEWAY, self.incarnation, name, address=name)
        self.ended_workers: set[int] = set()  # incarnations of workers whose connection has ended
        self.worker_links: dict[int, Link] = {}
        self.coordinator: Link | None = None
        self._alarm = Alarm(self, lambda: self.post(Tick()))
        self.client = Client(
            self,
            "coordinator",
            hello=lambda: self.hello,
            on_up=self._coordinator_up,
            on_message=self._coordinator_message,
            on_down=self._coordinator_down,
        )
        self.server = SimulatedServer(
            self,
            name,
            accept=lambda hello: None if hello.role in (Role.PREFILL, Role.DECODE) else "only workers deliver tokens",
            on_up=self._worker_up,
            on_message=self._worker_message,
            on_down=self._worker_down,
        )

    def start(self) -> None:
        self.client.start()

    # --- clients --------------------------------------------------------------------------------------------------------

    def ask(self, asked: Asked) -> None:
        packed = pack_tokens(asked.prompt)
        names = BlockNames.of(packed, min(self.cluster.plan.block_size.values()), asked.tenant.partition("/")[0])
        self.log("client asks", asked.stream_id)
        self.cluster.oracles.opened(asked, self.name)
        submit = Submit(
            asked.stream_id,
            1,
            MODEL,
            len(asked.prompt),
            asked.sampling,
            asked.choices,
            tenant=asked.tenant,
            priority_class=asked.priority_class,
            block_hashes=names.hashes,
            hash_block_size=names.block_size,
            session=asked.session,
        )
        self.post(Open(Work(submit, packed, lambda: _Sink(asked.stop_word), names)))
        if asked.leaves_after_s is not None:
            self.after(asked.leaves_after_s, self.leave, asked.stream_id)
        if asked.session:
            self.after(0.15, self.end_session, asked)

    def end_session(self, asked: Asked) -> None:
        if self.coordinator is not None:
            self.coordinator.send(EndSession(asked.tenant, asked.session))

    def leave(self, stream_id: str) -> None:
        if stream_id in self.keeper.streams:
            self.log("client leaves", stream_id)
            self.world.injected["client leaves"] += 1
            self.cluster.oracles.left(stream_id)
            self.post(ClientGone(stream_id))

    # --- the keeper -----------------------------------------------------------------------------------------------------

    def post(self, event: Event) -> None:
        if isinstance(event, TokensReceived):
            # One item at a time, as the keeper takes them, so that the effects of each can be judged.
            for item in event.items:
                submission = self.keeper.submissions.get(item.request_id)
                stale = submission is None or submission.attempt != item.attempt
                actions = self.keeper.handle(TokensReceived((item,), event.decoder), self.now())
                self.cluster.oracles.tokens_came(item, stale, actions)
                self._perform(actions)
        else:
            if isinstance(event, Interrupted | LinkDown):
                self.cluster.oracles.interrupted(event, self, self.keeper)
            self._perform(self.keeper.handle(event, self.now()))
        self._alarm.set(self.keeper.next_deadline())

    def _perform(self, actions: list[Action]) -> None:
        oracles = self.cluster.oracles
        for action in actions:
            match action:
                case Deliver():
                    oracles.delivered(action)
                case Ended(stream_id, failure):
                    self.log("ends", f"{stream_id} {failure.kind + ': ' + failure.message if failure else 'well'}")
                    oracles.ended(action)
                case SendSubmit(submit, blob):
                    oracles.submitted(submit, self)
                    if self.coordinator is not None:
                        self.coordinator.send(submit, blob)
                case SendCancel(cancel):
                    if self.coordinator is not None:
                        self.coordinator.send(cancel)
                case SendNames(decoder, names):
                    if (worker := self.worker_links.get(decoder)) is not None:
                        worker.send(names)
                case Noticed(why, request_id, detail):
                    self.log(f"{why} {detail}", request_id)
                    if why is Why.BROKEN_STREAM:
                        oracles.broke(request_id, self.now())
                case Admitted(stream_id):
                    oracles.admitted(stream_id)

    # --- links ----------------------------------------------------------------------------------------------------------

    def _coordinator_up(self, link: Link) -> None:
        self.coordinator = link
        self.post(LinkUp(link.incarnation))

    def _coordinator_down(self, _: Link, reason: str) -> None:
        self.coordinator = None
        self.post(LinkDown())

    def _coordinator_message(self, _: Link, message: Message, __: bytes) -> None:
        match message:
            case Accepted() | Rejected() | Interrupted():
                self.post(message)
            case ClusterState() | WaitReport() | AttemptTimes():
                pass
            case _:
                raise RemoteProtocolError(f"a coordinator may not send {type(message).__name__} to a gateway")

    def _worker_up(self, link: Link) -> None:
        self.worker_links[link.incarnation] = link
        if link.incarnation in self.ended_workers:
            self.ended_workers.remove(link.incarnation)
            self.post(WorkerDown(link.incarnation))

    def _worker_down(self, link: Link, _reason: str) -> None:
        if self.worker_links.get(link.incarnation) is link:
            del self.worker_links[link.incarnation]
        self.ended_workers.add(link.incarnation)
        self.post(WorkerDown(link.incarnation))

    def _worker_message(self, link: Link, message: Message, _: bytes) -> None:
        if not isinstance(message, Tokens):
            raise RemoteProtocolError(f"a worker may not send {type(message).__name__} to a gateway")
        self.post(TokensReceived(message.items, link.incarnation if link.hello.role is Role.DECODE else 0))
