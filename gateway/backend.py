"""Drives the stream keeper: links on one side, HTTP requests on the other. Runs on the event loop's thread only."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Final, Protocol

from gateway.metrics import GatewayMetrics, StreamTimes
from gateway.streams.keeper import StreamKeeper
from gateway.streams.types import (
    Action,
    Admitted,
    ClientGone,
    Deliver,
    Drain,
    Ended,
    Event,
    LinkDown,
    LinkUp,
    Noticed,
    Open,
    SendCancel,
    SendNames,
    SendSubmit,
    Shutdown,
    StreamLimits,
    StreamPlaced,
    Tick,
    TokensReceived,
    Why,
    Work,
    WorkerDown,
)
from gateway.tracing.tracer import Tracer
from proto.errors import RemoteProtocolError
from proto.messages import (
    Accepted,
    AttemptTimes,
    ClusterState,
    Hello,
    Interrupted,
    Message,
    Rejected,
    Role,
    Tokens,
    WaitReport,
)
from proto.parts import Room
from proto.progress import EndSession, PromptLogprobs
from runtime.link.peer import Peer
from runtime.process import clock, log
from runtime.process.driver import CoreDriver
from runtime.process.version import version_of

_log = log.get("crossdock.gateway")
_KINDS_MAX: Final = 64
_ENDED_WORKERS_MAX: Final = 1024


class LinkPeer(Protocol):
    """The methods of a link's peer that the backend needs. `runtime.link.peer.Peer` has them."""

    incarnation: int

    def send(self, message: Message, blob: bytes = b"") -> bool: ...


Receiver = Callable[
    [Admitted | StreamPlaced | Deliver | Ended], None
]  # gets the events of its streams in the order in which they came


