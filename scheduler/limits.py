"""The options of the scheduler, with prices and weights."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from runtime.tenancy.priority_classes import DEFAULT_PRIORITY_CLASSES, PriorityClass
from scheduler.step_times import StepLimits

START_LONG_TOKENS = 1024.0  # the length that few answers are assumed to exceed, until some have been seen


@dataclass(frozen=True)
class Prices:
    """The charge of a request to its tenant's turn, in weighted tokens: `w_p * (prompt - cached) + w_q * output`, at least 1.

    A prompt token behind a long context takes more work than one at the beginning, so it counts for more: with `c` tokens
    before it for `1 + c / attention_tokens`, where `attention_tokens` is the context at which attention takes as much work as
    the weights. So tenants share the time of prefill workers, not the number of tokens. Quotas and usage count plain tokens.

    Prompt tokens are charged chunk by chunk when they are dispatched. The estimated output is charged with the last chunk, and
    longer output as it is emitted. Both are corrected to what was computed and emitted. So a request cancelled in the queue
    costs nothing.
    """

    prompt_token: float = 1.0
    output_token: float = 2.0

    def chunk(self, tokens: int, context_tokens: int = 0, attention_tokens: int = 0) -> float:
        """The cost of a chunk of `tokens` behind `context_tokens`; with `attention_tokens` 0 context costs nothing."""
        cost = self.prompt_token * tokens
        if attention_tokens:
            cost *= 1.0 + (context_tokens + tokens / 2) / attention_tokens
        return cost if cost > 1.0 else 1.0

    def output(self, tokens: float) -> float:
        return self.output_token * tokens


@dataclass(frozen=True)
class Weights:
    """The weights of costs in seconds: see `placement.pairs`. Each says how much longer a first token may take to avoid it."""

    queue: float = 1.0
    compute: float = 4.0
    """The weight of computing a token that another prefill worker has. Well over 1: it delays this prompt and those behind
    it, and evicts other blocks from a cache. Caches with room for one copy of all hot prefixes, but not for two, lost half
    their hits in an overload at 1.5."""
    pressure: float = 2.0  # how much more it weighs for each waiting request, since it delays those requests too
    transfer_s: float = 0.0005
    """Per block to send while none was measured: a block of some hundred KB on a fast network, or in shared memory."""
    remote_s: float = 0.001  # per block to send from host to host, on top
    room_s: float = 0.2
    """Seconds for a full prefill worker, far less for one with room: a full one has to give up cached blocks."""
    load_s: float = 1.0
    """Seconds for a full decode worker, proportionally less for others. Each further stream slows all others there for as long
    as it runs."""
    trouble_s: float = 5.0
    """Seconds for a worker on which everything failed lately: it is avoided as long as there is another."""
    targets_s: float = 2.0
    """Seconds for a decode worker that is assigned to other targets for the time per token: more than for a full one."""
    slow_s_max: float = 4.0
    """The most seconds for a slow decode worker: it is better than one on which everything fails."""
    numerics_s: float = 1000.0
    """Seconds for a decode worker that computes other last bits than the one where an interrupted stream began: it is chosen
    only if there is no other, since the stream may then go on with other tokens."""
    unsafe_s: float = 1000.0
    """Seconds for a prefill worker on which an interrupted request is likely to fail again."""


def ring_weights(priority_classes: Mapping[str, PriorityClass]) -> dict[str, float]:
    """Weights that give each priority class its share by weight, or its floor where that is more. Raises ValueError if
    floors leave nothing to share.

    Classes at their floor are taken out, and the rest is shared by weight among the others, until no other class falls below
    its floor.
    """
    if sum(priority_class.floor_share for priority_class in priority_classes.values()) >= 1:
        raise ValueError("the priority classes' floor_share add up to 1 or more")
    floored: dict[str, float] = {}
    while True:
        rest = 1 - sum(floored.values())
        total = sum(priority_class.weight for name, priority_class in priority_classes.items() if name not in floored)
        shares = {
            name: rest * priority_class.weight / total
            for name, priority_class in priority_classes.items()
            if name not in floored
        }
        below = {
            name: priority_classes[name].floor_share
            for name, share in shares.items()
            if share < priority_classes[name].floor_share
        }
        if not below:
            return {name: floored.get(name, shares.get(name, 0.0)) for name in priority_classes}
        floored |= below


@dataclass(frozen=True)
class SchedulerLimits:
    """The scheduler's options; `CoordinatorSettings` explains them to users."""

    queue_requests_max: int = 1024
    """Most requests that may wait. More make the largest backlog shed one, or are rejected with 429."""
    queue_tokens_max: int = 4_000_000  # most prompt tokens that may wait, with the same effect
    tenant_queue_max: int = 1024  # most requests of one tenant that may wait
    queue_wait_s_max: float = 120.0
    """Longest wait for a place, in seconds, in priority classes that have none of their own."""
    resumed_wait_s_max: float = 600.0
    """Longest wait of a later attempt, in seconds: its client may have had tokens already."""
    step_tokens: int = 0
    """Token budget of one prefill step. Scheduling can change course only between steps. 0: as the worker says."""
    step_ms: float = 250.0
    """About the longest time, in milliseconds, of the steps that a prefill worker gets in advance, so that the next prompt
    waits no longer; 0: no limit."""
    steps_in_flight: int = 2  # per prefill worker; two hide the round trip, more only delay cancellation
    retry_floor: int = 100  # interrupted requests that may come back within ten seconds in any case
    retry_share: float = 1.0  # how many more may come back for each live request
    priority_classes: Mapping[str, PriorityClass] = field(default_factory=lambda: DEFAULT_PRIORITY_CLASSES)
    weights: Mapping[str, float] = field(default_factory=dict)
    """Weights of organisations ("priority class/organisation") and users ("priority class/organisation/user"); 1 where none
    is given."""
    quantum_tokens: float = 1024.0
    """Credit, in cost, that an idle tenant of weight 1 saves up. It is served that much before others when it comes back."""
    prices: Prices = field(default_factory=Prices)
    placement: Weights = field(default_factory=Weights)  # weights of the score that chooses workers
    overtaken_max: int = 16
    """After so many chunks of its tenant's later requests, the request that waited longest goes next."""
    bypasses_max: int = 64
    """After this many requests got room before a request that waits for room, freed room is kept for that request."""
    kv_overcommit: float = 64.0
    """An answer is counted on a decode worker with the length that few of its tenant's answers exceed, but with at least its
    max_tokens divided by this. 1: with max_tokens, so a decode worker never runs out of blocks."""
    long_output_tokens: float = START_LONG_TOKENS

    @property
    def steps(self) -> StepLimits:
        return StepLimits(self.step_tokens, self.step_ms, self.steps_in_flight)
