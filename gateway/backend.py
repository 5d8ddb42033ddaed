"""Drives the stream keeper: links on one side, HTTP requests on the other. Runs on the event loop's thread only."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from gateway.metrics import GatewayMetrics
from gateway.stream_types import (
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
    SendSubmit,
    StreamLimits,
    StreamSpec,
    Tick,
    Why,
    WorkerDown,
)
from gateway.streams import StreamKeeper
from proto.errors import RemoteProtocolError
from proto.messages import Accepted, ClusterState, Hello, Interrupted, Message, Rejected, Role, StatusRequest, Tokens
from proto.status import StatusReport
from runtime import clock, log
from runtime.driver import CoreDriver

_log = log.get("crossdock.gateway")
_REPORT_TIMEOUT_S = 0.5


class ClientLeft(Exception):
    """The HTTP client closed its connection; nobody is left to answer."""


class Sender(Protocol):
    """What the backend needs of a link's peer; `runtime.link.Peer` is one."""

    epoch: int

    def send(self, message: Message, blob: bytes = b"") -> bool: ...


@dataclass
class _Timing:
    """For the latency metrics of one stream."""

    opened_at: float
    token_at: dict[int, float] = field(default_factory=dict)
    """When each choice last got tokens."""


class Subscription:
    """The streams of one HTTP request, their events in the order they came.

    What a slow client has not read yet waits here; the answers' own lengths bound it.
    """

    def __init__(self, backend: "Backend", stream_ids: Sequence[str]) -> None:
        self._backend = backend
        self._open = set(stream_ids)
        self._events: list[Admitted | Deliver | Ended] = []
        self._wake = asyncio.Event()
        self._left = False

    def put(self, event: Admitted | Deliver | Ended) -> None:
        if isinstance(event, Ended):
            self._open.discard(event.stream_id)
        self._events.append(event)
        self._wake.set()

    async def next(self) -> list[Admitted | Deliver | Ended]:
        """All that has come since the last call, at least one event. Raises `ClientLeft`. The keeper bounds the wait."""
        while not self._events and not self._left:
            self._wake.clear()
            await self._wake.wait()
        if self._left:
            raise ClientLeft
        events, self._events = self._events, []
        return events

    def leave(self) -> None:
        """The client is gone: end what is not ended, and wake the reader."""
        self._left = True
        self._wake.set()
        self.close()

    def close(self) -> None:
        """End what is not ended; no harm in calling it again."""
        self._backend.abandon(sorted(self._open))
        self._open.clear()