class Backend:
    def __init__(
        self, *, model: str, limits: StreamLimits, metrics: GatewayMetrics, more_models: Sequence[str] = ()
    ) -> None:
        self.model = model
        self.models = (model, *more_models)
        self.keeper = StreamKeeper(limits)
        self.metrics = metrics
        self._driver: CoreDriver[Event, Action] = CoreDriver(self.keeper, perform=self._perform, tick=Tick())
        self._ended_workers: OrderedDict[int, None] = OrderedDict()  # by incarnation, the latest last
        self._worker_peers: dict[int, Peer] = {}  # Workers that are connected, by incarnation
        self._kinds: dict[str, set[tuple[str, str]]] = {name: set() for name in self.models}
        self._fingerprints: dict[str, str] = {}
        self._coordinator: LinkPeer | None = None
        self._servable: frozenset[str] = frozenset()
        self._hash_block_sizes: dict[str, int] = {}  # tokens that each hash of a prompt covers, by model
        self.hash_key = b""  # The cluster's key for the hashes of prompts, as the coordinator says it
        self.on_room: Callable[[str, Room], None] = lambda _model, _room: None  # the largest request of a model
        self._receivers: dict[str, Receiver] = {}
        self._times: dict[str, StreamTimes] = {}
        self.tracer: Tracer | None = None
        self._draining = False
        self._empty = asyncio.Event()
        metrics.active = lambda: len(self._receivers)

    @property
    def not_ready(self) -> str | None:
        """Why a request would not be served now, or None."""
        if self._draining:
            return "this gateway is shutting down"
        if self._coordinator is None:
            return "the coordinator cannot be reached"
        if self._servable.isdisjoint(self.models):
            return "the model needs at least one prefill and one decode worker that is up and not draining"
        return None

    def load(self) -> tuple[int, int]:
        """(events handled so far, requests alive)"""
        return self._driver.events, len(self._receivers)

    @property
    def coordinator_is_up(self) -> bool:
        return self._coordinator is not None

    def hash_block_size(self, model: str) -> int:
        """Tokens that each hash of a prompt is to cover; 0 while that is not known."""
        return self._hash_block_sizes.get(model, 0)

    def system_fingerprint(self, model: str) -> str | None:
        """Returns a digest of everything that decides whether two answers can be equal: the model's files, the kernel
        fingerprints and the version. Returns None until a worker has connected. A worker of a new kind changes the digest."""
        return self._fingerprints.get(model)

    # --- HTTP side --------------------------------------------------------------------------------------------------

    def open(self, works: Sequence[Work], receiver: Receiver) -> None:
        """Begin these streams. `receiver` gets their events until they end or are abandoned."""
        now = clock.now()
        if self.tracer is not None:
            self.tracer.opened(works[0].stream_id, now)
        for work in works:
            submit = work.submit
            self._receivers[work.stream_id] = receiver
            measured = "" if work.is_offline else submit.tenant
            self._times[work.stream_id] = StreamTimes(self.metrics, measured, submit.prompt_tokens, now, submit.model)
        for work in works:
            self._driver.post(Open(work))

    def abandon(self, stream_ids: Sequence[str]) -> None:
        for stream_id in stream_ids:
            if stream_id in self._receivers:
                self._forget(stream_id).left()
                self._driver.post(ClientGone(stream_id))

    def end_session(self, tenant: str, name: bytes) -> bool:
        """Tell the coordinator that the client has ended a session. Returns False if the coordinator is not connected."""
        if self._coordinator is not None:
            self._coordinator.send(EndSession(tenant, name))
        return self._coordinator is not None

    def drain(self) -> None:
        """Refuse new streams; those that run go on."""
        self._draining = True
        self._driver.post(Drain())

    def shut_down(self) -> None:
        """End every stream with an error."""
        self._driver.post(Shutdown())

    async def emptied(self) -> None:
        """Wait until no stream is left. Only one caller may wait, and only after new streams are refused."""
        while self._receivers:
            self._empty.clear()
            await self._empty.wait()

    def close(self) -> None:
        self._driver.close()

    # --- links --------------------------------------------------------------------------------------------------------

    def coordinator_up(self, peer: LinkPeer, coordinator_incarnation: int) -> None:
        self._coordinator = peer
        self._driver.post(LinkUp(coordinator_incarnation))

    def coordinator_down(self, _peer: LinkPeer, _reason: str) -> None:
        self._coordinator = None
        self._servable = frozenset()
        self._driver.post(LinkDown())

    def coordinator_message(self, _peer: LinkPeer, message: Message, _blob: bytes) -> None:
        match message:
            case Accepted() | Rejected() | Interrupted():
                if self.tracer is not None and isinstance(message, Rejected):
                    self.tracer.rejected(message)
                self._driver.post(message)
            case WaitReport(request_id, attempt, waits):
                submission = self.keeper.submissions.get(request_id)
                if submission is not None and submission.attempt == attempt:
                    self._put(submission.stream.id, StreamPlaced(submission.stream.id, waits))
            case AttemptTimes():
                if self.tracer is not None:
                    self.tracer.times_came(message)
            case ClusterState(servable, sizes, hash_key, rooms):
                self.hash_key = hash_key or self.hash_key
                for model, room in zip(servable, rooms, strict=False):
                    self.on_room(model, room)
                self._servable = frozenset(servable)
                self._hash_block_sizes |= zip(servable, sizes, strict=False)
            case _:
                raise RemoteProtocolError(f"a coordinator may not send {type(message).__name__} to a gateway")

    def refusal(self, hello: Hello) -> str | None:
        """Why a process may not deliver tokens here, or None."""
        if hello.role not in (Role.PREFILL, Role.DECODE):
            return "only workers deliver tokens to a gateway"
        if hello.model_id not in self.models:
            return f"this gateway serves {', '.join(map(repr, self.models))}"
        return None

    def worker_message(self, peer: Peer, message: Message, _blob: bytes) -> None:
        if isinstance(message, PromptLogprobs):
            submission = self.keeper.submissions.get(message.request_id)
            scores = submission.stream.work.prompt_scores if submission is not None else None
            if scores is not None:
                scores.take(message)
        elif isinstance(message, Tokens):
            decoder = peer.incarnation if peer.hello.role is Role.DECODE else 0
            self._driver.post(TokensReceived(message.items, decoder, peer.hello.model))
        else:
            raise RemoteProtocolError(f"a worker may not send {type(message).__name__} to a gateway")

    def worker_up(self, peer: Peer) -> None:
        self._know(peer.hello)
        self._worker_peers[peer.incarnation] = peer
        if self._ended_workers.pop(peer.incarnation, 0) is None:
            # This gateway may have seen the connection's end long before the worker, which went on sending on it. Those
            # messages are lost, and may include the end of a stream that began meanwhile.
            self._driver.post(WorkerDown(peer.incarnation))

    def _know(self, hello: Hello) -> None:
        model = hello.model_id
        kinds, kind = self._kinds.get(model, set()), (hello.fingerprint, hello.numerics)
        if kind not in kinds and len(kinds) < _KINDS_MAX:
            kinds.add(kind)
            text = repr((version_of(), model, sorted(kinds)))
            self._fingerprints[model] = f"fp_{blake2b(text.encode(), digest_size=6).hexdigest()}"

    def worker_down(self, peer: Peer) -> None:
        if self._worker_peers.get(peer.incarnation) is peer:
            del self._worker_peers[peer.incarnation]
        self._ended_workers.pop(peer.incarnation, None)
        self._ended_workers[peer.incarnation] = None
        if len(self._ended_workers) > _ENDED_WORKERS_MAX:
            self._ended_workers.popitem(last=False)
        self._driver.post(WorkerDown(peer.incarnation))

    # --- actions --------------------------------------------------------------------------------------------------------

    def _perform(self, action: Action) -> None:
        match action:
            case Deliver(stream_id, choice):
                times = self._times.get(stream_id)
                if times is not None:
                    times.delivered(choice, len(action.tokens), action.cached_tokens, clock.now())
                if self.tracer is not None:
                    self.tracer.delivered(stream_id, choice, action.finish, clock.now())
                self._put(stream_id, action)
            case Admitted(stream_id):
                self._put(stream_id, action)
            case Ended(stream_id, failure):
                self._put(stream_id, action)
                if stream_id in self._receivers:
                    self._forget(stream_id).ended(failure, clock.now())
            case SendSubmit(submit, blob):
                if self.tracer is not None:
                    self.tracer.submitted(submit, clock.now())
                # A message that cannot be sent now is sent again when the link is up again.
                if self._coordinator is not None:
                    self._coordinator.send(submit, blob)
            case SendCancel(cancel):
                if self._coordinator is not None:
                    self._coordinator.send(cancel)
            case SendNames(decoder, names):
                if (worker := self._worker_peers.get(decoder)) is not None:
                    worker.send(names)
            case Noticed(why, stream_id, detail):
                self.metrics.noticed.labels(why.value).inc()
                emit = _log.debug if why is Why.STALE_TOKENS else _log.info
                emit("stream", request_id=stream_id, what=why.value, detail=detail)

    def _put(self, stream_id: str, event: Admitted | StreamPlaced | Deliver | Ended) -> None:
        if (receiver := self._receivers.get(stream_id)) is not None:
            receiver(event)

    def _forget(self, stream_id: str) -> StreamTimes:
        del self._receivers[stream_id]
        if not self._receivers:
            self._empty.set()
        return self._times.pop(stream_id)
