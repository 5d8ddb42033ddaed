"""Projects when a tenant's request would get its place, for admission, Retry-After and people. Pure.

It divides the work that goes first in the fair order (`tenant_work`) by the rate at which work is placed. If decode has no
room, or the queue has not been empty for longer than placed requests stay, that is the rate at which placed work comes free
(`releases`). Else it is the measured speed of prefill.

Clients that were rejected and told to come back keep their place in the order until then. So each gets a time of its own, even
if all are of different tenants. One that comes earlier has no place any more: it is told a time again, but nothing is kept for
it. Else those who ask all the time would lengthen the wait of those who come when they were told.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Hashable
from heapq import heappop, heappush
from typing import Generic, NamedTuple, TypeVar

from xxhash import xxh3_64_intdigest

from scheduler.fairness.fair_node import Path
from scheduler.request import Request
from scheduler.waiting.line import WaitingLine
from scheduler.waiting.margin import Margins
from scheduler.waiting.rates import Ratios
from scheduler.waiting.releases import Releases
from scheduler.waiting.tenant_work import IN_LINE, WAITING

T = TypeVar("T")
RETRY_AFTER_S = (1.0, 600.0)
SHORT_S = 0.1  # below this, the error of a projection does not matter
GIVEN_S = 0.025  # time in which a stream is interrupted and its room is taken by a tenant that has less than its share
JITTER = 0.1  # a wait is lengthened by up to this part of it, never shortened
TOLD_MAX = 65_536
FINGERPRINT_MAX = 0xFFFF
AWAITED_S = 60.0
"""A client may come so much later than it was told: waits are told up to 600 s, and clients add jitter of a tenth."""
EXPIRED_MAX = 64  # entries dropped in one call, so that its cost is bounded; each call adds one at most


def fingerprint(prompt: bytes) -> int:
    """Recognises a tenant's request when it comes again, since its id is another one then. It is written to event logs, so it
    is too short to tell what a prompt said."""
    return xxh3_64_intdigest(prompt) & FINGERPRINT_MAX


def spread(wait_s: float, who: int) -> float:
    """A wait as clients are told it: within bounds, and a little longer for some, so that they do not come back together."""
    low, high = RETRY_AFTER_S
    return min(max(wait_s, low), high) * (1 + JITTER * who / (FINGERPRINT_MAX + 1))


class ComingBack(Generic[T]):
    """Requests that were rejected and told when to come again, until then, and for a while after."""

    def __init__(self) -> None:
        self._due: list[tuple[float, int, Hashable]] = []
        self._told: dict[Hashable, tuple[int, T]] = {}
        self._awaited: OrderedDict[Hashable, float] = OrderedDict()
        """Requests whose time has come, and until when they are awaited."""
        self._number = 0

    def __len__(self) -> int:
        return len(self._told)

    @property
    def is_used(self) -> bool:
        return bool(self._told or self._awaited)

    def tell(self, due: float, who: Hashable, what: T) -> bool:
        """Returns False if it is not kept, since there are too many. `who`: None if it is not known."""
        if len(self._due) >= TOLD_MAX:
            return False
        self._number += 1
        who = self._number if who is None else who
        self._told[who] = self._number, what
        heappush(self._due, (due, self._number, who))
        return True

    def give_up(self, who: Hashable) -> T | None:
        """Forget when a request was told to come."""
        return self._told.pop(who, (0, None))[1]

    def told(self, who: Hashable) -> T | None:
        """Returns the place of a request whose time has not come."""
        return self._told.get(who, (0, None))[1]

    def keep(self, who: Hashable, what: T) -> None:
        """Keep something else for a request that was told when to come."""
        self._told[who] = self._told[who][0], what

    def obeys(self, who: Hashable) -> bool:
        """Whether a request was told a time that has come. It was, once only."""
        return self._awaited.pop(who, None) is not None

    def take_due(self, now: float) -> list[T]:
        """Takes the requests that are due by now, or only some of them if there are many."""
        found = list[T]()
        for _ in range(EXPIRED_MAX):
            if not self._due or self._due[0][0] > now:
                break
            due, number, who = heappop(self._due)
            if who in self._told and self._told[who][0] == number:
                found.append(self._told.pop(who)[1])
                self._awaited[who] = due + AWAITED_S
                self._awaited.move_to_end(who)
        for _ in range(EXPIRED_MAX):
            if not self._awaited or next(iter(self._awaited.values())) > now:
                break
            self._awaited.popitem(last=False)
        return found


class Speed(NamedTuple):
    """The speed of a pool's workers."""

    prompt_tokens_per_s: float  # 0: not measured
    decode_is_full: bool  # some request found no room there
    apart: bool = False
    """The priority class has decode workers of its own, since its target differs: see `token_targets`."""
    warm_since: float = 0.0
    """When workers of both roles last began to take work; infinite while none of one role does."""