class Backend:
    def __init__(self, *, model: str, limits: StreamLimits, metrics: GatewayMetrics) -> None:
        self.model = model
        self.keeper = StreamKeeper(limits)
        self.metrics = metrics
        self._driver: CoreDriver[Event, Action] = CoreDriver(self.keeper, perform=self._perform, tick=Tick())
        self._coordinator: Sender | None = None
        self._servable: dict[str, int] = {}
        """Tokens that each hash of a prompt is to cover, for each model; 0 where that is not known."""
        self._subscriptions: dict[str, Subscription] = {}
        self._timings: dict[str, _Timing] = {}
        self._report: asyncio.Future[StatusReport] | None = None

    @property
    def not_ready(self) -> str | None:
        """Why a request would not be served now, or None."""
        if self._coordinator is None:
            return "the coordinator cannot be reached"
        if self.model not in self._servable:
            return "the model needs at least one prefill and one decode worker"
        return None

    @property
    def hash_block_size(self) -> int:
        """Tokens that each hash of a prompt is to cover; 0 while that is not known."""
        return self._servable.get(self.model, 0)

    # --- HTTP side --------------------------------------------------------------------------------------------------

    def open(self, specs: Sequence[StreamSpec]) -> Subscription:
        subscription = Subscription(self, [spec.stream_id for spec in specs])
        now = clock.now()
        for spec in specs:
            self._subscriptions[spec.stream_id] = subscription
            self._timings[spec.stream_id] = _Timing(now)
            self.metrics.prompt_tokens.inc(len(spec.prompt))
        self.metrics.active_streams.set(len(self._subscriptions))
        for spec in specs:
            self._driver.post(Open(spec))
        return subscription

    def abandon(self, stream_ids: Sequence[str]) -> None:
        for stream_id in stream_ids:
            if stream_id in self._subscriptions:
                self._forget(stream_id)
                self._driver.post(ClientGone(stream_id))

    async def cluster_report(self) -> StatusReport | None:
        """What the coordinator says of the cluster; None if it does not in time."""
        if self._coordinator is None:
            return None
        if self._report is None:
            self._report = asyncio.get_running_loop().create_future()
            self._coordinator.send(StatusRequest())
        try:
            async with asyncio.timeout(_REPORT_TIMEOUT_S):
                return await asyncio.shield(self._report)
        except TimeoutError:
            self._report = None
            return None

    def drain(self) -> None:
        """End every stream with an error, and refuse new ones."""
        self._driver.post(Drain())

    def close(self) -> None:
        self._driver.close()

    # --- links --------------------------------------------------------------------------------------------------------

    def coordinator_up(self, peer: Sender, coordinator_epoch: int) -> None:
        self._coordinator = peer
        self.metrics.coordinator_up.set(1)
        self._driver.post(LinkUp(coordinator_epoch))

    def coordinator_down(self, _peer: Sender, _reason: str) -> None:
        self._coordinator = None
        self._servable = {}
        self.metrics.coordinator_up.set(0)
        self._driver.post(LinkDown())

    def coordinator_message(self, _peer: Sender, message: Message, _blob: bytes) -> None:
        match message:
            case Accepted() | Rejected() | Interrupted():
                self._driver.post(message)
            case ClusterState(servable, sizes):
                self._servable = dict.fromkeys(servable, 0) | dict(zip(servable, sizes, strict=False))
            case StatusReport():
                report, self._report = self._report, None
                if report is not None:
                    report.set_result(message)
            case _:
                raise RemoteProtocolError(f"a coordinator may not send {type(message).__name__} to a gateway")

    def refusal(self, hello: Hello) -> str | None:
        """Why a process may not deliver tokens here, or None."""
        if hello.role not in (Role.PREFILL, Role.DECODE):
            return "only workers deliver tokens to a gateway"
        if hello.model != self.model:
            return f"this gateway serves model {self.model!r}"
        return None

    def worker_message(self, _peer: Sender, message: Message, _blob: bytes) -> None:
        if not isinstance(message, Tokens):
            raise RemoteProtocolError(f"a worker may not send {type(message).__name__} to a gateway")
        self._driver.post(message)

    def worker_down(self) -> None:
        self._driver.post(WorkerDown())

    # --- actions --------------------------------------------------------------------------------------------------------

    def _perform(self, action: Action) -> None:
        match action:
            case Deliver():
                self._observe(action)
                self._put(action.stream_id, action)
            case Admitted(stream_id):
                self._put(stream_id, action)
            case Ended(stream_id):
                self._put(stream_id, action)
                self._forget(stream_id)
            case SendSubmit(submit, blob):
                # What does not go out is sent again once the link is back.
                if self._coordinator is not None:
                    self._coordinator.send(submit, blob)
            case SendCancel(cancel):
                if self._coordinator is not None:
                    self._coordinator.send(cancel)
            case Noticed(why, stream_id, detail):
                self.metrics.noticed.labels(why.value).inc()
                emit = _log.debug if why is Why.STALE_TOKENS else _log.info
                emit("stream", request_id=stream_id, what=why.value, detail=detail)

    def _put(self, stream_id: str, event: Admitted | Deliver | Ended) -> None:
        subscription = self._subscriptions.get(stream_id)
        if subscription is not None:
            subscription.put(event)

    def _observe(self, part: Deliver) -> None:
        timing, now = self._timings.get(part.stream_id), clock.now()
        self.metrics.output_tokens.inc(len(part.tokens))
        if timing is None:
            return
        if not timing.token_at:
            self.metrics.ttft.observe(now - timing.opened_at)
        earlier = timing.token_at.get(part.choice)
        if earlier is not None:
            self.metrics.itl.observe(now - earlier)
        timing.token_at[part.choice] = now

    def _forget(self, stream_id: str) -> None:
        self._subscriptions.pop(stream_id, None)
        self._timings.pop(stream_id, None)
        self.metrics.active_streams.set(len(self._subscriptions))
