"""The core's state as the dashboard shows it. The size of a snapshot does not grow with the cluster: it has the busiest
workers, the tenants that were served most, and the last requests and events. Pure.
"""

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from heapq import nlargest, nsmallest
from itertools import islice
from typing import Any, Final

import msgspec
from msgspec.structs import asdict

from coordinator.accounts import GoodputCounts
from coordinator.events import StateChanged
from coordinator.reporting import status
from coordinator.reporting.recent import RecentTimes
from coordinator.state import State
from proto.messages import Hello, Role
from scheduler.lifecycle import RequestState
from scheduler.workers.circuit_breakers import NOBODY
from scheduler.workers.worker import Worker

WORKERS_SHOWN: Final = 32  # of each model and role
TENANTS_SHOWN: Final = 24
MODELS_SHOWN: Final = 8
CLASSES_SHOWN: Final = 16
WAITING_SHOWN: Final = 10
REQUESTS_SHOWN: Final = 16
EVENTS_KEPT: Final = 30
FLIPS_SHOWN: Final = 8
REASONS_SHOWN: Final = 8
WINDOW_S: Final = 30.0  # that the times of requests cover
WORDS_MAX: Final = 300  # characters of one text
_NOTED: Final = (RequestState.INTERRUPTED, RequestState.REJECTED, RequestState.EXPIRED, RequestState.FAILED)


class RecentEvent(msgspec.Struct):
    """Something that happened `times` in a row, for the same reason."""

    kind: str
    what: str
    last: str  # the last request or process that it happened to
    first_at: float
    last_at: float
    times: int = 1


class RecentEvents:
    """The last decisions and faults: workers that came and left, and requests that did not run through."""

    def __init__(self) -> None:
        self.events: deque[RecentEvent] = deque(maxlen=EVENTS_KEPT)

    def on_state_changed(self, changed: StateChanged, now: float) -> None:
        if changed.state in _NOTED:
            self.add(f"request {changed.state}", changed.why, changed.request_id, now)

    def on_process(self, hello: Hello, what: str, now: float) -> None:
        if hello.role is not Role.OBSERVER:
            self.add(hello.role, what, hello.name, now)

    def add(self, kind: str, what: str, about: str, now: float) -> None:
        last, what = self.events[-1] if self.events else None, what[:WORDS_MAX]
        if last is not None and (last.kind, last.what) == (kind, what):
            last.last, last.last_at, last.times = about, now, last.times + 1
        else:
            self.events.append(RecentEvent(kind, what, about, now, now))


def snapshot(state: State, recent: RecentTimes, events: Iterable[RecentEvent], now: float) -> dict[str, Any]:
    """Returns plain data for JSON. Times of the past are ages in seconds."""
    cluster = state.cluster
    queued = sum(len(queue) for queue in cluster.queues.values())
    return {
        "queued": queued,
        "running": len(cluster.requests) - queued,
        "gateways": sum(hello.role is Role.GATEWAY for hello in state.members.peers.values()),
        "finished": dict(state.outcomes),
        "times": recent.figures(since=now - WINDOW_S),
        "pools": [one for model in _models(state) for one in _pools(state, model)],
        "models": [_model(state, model) for model in _models(state)],
        "classes": _classes(state, now),
        **_tenants(state, now),
        "waiting": _waiting(state, now),
        "requests": [
            asdict(one.closed)
            | {"at": one.at, "age_s": now - one.at, "tenant": one.tenant, "priority_class": one.priority_class}
            for one in recent.latest(REQUESTS_SHOWN)
        ],
        "left_out": status.left_out(state)[:REASONS_SHOWN],
        "hung": [hello.name for hello in list(state.members.fenced.values())[-REASONS_SHOWN:]],
        "flips": [asdict(flip.status()) for flip in list(state.members.flips)[-FLIPS_SHOWN:]],
        "autopilots": [
            asdict(one) | {"error": asdict(one.error), "age_s": now - at}
            for one, at in islice(state.members.autopilots.values(), MODELS_SHOWN)
        ],
        "policy": asdict(status.policy(state)) | {"arms": [asdict(one) for one in status.arms(state)]},
        "events": [asdict(one) | {"age_s": now - one.last_at} for one in events],
    }


def _models(state: State) -> list[str]:
    return list(islice(state.cluster.pools, MODELS_SHOWN))


def _model(state: State, model: str) -> dict[str, Any]:
    sessions, queue = state.cluster.pools[model].sessions, state.cluster.queues[model]
    return {
        "model": model,
        "waiting_tokens": max(queue.line.tokens, 0),
        "sessions": len(sessions),
        "leases": sessions.leases,
    }


# --- workers ----------------------------------------------------------------------------------------------------------


