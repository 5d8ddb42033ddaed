"""The figures of a run: how many requests came, ended and met their goal, and how long they waited. Pure."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from lab.cluster.run import WINDOW_S, LoadOutcome, Played
from scheduler.lifecycle import RequestState

RANKS: Final = (50, 90, 95, 99)


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """Percentiles by nearest rank. None where nothing was measured."""
    if not values:
        return None
    ordered = sorted(values)
    return {f"p{rank}": ordered[min(len(ordered) - 1, rank * len(ordered) // 100)] for rank in RANKS}


@dataclass(frozen=True)
class _Sums:
    """Sums of the whole run, with which the figures of groups are compared."""

    duration_s: float
    prompt_tokens: int
    seen: Counter[int]  # sequences in decode, summed over looks, by window


def _of_group(outcomes: Sequence[LoadOutcome], sums: _Sums) -> dict[str, Any]:
    """Figures of some of the requests. Times are in milliseconds."""
    ended = Counter(str(one.state.value) if one.state is not None else "unfinished" for one in outcomes)
    rejected = Counter(one.reason for one in outcomes if one.state is RequestState.REJECTED)
    good = sum(one.is_good for one in outcomes)
    computed = sum(one.computed_tokens for one in outcomes)
    useful = sum(min(one.ask.prompt_tokens, one.computed_tokens) for one in outcomes if one.is_good)
    seen = _seen(outcomes)
    whole = range(int(sums.duration_s / WINDOW_S))
    accepted = len(outcomes) - ended.get(RequestState.REJECTED.value, 0)
    prompt_tokens = max(sum(one.ask.prompt_tokens for one in outcomes), 1)
    return {
        "offered": len(outcomes),
        "finished": ended.pop(RequestState.FINISHED.value, 0),
        "ended_otherwise": dict(sorted(ended.items())),
        "rejected": dict(sorted(rejected.items())),
        "goodput_per_s": good / sums.duration_s,
        "goodput_share": good / max(len(outcomes), 1),
        "in_time_share": good / max(accepted, 1),
        "ttft_ms": percentiles([1000 * one.ttft_s for one in outcomes if one.ttft_s is not None]),
        "tpot_ms": percentiles([1000 * one.tpot_s for one in outcomes if one.tpot_s]),
        "prefill_share": computed / max(sums.prompt_tokens, 1),
        "decode_share": seen.total() / max(sums.seen.total(), 1e-9),
        "decode_share_by_window": [seen[one] / max(sums.seen[one], 1e-9) for one in whole],
        "useful_share": useful / max(computed, 1),
        "rejections_per_request": sum(one.rejections for one in outcomes) / max(len(outcomes), 1),
        "interruptions": sum(one.interruptions for one in outcomes),
        "recomputed_share": sum(one.recomputed_tokens for one in outcomes) / prompt_tokens,
        "cached_share": sum(one.cached_tokens for one in outcomes) / prompt_tokens,
    }


def _parts(own: Counter[int], all_workers: Mapping[str, Counter[int]], duration_s: float) -> list[float]:
    """Returns what a decode worker had of all streams, by window; 1 is an equal part."""
    totals: Counter[int] = Counter()
    for one in all_workers.values():
        totals.update(one)
    whole = range(int(duration_s / WINDOW_S))
    return [len(all_workers) * own[window] / max(totals[window], 1e-9) for window in whole]


def _seen(outcomes: Sequence[LoadOutcome]) -> Counter[int]:
    total: Counter[int] = Counter()
    for one in outcomes:
        total.update(one.seen)
    return total


def figures(played: Played) -> dict[str, Any]:
    """Figures of the whole run, of each tenant and priority class, of each class, and of each stream of traffic."""
    outcomes, workload = played.outcomes, played.workload
    sums = _Sums(workload.duration_s, played.computed_tokens, _seen(outcomes))
    groups: dict[tuple[str, str], list[LoadOutcome]] = {}
    classes: dict[str, list[LoadOutcome]] = {}
    streams: dict[str, list[LoadOutcome]] = {name: [] for name in workload.streams}
    for one in outcomes:
        groups.setdefault((one.ask.tenant, one.ask.priority_class), []).append(one)
        classes.setdefault(one.ask.priority_class, []).append(one)
        streams.setdefault(one.ask.stream, []).append(one)
    return {
        "seed": workload.seed,
        "duration_s": workload.duration_s,
        "kv_in_use_by_window": [sum(some) / len(some) for _, some in sorted(played.kv_in_use.items())][
            : int(workload.duration_s / WINDOW_S)
        ],
        "workers": {
            name: {"part_of_streams_by_window": _parts(own, played.streams_seen, workload.duration_s)}
            for name, own in played.streams_seen.items()
        },
        "workers_ended": played.deaths,
        "role_changes": played.flips,
        "all": _of_group(outcomes, sums),
        "tenants": [
            {"tenant": tenant, "priority_class": name} | _of_group(some, sums)
            for (tenant, name), some in sorted(groups.items())
        ],
        "classes": {name: _of_group(some, sums) for name, some in sorted(classes.items())},
        "traffic": {name: _of_group(some, sums) for name, some in streams.items()},
    }
