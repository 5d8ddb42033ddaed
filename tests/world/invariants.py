"""The conditions that hold after every event. Called by tests and the simulation, not while serving."""

from collections import Counter

from coordinator.core import Core
from scheduler.lifecycle import ON_WORKERS, TERMINAL, RequestState
from scheduler.request import RETAINED
from scheduler.waiting.queue_keys import bound_key
from scheduler.waiting.tenant_work import UNCOMPUTED, WAITING
from scheduler.workers.worker import DecodeWorker, Worker
from tests.coordinator.consistent import check_room, check_sessions, held_streams


def check(core: Core, *, honest: bool = True) -> None:
    """Assert that reservations are conserved and that every request is in exactly one place. Not `honest`: workers may have
    registered with attempts at requests that came later."""
    for worker in core.cluster.workers.values():
        _check_worker(worker)
        assert len(worker.steps) <= core.limits.steps_in_flight
        assert worker.draining == (worker.incarnation in core.cluster.draining)
        assert all(
            core.cluster.requests.get(r.id) is r and r.prefill_incarnation == worker.incarnation
            for r in worker.placed.values()
        )
        assert all(r.entry is not None for r in worker.placed.values())
        for request_id, attempt in worker.allocations:
            if attempt == RETAINED:
                request = core.cluster.requests[request_id]
                assert (
                    request.attempt_progress.retained is not None
                    and request.attempt_progress.retained.decode_incarnation == worker.incarnation
                    and core.cluster.pools[worker.hello.model].retained[request_id] is request
                )
                assert request.state in (RequestState.QUEUED, RequestState.INTERRUPTED)
        assert worker.tokens_in_flight == sum(c.length for step, _ in worker.steps.values() for c in step.chunks)
    queued = [request.id for queue in core.cluster.queues.values() for request in queue]
    assert len(queued) == len(set(queued))
    for queue in core.cluster.queues.values():
        requests = [r for r in core.cluster.requests.values() if core.cluster.queues[r.submit.model] is queue]
        assert queue.line.work.total(UNCOMPUTED) == sum(request.uncomputed_tokens for request in requests)
        assert queue.line.work.total(WAITING) == sum(request.work for request in queue)
        assert queue.projection.placed.held == sum(request.placed_work for request in requests)
        assert all(bool(request.placed_work) == (request.state in ON_WORKERS) for request in requests)
        assert queue.line.tokens == sum(request.submit.prompt_tokens for request in queue)
        for request in queue:
            pool = core.cluster.pools[request.submit.model]
            has_turn = request.entry is not None or not pool.could_place(request.submit)
            assert has_turn or request.submit.model in core.cluster.spread.jobs
    for pool in core.cluster.pools.values():
        assert pool.room_for_large.request is None or pool.room_for_large.request.state is RequestState.QUEUED
        assert set(pool.bindings.hosts) == {worker.incarnation for worker in pool.workers.values() if worker.bound}
        for worker in pool.workers.values():
            for request in worker.bound.values():
                assert request.entry is not None and request.entry.key == bound_key(worker.incarnation)
                assert request.state is RequestState.QUEUED and request.attempt_progress.bound_to == worker.incarnation
        assert held_streams(pool.shares) == {
            (worker.incarnation, key): worker.stream(allocation.seqs, worker.admission.demand(key))  # type: ignore[arg-type]
            for worker in pool.decode.values()
            for key, allocation in worker.allocations.items()
            if allocation.path
        }
    _check_pools(core)
    assert sum(len(queue.fair) for queue in core.cluster.queues.values()) == sum(
        request.entry is not None for request in core.cluster.requests.values()
    )
    for request in core.cluster.requests.values():
        assert request.state not in TERMINAL
        assert (request.id in queued) == (request.state is RequestState.QUEUED)
        assert (request.id in core.state.interrupted) == (request.state is RequestState.INTERRUPTED)
        if request.state in ON_WORKERS and request.state is not RequestState.DECODING:
            assert request.key in core.cluster.workers[request.prefill_incarnation].allocations
        if request.state is RequestState.DECODING:
            assert request.key in core.cluster.workers[request.decode_incarnation].allocations
    assert all(request_id in core.cluster.requests for request_id in (*queued, *core.state.interrupted))
    _check_bills(core, honest)


def _check_bills(core: Core, honest: bool) -> None:
    """Assert that each request has a bill, that each bill waits for something, and that each quota level holds the sum of its
    bills."""
    billing, out = core.accounts.billing, Counter[str]()
    for worker in core.cluster.workers.values():
        out.update(request_id for request_id, attempt in worker.allocations if attempt != RETAINED)
        out.update(chunk.request_id for step, _ in worker.steps.values() for chunk in step.chunks)
    concurrency: Counter[str] = Counter()
    for request_id, bill in billing.bills.items():
        assert bill.counters.held == out[request_id] or (not honest and bill.counters.held < out[request_id])
        request = core.cluster.requests.get(request_id)
        assert (
            request.times is bill.times
            if request
            else billing.is_open_to(request_id) or (bill.counters.outcome and bill.counters.held)
        )
        concurrency.update(dict.fromkeys((account.name for account in bill.grant.accounts), bill.grant.sequences))
    assert set(core.cluster.requests) <= set(billing.bills)
    assert all(account.concurrency == concurrency[name] for name, account in billing.quotas.accounts.items())


def _check_pools(core: Core) -> None:
    for model, pool in core.cluster.pools.items():
        turns = (r.turn for r in core.cluster.requests.values() if r.turn is not None and r.submit.model == model)
        contexts = [worker.capacity.context_tokens for worker in (*pool.prefill.values(), *pool.decode.values())]
        assert pool.context_tokens == min(contexts, default=pool.context_tokens)
        check_sessions(pool.sessions, Counter(turn.session for turn in turns))


def _check_worker(worker: Worker) -> None:
    allocations, capacity = worker.allocations, worker.capacity
    assert (
        worker.free_seqs + sum(one.seqs for one in allocations.values()) == capacity.max_seqs and worker.free_seqs >= 0
    )
    assert all(worker.incarnation in worker.where[key] for key in allocations)
    assert worker.undispatched_tokens == sum(worker.undispatched.values())
    assert worker.undispatched.keys() == worker.placed.keys() | worker.bound.keys()
    if isinstance(worker, DecodeWorker):
        check_room(worker.admission)
        assert worker.free_seqs + sum(worker.seqs_by_target.values()) == capacity.max_seqs
        assert len(worker.admission) == len(allocations) and all(key in worker.admission for key in allocations)
    else:
        assert worker.kv_blocks_taken == sum(one.kv_blocks for one in allocations.values()) <= capacity.kv_blocks
