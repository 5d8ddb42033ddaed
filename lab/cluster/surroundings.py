"""The state that everything in the virtual cluster shares: the clock with its due events, the times of things, and the
requests."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf
from random import Random
from typing import Any

from engine.sampling.finish import finish_reason
from proto.kv import Fetch, FetchRefused
from proto.limits import MAX_CACHE_CHANGES
from proto.messages import CacheEvents, Destination, Message, Prefill, Rejected, Submit, TokenItem, Tokens
from scheduler.lifecycle import RequestState
from worker.ports import TakeChanges

STOP, OTHER = 1, 2  # `STOP` ends an answer before its max_tokens; `OTHER` is any other token
FAILED_STEP_S = 0.005


@dataclass(frozen=True)
class Timing:
    """How long things take. A cost model overrides the methods."""

    prefill_tokens_per_s: float = 8192.0
    prefill_step_s: float = 0.0  # of a step, apart from its tokens
    decode_step_s: float = 0.0  # between two tokens of a stream
    hand_over_s: tuple[float, float] = (0.0, 0.0)
    """Range of the time between a prompt's last step and its KV on the decode worker; the time is drawn evenly from it."""
    report_s: float = 0.0  # from a worker to the coordinator; orders take no time

    def prefill_s(self, tokens: int) -> float:
        """Returns the time of one step with `tokens` prompt tokens."""
        return self.prefill_step_s + tokens / self.prefill_tokens_per_s

    def decode_s(self, streams: int) -> float:
        """Returns the time of one step with `streams` streams."""
        return self.decode_step_s

    def slice_s(self, tokens: int, streams: int) -> float:
        """Returns the time that `tokens` prompt tokens add to a step."""
        return tokens / self.prefill_tokens_per_s


@dataclass(eq=False)
class ClientRequest:
    """A request as its client and its gateway see it."""

    submit: Submit
    prompt: bytes  # packed token ids; empty once it has ended
    output_tokens: tuple[int, ...]  # with which each choice stops
    submitted_s: float
    emitted_tokens: list[int]  # of each choice, so far
    answer_hashes: bytes = b""  # of the full blocks after the prompt's, once it has ended
    decoder: int = 0  # incarnation of its decode worker
    cached_tokens: int = 0  # found in the prefill worker's cache
    state: RequestState | None = None
    rejected: Rejected | None = None
    recomputed_tokens: int = 0  # prompt tokens of attempts after the first
    interruptions: int = 0
    deadly_at: int | None = None  # token of the answer that ends its worker; 0: its prompt does


class ClusterSurroundings(ABC):
    def __init__(self, timing: Timing, seed: int) -> None:
        self.now = 0.0
        self.timing = timing
        self.random = Random(seed)
        self.requests: dict[str, ClientRequest] = {}
        self.ttft_s: dict[str, float] = {}  # in the order of the first tokens
        self._due: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._asked = 0
        self.on_death: Callable[[int], object] = lambda incarnation: None  # of the worker that a request ends

    @abstractmethod
    def receive(self, incarnation: int, message: Message, blob: bytes = b"") -> None:
        """Delivers a message to the coordinator now."""

    @abstractmethod
    def fetch(self, prefill_incarnation: int, decode_incarnation: int, message: Fetch) -> None:
        """A prefill worker asks a decode worker for KV."""

    @abstractmethod
    def refuse_fetch(self, decode_incarnation: int, prefill_incarnation: int, message: FetchRefused) -> None:
        """It has none."""

    def ends_worker(self, request_id: str, tokens: int) -> bool:
        """Whether a worker dies by computing so many tokens of a request's answer; 0: its prompt."""
        deadly_at = self.requests[request_id].deadly_at
        return deadly_at is not None and (tokens >= deadly_at if deadly_at else not tokens)

    # --- time -----------------------------------------------------------------------------------------------------------

    @property
    def next_s(self) -> float:
        """When something is due next; infinite if nothing is."""
        return self._due[0][0] if self._due else inf

    def at(self, when_s: float, what: Callable[..., object], *arguments: Any) -> None:
        """Calls `what` at `when_s`. Calls for the same time happen in the order in which they were added."""
        self._asked += 1
        heappush(self._due, (when_s, self._asked, what, arguments))

    def take_next(self) -> None:
        when_s, _, what, arguments = heappop(self._due)
        self.advance(when_s)
        what(*arguments)

    def advance(self, to_s: float) -> None:
        self.now = max(self.now, to_s)

    # --- answers --------------------------------------------------------------------------------------------------------

    def draw(self, request_id: str, choice: int, index: int) -> int:
        """Token number `index` of an answer, counted from 0."""
        return STOP if index + 1 >= self.requests[request_id].output_tokens[choice] else OTHER

    def emitted(self, request_id: str, attempt: int, choice: int, tokens: int) -> None:
        """Notes that `tokens` tokens of a choice have come to the gateway."""
        request = self.requests[request_id]
        if request.submit.attempt == attempt:
            request.emitted_tokens[choice] = tokens
            if request_id not in self.ttft_s:
                self.ttft_s[request_id] = self.now - request.submitted_s


