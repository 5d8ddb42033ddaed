"""The figures of a run: how many requests came, ended and met their goal, and how long they waited. Pure."""

from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

from coordinator.lifecycle import State
from simulation.load.run import Outcome, Played

RANKS: Final = (50, 90, 99)


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """By nearest rank. None where nothing was measured."""
    if not values:
        return None
    ordered = sorted(values)
    return {f"p{rank}": ordered[min(len(ordered) - 1, rank * len(ordered) // 100)] for rank in RANKS}


def of_group(outcomes: Sequence[Outcome], duration_s: float) -> dict[str, Any]:
    """Figures of some of the requests. Times are in milliseconds."""
    ended = Counter(str(one.state.value) if one.state is not None else "unfinished" for one in outcomes)
    rejected = Counter(one.reason for one in outcomes if one.state is State.REJECTED)
    good = sum(one.is_good for one in outcomes)
    return {
        "offered": len(outcomes),
        "finished": ended.pop(State.FINISHED.value, 0),
        "ended_otherwise": dict(ended),
        "rejected": dict(rejected),
        "goodput_per_s": good / duration_s,
        "good": good,
        "goodput_share": good / max(len(outcomes), 1),
        "ttft_ms": percentiles([1000 * one.ttft_s for one in outcomes if one.ttft_s is not None]),
        "tpot_ms": percentiles([1000 * one.tpot_s for one in outcomes if one.tpot_s]),
        "rejections_per_request": sum(one.rejections for one in outcomes) / max(len(outcomes), 1),
        "interruptions": sum(one.interruptions for one in outcomes),
    }


def figures(played: Played) -> dict[str, Any]:
    """Figures of the whole run, of each tenant and priority class, of each class, and of each stream of traffic."""
    outcomes, duration_s = played.outcomes, played.workload.duration_s
    useful = sum(min(one.ask.prompt_tokens, one.computed_tokens) for one in outcomes if one.is_good)
    computed: Counter[str] = Counter()
    for one in outcomes:
        computed[one.ask.tenant] += one.computed_tokens
    groups: dict[tuple[str, str], list[Outcome]] = {}
    classes: dict[str, list[Outcome]] = {}
    streams: dict[str, list[Outcome]] = {}
    for one in outcomes:
        groups.setdefault((one.ask.tenant, one.ask.priority_class), []).append(one)
        classes.setdefault(one.ask.priority_class, []).append(one)
        streams.setdefault(one.ask.stream, []).append(one)
    return {
        "all": of_group(outcomes, duration_s) | {"useful_share": useful / max(played.computed_tokens, 1)},
        "tenants": [
            {"tenant": tenant, "priority_class": name} | of_group(some, duration_s)
            for (tenant, name), some in sorted(groups.items())
        ],
        "classes": {name: of_group(some, duration_s) for name, some in sorted(classes.items())},
        "shares": {
            tenant: {
                "prefill": tokens / max(sum(computed.values()), 1),
                "decode": played.sequence_s.get(tenant, 0.0) / max(sum(played.sequence_s.values()), 1e-9),
            }
            for tenant, tokens in sorted(computed.items())
        },
        "traffic": {name: of_group(some, duration_s) for name, some in streams.items()},
    }
