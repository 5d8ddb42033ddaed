"""The pairs of a prefill and a decode worker that are left out, since KV does not get from the one to the other. Pure.

    closed ──TRIP_AFTER failures in a row──▶ open ──its time is over──▶ one attempt tries it ──KV handed over──▶ closed
                                              ▲                                    └─fails─▶ open, twice as long

Each pair has a circuit breaker (Nygard, Release It!). A failed transfer does not show which end is at fault, so it does not
count against either worker in other pairs. Failures of attempts that were placed before the last failure was known belong to
the same incident and do not count, since one broken connection ends all its transfers. If no transfer between two workers
works, their requests wait instead of failing one attempt after the other.

A worker on which the model fails has a breaker of its own, as a pair with `NOBODY`. Such a worker fails at once, so it would
always have the least to do and get all requests. A request that fails there and goes well on another worker proves the worker
guilty. If more than half of a role's workers fail and are not proven guilty, the requests are likely at fault, and those
workers are not left out; nor is any worker if all of its role fail.

Below this, a sender skips a broken transport for a while (`kvtransfer.transport_choice`), so that a pair fails again only if
every transport between its ends fails.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import inf

Pair = tuple[int, int]  # incarnations of a prefill and a decode worker
Key = tuple[str, int]

NOBODY = 0
TRIP_AFTER = 3
OPEN_S, OPEN_S_MAX = 2.0, 30.0
_TROUBLE = 0.2
HOST_LOSS_S = 5.0  # how long the loss of a worker makes it likely that its host loses its other workers, too
HOSTS_MAX = 1024


@dataclass
class _State:
    failures: int = 0  # failures in a row
    failed_at: float = -inf
    open_until: float = -inf
    is_guilty: bool = False  # a request that failed there has gone well elsewhere
    probe: Key | None = None  # the attempt that tries it, once its time is over

    @property
    def tripped(self) -> bool:
        return self.failures >= TRIP_AFTER


class Breakers:
    def __init__(self) -> None:
        self.pairs: dict[Pair, _State] = {}  # those that failed since something last went well between them
        self._wake_at = inf
        self._hosts: OrderedDict[str, float] = OrderedDict()  # hosts that have lost a worker, and when

    def lost_on(self, host: str, now: float) -> None:
        self._hosts.pop(host, None)
        self._hosts[host] = now
        if len(self._hosts) > HOSTS_MAX:
            self._hosts.popitem(last=False)

    def host_fails(self, host: str, now: float) -> bool:
        """Whether a host has just lost a worker: interrupted requests are not resumed there as long as there are others."""
        return bool(self._hosts) and host != "" and now <= self._hosts.get(host, -inf) + HOST_LOSS_S

    def failed(self, pair: Pair, placed_at: float, now: float) -> bool:
        """Record a failed transfer of an attempt that was placed at `placed_at`. Returns whether the pair is left out now."""
        state = self.pairs.setdefault(pair, _State())
        if placed_at < state.failed_at:
            return False
        state.failures += 1
        state.failed_at, state.probe = now, None
        if state.tripped:
            state.open_until = now + min(OPEN_S * 2 ** min(state.failures - TRIP_AFTER, 10), OPEN_S_MAX)
            self._wake_at = min(self._wake_at, state.open_until)
        return state.tripped

    def worked(self, pair: Pair, failed_on: Iterable[Pair] = ()) -> None:
        """`failed_on`: where the request failed before."""
        self.pairs.pop(pair, None)
        for other in failed_on:
            if other in self.pairs and other.index(NOBODY) == pair.index(NOBODY):
                self.pairs[other].is_guilty = True

    def leave(self, incarnation: int) -> None:
        for pair in [pair for pair in self.pairs if incarnation in pair]:
            del self.pairs[pair]

    def allows(self, pair: Pair, now: float, is_held: Callable[[Key], bool]) -> bool:
        """Whether an attempt may be placed there. A probe that holds nothing any more has ended without a result."""
        state = self.pairs.get(pair)
        if state is None or not state.tripped:
            return True
        return now >= state.open_until and (state.probe is None or not is_held(state.probe))

    def allows_worker(self, pair: Pair, now: float, is_held: Callable[[Key], bool], workers: int) -> bool:
        """Whether an attempt may be placed on a worker. `workers`: how many its role has."""
        if self.allows(pair, now, is_held):
            return True
        role = pair.index(NOBODY)
        tripped = sum(other[role] == NOBODY and state.tripped for other, state in self.pairs.items())
        return tripped >= workers if self.pairs[pair].is_guilty else tripped > workers // 2

    def placed(self, pair: Pair, key: Key) -> None:
        state = self.pairs.get(pair)
        if state is not None and state.tripped:
            state.probe = key

    def failure_rate(self, pair: Pair, now: float) -> float:
        """Returns 0 … 1 for the score, so that a pair that failed a moment ago is avoided."""
        state = self.pairs.get(pair)
        if state is None or now > state.failed_at + OPEN_S:
            return 0.0
        return float(1.0 - (1.0 - _TROUBLE) ** state.failures)

    def concern(self, prefill_incarnation: int) -> bool:
        """Whether a pair of this prefill worker is left out or being tried."""
        return any(pair[0] == prefill_incarnation and state.tripped for pair, state in self.pairs.items())

    def next_wake(self) -> float | None:
        return None if self._wake_at == inf else self._wake_at

    def wake(self, now: float) -> bool:
        """Whether some pair's time is over since the last call."""
        if now < self._wake_at:
            return False
        ahead = [state.open_until for state in self.pairs.values() if state.open_until > now]
        self._wake_at = min(ahead, default=inf)
        return True
