"""Places a request on a pair of workers, or lets it wait for one. Room is reserved before any work, on both or on neither."""

from scheduler.cluster import Cluster
from scheduler.decisions import Placement
from scheduler.lifecycle import Trigger
from scheduler.placement.pairs import Side, WorkerPair, best_side
from scheduler.request import Request
from scheduler.waiting.queue import WaitQueue
from scheduler.waiting.queue_keys import bound_key
from scheduler.workers.circuit_breakers import NOBODY
from scheduler.workers.pool import Pool
from scheduler.workers.worker import PrefillWorker


def came(request: Request, pool: Pool, queue: WaitQueue, now: float) -> None:
    """Let a new request wait for a decode worker, if that would finish its prompt first, or else in its demand class."""
    side = None
    if request.entry is not None and not pool.wakeups.closed:
        side = best_side(request, None, pool, queue, now)
    if side is None:
        pool.wakeups.request_came()
    else:
        bind(request, side, pool)
        queue.settle_on(request, bound_key(side.worker.incarnation))


def bind(request: Request, side: Side, pool: Pool) -> None:
    """Count a request among what waits for the worker that is to compute its prompt."""
    request.cached_tokens = request.dispatched_tokens = pool.cached_tokens(request.submit, side.worker)
    pool.bindings.bind(request, side.worker)
    request.attempt_progress.there_s, request.attempt_progress.elsewhere_s = side.expected_s


def place_at_once(cluster: Cluster, request: Request, pair: WorkerPair, now: float) -> None:
    """Place a request and wake its prefill worker. The worker's next step takes the request in its turn and charges for it."""
    pool, queue = cluster.pools[request.submit.model], cluster.queues[request.submit.model]
    request.cached_tokens = request.dispatched_tokens = pair.begins.tokens
    place(cluster, request, pair, now)
    queue.settle_on(request, pair.prefill.incarnation)
    pool.wakeups.waits_no_more(request)
    pool.wakeups.has_own_work(pair.prefill)


def place(cluster: Cluster, request: Request, pair: WorkerPair, now: float) -> None:
    """Place a request on two workers that have room for it. Its chunks start after `request.cached_tokens`."""
    pool, queue = cluster.pools[request.submit.model], cluster.queues[request.submit.model]
    prefill, decode, progress = pair.prefill, pair.decode, request.attempt_progress
    cluster.drop_retained(request)
    pool.bindings.unbind(request)
    queue.placed(request)
    assert request.wait_mark is not None
    request.waited = queue.clock.since(request.wait_mark, request.path, now)
    _count_load(request, pair, pool, now)
    if isinstance(prefill, PrefillWorker):
        prefill.reserve(request)
    decode.reserve(request)
    progress.prefill_incarnation, progress.decode_incarnation = prefill.incarnation, decode.incarnation
    progress.computed_tokens, progress.placed_at = request.cached_tokens, now
    _, progress.fetched_tokens, progress.fetch_s, progress.compute_s = pair.begins
    request.numerics = request.numerics or decode.hello.numerics
    prefill.placed[request.id] = request
    prefill.expect(request)
    queue.line.count_uncomputed(request, request.submit.prompt_tokens - request.cached_tokens)
    blocks = decode.allocations[request.key].kv_blocks
    if pool.room_for_large.request is request:
        progress.kept_room = pool.room_for_large.end()
        pool.wakeups.look_anew()
    if request.suspicion is not None and request.suspicion.in_decode:
        pool.trials.begin(request, decode)
    one, other = prefill.incarnation, decode.incarnation
    for tried in ((one, other), (one, NOBODY), (NOBODY, other)):
        pool.breakers.placed(tried, request.key)
    queue.projection.place(request, now)
    request.fire(Trigger.PLACE, now)
    returns = pool.sessions.returns(request.submit.tenant)
    cluster.decisions.append(Placement(request, prefill, decode, blocks, returns))


def _count_load(request: Request, pair: WorkerPair, pool: Pool, now: float) -> None:
    """Credit the least full decode worker before a request is placed on a fuller one, or let this one pay."""
    prefill, decode = pair.prefill, pair.decode
    blocks = request.attempt_progress.sent_blocks = pool.missing_blocks(request.submit, decode)
    cost_s = blocks * pool.hand_overs.block_s(prefill.hello.host, decode.hello.host)
    pool.hand_overs.spend(decode.incarnation, cost_s if prefill is not decode else 0.0, now)
    least = pool.candidates.least_full()
    if least is not None and (forgone := decode.fullness - least.fullness) > 0:
        pool.hand_overs.forgo(least.incarnation, pool.weights.load_s * forgone, now)