class Projection:
    """How long requests of one model's queue will wait."""

    def __init__(self, line: WaitingLine) -> None:
        self._line = line
        self._coming: ComingBack[tuple[Path, int]] = ComingBack()
        """Those that were told to come back, by their path and `fingerprint`."""
        self.placed = Releases()
        self._placed_of: defaultdict[str, Releases] = defaultdict(Releases)  # the same, by priority class
        self.margins = Margins()
        self.ratios: dict[str, Ratios] = {}
        """Waits divided by the projected waits, by priority class, unless both are short."""

    # --- what happens ---------------------------------------------------------------------------------------------------

    def place(self, request: Request, now: float) -> None:
        """Count a request that has got a place. It has waited since `request.since`."""
        request.placed_work = request.work
        request.cohorts = tuple(placed.take(request.work, now) for placed in self._counted(request))
        if request.attempt > 1:
            return
        waited_s = now - request.since
        if waited_s > SHORT_S or request.projected_s > SHORT_S:
            found = self.ratios.get(request.path[0]) or self.ratios.setdefault(request.path[0], Ratios())
            found.add(max(waited_s, SHORT_S) / max(request.projected_s, SHORT_S))

    def leave(self, request: Request, now: float, *, done: bool) -> None:
        """Give back the work of an attempt that had a place and is over. `done`: it was not interrupted."""
        if not request.placed_work:
            return
        for placed, cohort in zip(self._counted(request), request.cohorts, strict=True):
            if done:
                placed.give_back(request.placed_work, cohort, now - request.attempt_progress.placed_at, now)
            else:
                placed.undo(request.placed_work, cohort, now)
        request.placed_work = 0

    def _counted(self, request: Request) -> tuple[Releases, Releases]:
        return self.placed, self._placed_of[request.path[0]]

    # --- when -----------------------------------------------------------------------------------------------------------

    def wait_s(
        self, path: Path, work: int, speed: Speed, now: float, *, urgent: bool = False, lacks: float = 0.0
    ) -> float:
        """How long a new request of this tenant would wait for a place. `lacks`: the part of all room in decode in which others
        give way to it."""
        ahead = self._line.work
        if not ahead.total(WAITING):
            return 0.0
        # Streams of other targets make no room where the class has workers of its own.
        given, own = 0.0 if speed.apart else lacks * self.placed.held, ahead.of(path, WAITING, urgent=urgent) + work
        before = ahead.before(path, WAITING, work, urgent=urgent, apart=speed.apart)
        wait_s = self._seconds(path, before, work, speed, now)
        if own <= given and wait_s > (given_s := GIVEN_S * own / work):
            return max(given_s, self._prefill_s(before, work, speed))
        return wait_s

    def obeys(self, path: Path, fingerprint: int, now: float) -> bool:
        """Whether a request was told to come again by now. If it comes early, it loses its place, but is remembered."""
        self._drop_due(now)
        if not self._coming.is_used:
            return False
        who = path, fingerprint
        if (early := self._coming.told(who)) is not None:
            self._keep_place(path, -early[1])
            self._coming.keep(who, (path, 0))
        return self._coming.obeys(who)

    def _drop_due(self, now: float) -> None:
        for before, amount in self._coming.take_due(now):
            self._keep_place(before, -amount)

    def retry_after_s(
        self, path: Path, work: int, fingerprint: int, speed: Speed, now: float, computed_s: float = 0.0
    ) -> float:
        """Returns the wait that a client is told: until its turn, behind all requests that wait and all that come back before
        it. Its place is kept for it, unless it has come early. `computed_s`: seconds until prefill has computed the admitted
        work before it, placed work included."""
        who = path, fingerprint
        self.obeys(path, fingerprint, now)  # a place that it had is given up
        kept = 0 if self._coming.told(who) is not None else work
        line = self._line.work.before(path, IN_LINE, work, apart=speed.apart)
        coming = line - self._line.work.before(path, WAITING, work, apart=speed.apart)
        behind_s = computed_s + self._seconds(path, coming, 0, speed, now)
        wait_s = max(self._seconds(path, line, work, speed, now), behind_s)
        told_s = spread(wait_s, fingerprint)
        if self._coming.tell(now + told_s, who, (path, kept)):
            self._keep_place(path, kept)
        return told_s

    def _keep_place(self, path: Path, work: int) -> None:
        self._line.work.add(path, (0, 0, work, 0))

    def _seconds(self, path: Path, work: float, own: int, speed: Speed, now: float) -> float:
        """Seconds until so much work has a place, the last `own` of it included."""
        placed, since = self._placed_of[path[0]] if speed.apart else self.placed, self._line.since
        # Work ends after a role's last worker was lost, and nothing takes its room. So what is still held is not all room.
        steady = since is not None and 0.0 < placed.mean_s <= now - max(since, speed.warm_since)
        prefill_s = self._prefill_s(work, own, speed)
        if placed.held and (speed.decode_is_full or steady):
            return max(placed.wait_s(work, now), prefill_s)
        return prefill_s

    def _prefill_s(self, work: float, own: int, speed: Speed) -> float:
        """Seconds in which prefill computes the prompts of so much work, without those of its `own` last part."""
        if not speed.prompt_tokens_per_s:
            return 0.0
        total = self._line.work.total(WAITING)
        prompt_share = min(self._line.tokens / total, 1.0) if total else 1.0
        return (work - own) * prompt_share / speed.prompt_tokens_per_s
