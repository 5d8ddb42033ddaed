"""What the core's state means to people: `crossdock status`, and how long to wait before trying again."""

from collections import Counter

from coordinator.state import State
from proto.messages import Role, StatusReport, WorkerStatus

RETRY_AFTER_S = (1.0, 60.0)


def retry_after_s(state: State, model: str) -> float:
    """Seconds until the backlog of prompts is worked off at the measured rate, within bounds."""
    low, high = RETRY_AFTER_S
    pool, queue = state.pools.get(model), state.queues.get(model)
    if pool is None or queue is None or not pool.servable():
        return 5.0
    rate = sum(worker.tokens_per_s for worker in pool.prefill.values())
    backlog = queue.prompt_tokens + sum(worker.undispatched_tokens() for worker in pool.prefill.values())
    return min(max(backlog / rate, low), high) if rate > 0 else low


def status(state: State) -> StatusReport:
    workers = [
        WorkerStatus(
            name=worker.hello.name,
            role=worker.hello.role,
            model=worker.hello.model,
            host=worker.hello.host,
            pid=worker.hello.pid,
            kv_blocks=worker.capacity.kv_blocks,
            kv_blocks_used=worker.capacity.kv_blocks - worker.free_blocks,
            requests=len(worker.holdings),
            steps_in_flight=len(worker.steps),
            tokens_forwarded=worker.tokens_forwarded,
        )
        for worker in state.workers.values()
    ]
    return StatusReport(
        workers=tuple(sorted(workers, key=lambda w: (w.role, w.name))),
        gateways=tuple(sorted(hello.name for hello in state.peers.values() if hello.role is Role.GATEWAY)),
        queued=sum(len(queue) for queue in state.queues.values()),
        running=dict(Counter(request.state.value for request in state.requests.values())),
        finished=dict(state.outcomes),
        counters=dict(state.counters),
    )
