"""Decides when workers should change their roles. Pure: it takes what the coordinator's status says, and returns a decision.

    pilot = Autopilot(profile, Rules(Slo(500, 50)))
    decision = pilot.decide(Observation(...), now)      every few seconds

Each time it compares the goodput that the profile's model expects of the present ratio with that of all others. It orders the
changes that lead to the best one, up to an eighth of the workers at a time, and looks again when they are done. All of this
must hold:

- another ratio gains at least `gain_min`, and more requests within `horizon_s` than the changes to get there cost;
- it does so even without the requests of a sample that chance may have added. This does not hold for `FOLLOWS_S` after a
  change in the same direction, which shows that the traffic has changed;
- so it was `confirmations` times in a row, in the same direction;
- the last change in the other direction was `dwell_s` ago or more;
- at most one in 64 of the model's workers was lost within `calm_s`, or none if there are fewer than 64; no worker is changing
  its role, and each role keeps one. Drained workers are not counted.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf, sqrt
from typing import Final, NamedTuple

from lab.advise import Estimate, QueueingModel, Slo, Traffic, Workers, interarrival_cv
from lab.profile import Profile
from proto.limits import flips_at_once
from proto.messages import Role
from proto.status import StatusReport, TrafficStatus

SAMPLE_MIN: Final = 8  # fewer requests say nothing about the traffic
SAMPLE: Final = 48  # latest requests, in which a great change shows soon
LONGER_S: Final = 60.0  # of requests, which show a small change
SIGMAS: Final = 2.0  # by which a sample's requests may exceed the expected number by chance
WINDOW_S_MAX: Final = 120.0  # older observations are left out
FOLLOWS_S: Final = 180.0
LOST_SHARE: Final = 1 / 64  # of workers, within `calm_s`: in a large fleet some are lost all the time
CANDIDATES_MAX: Final = 64
STEP: Final = 1 / 8  # largest share of the workers that changes at once, or one worker


@dataclass(frozen=True)
class AutopilotRules:
    slo: Slo
    gain_min: float = 0.05  # relative, of goodput, for which a worker changes its role
    confirmations: int = 2
    dwell_s: float = 60.0
    calm_s: float = 30.0
    horizon_s: float = 60.0  # for which the present traffic is assumed to go on
    flip_s: float = 2.0  # in which a worker that changes serves no requests


class AutopilotWorker(NamedTuple):
    """A worker."""

    name: str
    role: Role
    requests: int
    draining: bool = False
    is_mixed: bool = False  # one half of a mixed worker, which does not change its role


@dataclass(frozen=True)
class Observation:
    workers: Sequence[AutopilotWorker]
    traffic: Traffic | None
    longer: Traffic | None = None
    lost: int = 0  # workers of this model that the coordinator has lost since it started
    is_changing: bool = False  # a worker is changing its role


@dataclass(frozen=True)
class Decision:
    present: Workers
    wanted: Workers  # the best ratio of the present workers
    needed: Workers | None  # fewest of each role that keep the SLO, on any machines; None: not known
    gain: float  # of goodput with `wanted`, over `present`; 0.1 is a tenth more
    reason: str  # in words, for the event log
    workers: tuple[str, ...] = ()  # that should change their role now
    role: Role = Role.PREFILL


@dataclass
class Autopilot:
    profile: Profile
    rules: AutopilotRules
    _agreed: int = 0  # times in a row that one direction was best; negative: fewer prefill workers
    _flipped_at: float = -inf
    _direction: int = 0  # of the last change; 1: more prefill workers
    _lost: int | None = None
    _losses: list[tuple[float, int]] = field(default_factory=list)  # (when, workers), within `calm_s`

    def decide(self, seen: Observation, now: float) -> Decision:
        present = ratio_of(seen)
        self._watch_losses(seen, now)
        if seen.traffic is None or not (present.prefill and present.decode):
            self._agreed = 0
            what = "too few requests" if seen.traffic is None else f"{present} lacks a role"
            if seen.traffic is not None and present.mixed:
                what = f"mixed workers do not change their role, and {present} has no others of both roles"
            return Decision(present, present, None, 0.0, f"{what}: nothing is compared")
        traffic, is_now, best = self._compared(seen, present, now)
        direction = _sign(best.workers.prefill - present.prefill) if _gain(is_now, best) >= self.rules.gain_min else 0
        hindrance = self._hindrance(seen, is_now, best, direction, now)
        workers: tuple[str, ...] = ()
        if direction and not hindrance:
            distance = abs(best.workers.prefill - present.prefill)
            workers = _whom(seen.workers, Role.DECODE if direction > 0 else Role.PREFILL, distance)
            self._flipped_at, self._direction = now, direction
        model = QueueingModel(self.profile, traffic, self.rules.slo, self.rules.horizon_s)
        is_now = model.estimate(present)
        best = _best(model, present) if direction else is_now
        why = _reason(is_now, best, traffic)
        return Decision(
            present, best.workers, model.wanted(), _gain(is_now, best), f"{why}{hindrance and f'; {hindrance}'}", workers,
            Role.PREFILL if direction > 0 else Role.DECODE,
        )  # fmt: skip

    def _compared(self, seen: Observation, present: Workers, now: float) -> tuple[Traffic, Estimate, Estimate]:
        """Returns (traffic, the estimate of the present ratio, that of the best one). The latest requests decide if another
        ratio gains enough for them, else those of a longer time."""
        assert seen.traffic is not None
        samples = [one for one in (seen.traffic, seen.longer) if one is not None]
        looked = [(one, _at_least(len(one.prompt_tokens)), 0) for one in samples]
        if now < self._flipped_at + FOLLOWS_S:
            looked.insert(0, (seen.traffic, 1.0, self._direction))
        for traffic, share, direction in looked:
            model = QueueingModel(
                self.profile, replace(traffic, requests_per_s=share * traffic.requests_per_s), self.rules.slo,
                self.rules.horizon_s,
            )  # fmt: skip
            is_now, best = model.estimate(present), _best(model, present)
            found = _sign(best.workers.prefill - present.prefill)
            if _gain(is_now, best) >= self.rules.gain_min and direction in (0, found):
                break
        return traffic, is_now, best

    def _watch_losses(self, seen: Observation, now: float) -> None:
        self._losses = [(at, count) for at, count in self._losses if now < at + self.rules.calm_s]
        if self._lost is not None and seen.lost != self._lost:
            # A smaller count comes from another coordinator, which counts anew and does not know the last losses of the first
            # one.
            self._losses.append((now, seen.lost - self._lost if seen.lost > self._lost else len(seen.workers)))
        self._lost = seen.lost

    def _hindrance(self, seen: Observation, is_now: Estimate, best: Estimate, direction: int, now: float) -> str:
        """Returns why nothing is changed although another ratio is better; empty: there is no reason against a change."""
        rules = self.rules
        if not direction:
            self._agreed = 0
            return ""
        self._agreed = self._agreed + direction if self._agreed * direction > 0 else direction
        if is_now.workers.prefill + direction < 1 or is_now.workers.decode - direction < 1:
            return "each role keeps a worker"
        if seen.is_changing:
            return "a worker is changing its role"
        if (lost := sum(count for _, count in self._losses)) > LOST_SHARE * is_now.workers.total:
            which = "a worker was" if lost == 1 else f"{lost} workers were"
            return f"{which} lost less than {rules.calm_s:g} s ago"
        if abs(self._agreed) < rules.confirmations:
            return "to be seen again first"
        if direction != self._direction and now < self._flipped_at + rules.dwell_s:
            return f"the last change, in the other direction, is less than {rules.dwell_s:g} s old"
        changes = abs(best.workers.prefill - is_now.workers.prefill)
        cost = max(is_now.goodput, best.goodput) * changes / is_now.workers.total * rules.flip_s
        if (best.goodput - is_now.goodput) * rules.horizon_s <= cost:
            return "not worth its cost"
        return ""


def ratio_of(seen: Observation) -> Workers:
    """The ratio of the workers that take work."""
    roles = Counter((one.role, one.is_mixed) for one in seen.workers if not one.draining)
    return Workers(roles[Role.PREFILL, False], roles[Role.DECODE, False], roles[Role.PREFILL, True])


def _at_least(requests: int) -> float:
    """Returns the share of a sample that is certainly not due to chance."""
    return max(0.0, 1 - SIGMAS / sqrt(requests))


def latest(status: TrafficStatus) -> Traffic | None:
    return _traffic(status, SAMPLE)


def of_longer(status: TrafficStatus) -> Traffic | None:
    return _traffic(status, max(SAMPLE, sum(age_ms <= 1000 * LONGER_S for age_ms in status.ages_ms)))


def _traffic(status: TrafficStatus, most: int) -> Traffic | None:
    """Returns the traffic of the last `most` requests that a coordinator remembers; None if they are too few."""
    recent = [at for at, age_ms in enumerate(status.ages_ms) if age_ms <= 1000 * WINDOW_S_MAX][-most:]
    if len(recent) < SAMPLE_MIN:
        return None
    came = sum(status.stands_for[at] for at in recent)
    prompts = [status.prompt_tokens[at] for at in recent]
    cached = sum(min(status.cached_tokens[at], status.prompt_tokens[at]) for at in recent)
    times_s = [-status.ages_ms[at] / 1000 for at in recent]
    return Traffic(
        requests_per_s=came / max(-times_s[0], 1e-3),
        prompt_tokens=prompts,
        output_tokens=[status.output_tokens[at] for at in recent],
        hit_rate=cached / max(sum(prompts), 1),
        arrival_cv=interarrival_cv(times_s) if came == len(recent) else 1.0,
        waiting_tokens=status.waiting_tokens,
    )


def observation_of(report: StatusReport, model: str) -> Observation:
    """The observation of this model's workers."""
    traffic = next((one for one in report.traffic if one.model == model), None)
    workers = [one for one in report.workers if one.model == model]
    roles = Counter((one.host, one.pid) for one in workers)
    return Observation(
        [
            AutopilotWorker(
                one.name, one.role, one.requests, one.draining, one.pid > 0 and roles[one.host, one.pid] > 1
            )
            for one in workers
        ],
        latest(traffic) if traffic is not None else None,
        of_longer(traffic) if traffic is not None else None,
        traffic.lost if traffic is not None else 0,
        any(one.model in ("", model) and one.state in ("draining", "registering") for one in report.flips),
    )