class ClusterEngine:
    """The engine of a worker, one step after the other. The two roles of a mixed worker share one."""

    def __init__(self, cluster: ClusterSurroundings, timing: Timing) -> None:
        self.timing = timing
        self._cluster = cluster
        self._steps: deque[tuple[float, Callable[..., None], tuple[Any, ...]]] = deque()  # the first one runs
        self.fails_every = 0  # n-th step ends at once with an error; 0: none
        self._begun = 0

    @property
    def busy(self) -> bool:
        return bool(self._steps)

    def fails_now(self) -> bool:
        """Whether the step that begins fails. Counts the steps."""
        self._begun += 1
        return bool(self.fails_every) and self._begun % self.fails_every == 0

    def run(self, took_s: float, ended: Callable[..., None], *arguments: Any) -> None:
        """Runs a step after all steps that were asked for before; calls `ended` when it has run."""
        self._steps.append((took_s, ended, arguments))
        if len(self._steps) == 1:
            self._cluster.at(self._cluster.now + took_s, self._ended)

    def _ended(self) -> None:
        _, ended, arguments = self._steps.popleft()
        if self._steps:
            self._cluster.at(self._cluster.now + self._steps[0][0], self._ended)
        ended(*arguments)


class ClusterRegistration:
    """A worker's link to the coordinator, which keeps the order; as `worker.ports.CoordinatorLink`."""

    def __init__(self, cluster: ClusterSurroundings, incarnation: int) -> None:
        self._cluster, self._incarnation = cluster, incarnation
        self.up = True

    def send(self, message: Message) -> None:
        if self.up:
            cluster = self._cluster
            cluster.at(cluster.now + cluster.timing.report_s, cluster.receive, self._incarnation, message)

    def report_cache(self, take_changes: TakeChanges) -> None:
        inserted, evicted = take_changes(MAX_CACHE_CHANGES)
        if inserted or evicted:
            self.send(CacheEvents(inserted, evicted))


class ClusterGateways:
    """A worker's links to gateways; as `worker.ports.ClusterGateways`."""

    def __init__(self, cluster: ClusterSurroundings) -> None:
        self._cluster = cluster
        self.up = True

    def connect(self, to: Destination) -> None:
        """Does nothing: there is no link to open."""

    def send(self, to: Destination, message: Message) -> None:
        assert isinstance(message, Tokens)
        cluster = self._cluster
        if not self.up:
            return
        for item in message.items:
            if item.cached_tokens:
                cluster.requests[item.request_id].cached_tokens = item.cached_tokens
            cluster.emitted(item.request_id, item.attempt, item.choice, item.index + len(item.tokens))


def first_tokens(cluster: ClusterSurroundings, order: Prefill, cached_tokens: int) -> list[TokenItem]:
    """Returns the first token of each choice of a computed prompt."""
    found = []
    for choice in range(order.first_choice, order.first_choice + order.choices):
        token = cluster.draw(order.request_id, choice, order.resumed_tokens)
        finish = finish_reason(token, order.resumed_tokens + 1, order.sampling)
        found.append(
            TokenItem(
                order.request_id, order.attempt, choice, order.resumed_tokens, (token,), finish, (), cached_tokens
            )
        )
    return found