def _pools(state: State, model: str) -> list[dict[str, Any]]:
    pool = state.cluster.pools[model]
    left_out = {max(pair) for pair, breaker in pool.breakers.pairs.items() if breaker.tripped and NOBODY in pair}
    sides: dict[Role, Sequence[Worker]] = {
        Role.PREFILL: tuple(pool.prefill.values()),
        Role.DECODE: tuple(pool.decode.values()),
    }
    return [_side(state, model, role, workers, left_out) for role, workers in sides.items()]


def _side(state: State, model: str, role: str, workers: Sequence[Worker], left_out: set[int]) -> dict[str, Any]:
    """The workers of one role. Those in trouble are shown first, then the busiest."""

    def rank(worker: Worker) -> tuple[bool, int, int]:
        return worker.draining or worker.incarnation in left_out, len(worker.allocations), worker.incarnation

    shown = sorted(nlargest(WORKERS_SHOWN, workers, rank), key=lambda worker: worker.hello.name)
    return {
        "model": model,
        "role": role,
        "workers": len(workers),
        "tokens": sum(worker.tokens_forwarded for worker in workers),
        "kv_blocks": sum(worker.capacity.kv_blocks for worker in workers),
        "kv_used": sum(worker.capacity.kv_blocks - worker.free_blocks for worker in workers),
        "shown": [_worker(state, worker, worker.incarnation in left_out) for worker in shown],
    }


def _worker(state: State, worker: Worker, is_left_out: bool) -> dict[str, Any]:
    flip = state.members.flipping.get(worker.incarnation)
    pairs = [pair for pair in worker.kv_pairs if pair.decode_incarnation in state.cluster.workers]
    health = "draining" if worker.draining else "left out" if is_left_out else "ok"
    return {
        "name": worker.hello.name,
        "process": worker.process_name,
        "host": worker.hello.host,
        "seqs": worker.capacity.max_seqs - worker.free_seqs,
        "seqs_max": worker.capacity.max_seqs,
        "kv_blocks": worker.capacity.kv_blocks,
        "kv_used": worker.capacity.kv_blocks - worker.free_blocks,
        "tokens_before": worker.tokens_before,
        "tokens": worker.tokens_forwarded,
        "steps": worker.steps_done,
        "health": f"becomes {flip.role}" if flip is not None else health,
        "links": dict(Counter(pair.transport for pair in pairs)),
        "links_why": sorted({pair.why[:WORDS_MAX] for pair in pairs if pair.why})[:REASONS_SHOWN],
    }


# --- queues and requests ----------------------------------------------------------------------------------------------


def _classes(state: State, now: float) -> list[dict[str, Any]]:
    oldest: dict[str, float] = {}
    for queue in state.cluster.queues.values():
        for name, since in queue.line.oldest_since().items():
            oldest[name] = min(since, oldest.get(name, since))
    counted = state.accounts.goodput.by_class
    return [
        asdict(counted.get(name, GoodputCounts()))
        | {
            "name": name,
            "ttft_target_ms": one.ttft_ms or 0.0,
            "tpot_target_ms": one.tpot_ms or 0.0,
            "percentile": one.percentile,
            "oldest_s": now - oldest.get(name, now),
        }
        for name, one in islice(state.limits.priority_classes.items(), CLASSES_SHOWN)
    ]


def _tenants(state: State, now: float) -> dict[str, Any]:
    """The tenants that were served most in the last seconds or that wait, and sums by priority class."""
    costs: dict[tuple[str, str], float] = {}
    waiting: Counter[tuple[str, str]] = Counter()
    by_class: dict[str, list[float]] = {
        name: [0.0, 0.0] for name in islice(state.limits.priority_classes, CLASSES_SHOWN)
    }
    for queue in state.cluster.queues.values():
        for one in status.services(queue, now):
            key = one.path[0], one.tenant
            costs[key] = costs.get(key, 0.0) + one.cost_per_s
            waiting[key] += one.waiting
    whole = sum(costs.values()) or 1.0
    for key, cost in costs.items():
        if (sums := by_class.get(key[0])) is not None:
            sums[0] += cost / whole
            sums[1] += waiting[key]
    first = nsmallest(TENANTS_SHOWN, costs, lambda key: (-costs[key], -waiting[key], key))
    return {
        "class_sums": by_class,
        "tenants_active": len(costs),
        "tenants": [
            {"class": key[0], "tenant": key[1], "share": costs[key] / whole, "waiting": waiting[key]} for key in first
        ],
    }


def _waiting(state: State, now: float) -> list[dict[str, Any]]:
    """The requests that have waited longest."""
    oldest = [request for queue in state.cluster.queues.values() for request in islice(queue, WAITING_SHOWN)]
    return [
        {
            "id": request.id,
            "class": request.path[0],
            "tenant": request.submit.tenant,
            "waited_s": now - request.since,
            "prompt_tokens": request.submit.prompt_tokens,
        }
        for request in nsmallest(WAITING_SHOWN, oldest, lambda request: request.since)
    ]