def _best(model: QueueingModel, present: Workers) -> Estimate:
    """Returns the best of all ratios of as many workers; if there are many, only some at even distances and the neighbours are
    tried. Mixed workers stay mixed."""
    total = present.prefill + present.decode
    step = max(1, total // CANDIDATES_MAX)
    counts = {*range(1, total, step), present.prefill - 1, present.prefill, present.prefill + 1}
    found = [
        model.estimate(Workers(count, total - count, present.mixed)) for count in sorted(counts) if 0 < count < total
    ]
    top = max(one.goodput for one in found)
    # Choose the ratio with the fewest changes among those that are as good.
    equal = [one for one in found if one.goodput >= 0.995 * top]
    return min(equal, key=lambda one: abs(one.workers.prefill - present.prefill))


def _gain(is_now: Estimate, best: Estimate) -> float:
    if best.workers == is_now.workers:
        return 0.0
    return best.goodput / is_now.goodput - 1 if is_now.goodput > 1e-9 else (inf if best.goodput > 1e-9 else 0.0)


def _reason(is_now: Estimate, best: Estimate, traffic: Traffic) -> str:
    prompt, output = (sum(some) / len(some) for some in (traffic.prompt_tokens, traffic.output_tokens))
    said = (
        f"{traffic.requests_per_s:.2g} requests/s of {prompt:.0f} + {output:.0f} tokens"
        f" on {is_now.workers}: {is_now.attainment:.0%} keep the SLO (prefill load {is_now.prefill_load:.2f}, decode"
        f" {is_now.decode_load:.2f})"
    )
    return said if best.workers == is_now.workers else f"{said}; {best.workers}: {best.attainment:.0%}"


def _whom(workers: Sequence[AutopilotWorker], role: Role, distance: int) -> tuple[str, ...]:
    """Returns the workers of this role with the fewest requests; at least one worker keeps the role."""
    able = [one for one in workers if not (one.draining or one.is_mixed)]
    having = sorted((one.requests, one.name) for one in able if one.role is role)
    most = min(max(1, int(STEP * len(able))), flips_at_once(len(workers)), len(having) - 1)
    return tuple(name for _, name in having[: min(distance, most)])


def _sign(number: int) -> int:
    return (number > 0) - (number < 0)
