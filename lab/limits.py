"""The limit of a ratio: the resource whose doubling would let the most additional requests keep the SLO. Pure. Each resource
in turn is doubled, and the traffic is simulated again. If no doubling helps, one of the targets is too strict for the time
that a single request takes, and that target is the limit.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final, NamedTuple

import msgspec

from lab.advise import Slo
from lab.goals import Goals
from lab.play.options import RunOptions
from lab.play.outcome import PlayedOutcome
from lab.play.plays import Each, Play, outcome_of
from lab.profile import Profile, ProfileCapacity

Relief = Callable[[Profile, RunOptions], tuple[Profile, RunOptions]]
LEAST_GAIN: Final = 0.005
"""A resource whose doubling gains a smaller share of all requests is no limit; such differences make two limits equal."""
HURTS: Final = 0.02  # of all requests, lost by a resource's doubling, that are worth saying


class Limit(NamedTuple):
    name: str = ""  # a resource, or "TTFT target" or "TPOT target"
    gain: float = 0.0  # share of requests that would keep the SLO in addition with twice as much
    equals: tuple[str, ...] = ()  # resources that would gain as much
    hurts: str = ""  # the resource of which twice as much would lose requests


NO_LIMIT: Final = Limit()


def _doubled(capacity: ProfileCapacity) -> ProfileCapacity:
    return msgspec.structs.replace(capacity, kv_blocks=2 * capacity.kv_blocks)


def _sequences(profile: Profile, options: RunOptions) -> tuple[Profile, RunOptions]:
    return profile, replace(options, seqs_max=2 * (options.seqs_max or profile.decode_capacity.seqs_max))


def _transfer(profile: Profile, options: RunOptions) -> tuple[Profile, RunOptions]:
    cost = profile.transfer
    faster = msgspec.structs.replace(cost, latency_ms=cost.latency_ms / 2, bytes_per_ms=2 * cost.bytes_per_ms)
    return profile.replaced(transfer=faster), options


def _cores(profile: Profile, options: RunOptions) -> tuple[Profile, RunOptions]:
    """Doubles the cores, and halves the time that work of one role takes from the other's."""
    return profile.replaced(
        prefill_cores=2 * profile.prefill_cores,
        decode_cores=2 * profile.decode_cores,
        beside_decode=1 + (profile.beside_decode - 1) / 2,
        beside_prefill=1 + (profile.beside_prefill - 1) / 2,
        beside_mixed=1 + (profile.beside_mixed - 1) / 2,
    ), options


RESOURCES: Final[Mapping[str, Relief]] = {
    "prefill compute": lambda profile, options: (profile.replaced(prefill=profile.prefill.scaled(0.5)), options),
    "decode compute": lambda profile, options: (profile.replaced(decode=profile.decode.scaled(0.5)), options),
    "decode memory": lambda profile, options: (
        profile.replaced(decode_capacity=_doubled(profile.decode_capacity)),
        options,
    ),
    "prefill memory": lambda profile, options: (
        profile.replaced(prefill_capacity=_doubled(profile.prefill_capacity)),
        options,
    ),
    "sequences": _sequences,
    "transfer": _transfer,
    "shared cores": _cores,
}
TARGETS: Final[Mapping[str, tuple[float, float]]] = {"TTFT target": (2.0, 1.0), "TPOT target": (1.0, 2.0)}


def limit_of(play: Play, goals: Goals, each: Each = map, outcome: PlayedOutcome | None = None) -> Limit:
    """The limit of a ratio that does not keep the SLO. `outcome`: of the play, if that is known."""
    profile, workers, sent, options = play
    changed = {name: relief(profile, options) for name, relief in RESOURCES.items()}
    changed = {name: found for name, found in changed.items() if found != (profile, options)}
    plays = [Play(found[0], workers, sent, found[1]) for found in changed.values()]
    others = list(each(outcome_of, plays if outcome else [*plays, play]))
    outcome = outcome or others.pop()
    kept = outcome.attainment(goals)
    gains = {name: other.attainment(goals) - kept for name, other in zip(changed, others, strict=True)}
    worst = min(gains, key=lambda name: gains[name])
    hurts = worst if gains[worst] <= -HURTS else ""
    best = max(gains, key=lambda name: gains[name])
    if gains[best] < LEAST_GAIN:
        gains = {name: outcome.attainment(eased(goals, *factors)) - kept for name, factors in TARGETS.items()}
        best = max(gains, key=lambda name: gains[name])
    equals = tuple(name for name in gains if name != best and gains[name] > max(gains[best] - LEAST_GAIN, 0.0))
    return Limit(best, gains[best], equals, hurts)


def eased(goals: Goals, ttft: float, tpot: float) -> Goals:
    """Returns goals with limits that are `ttft` and `tpot` times as long."""

    def of(slo: Slo) -> Slo:
        return replace(slo, ttft_ms=ttft * slo.ttft_ms, tpot_ms=tpot * slo.tpot_ms)

    return Goals(of(goals.default), {name: of(slo) for name, slo in goals.by_class.items()})
