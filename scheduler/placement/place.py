"""Places a request on a pair of workers. Room is reserved before any work, on both or on neither."""

from scheduler.cluster import Cluster
from scheduler.decisions import Placement
from scheduler.lifecycle import Trigger
from scheduler.placement.choice import count_load
from scheduler.placement.fetch import Beginning, beginning
from scheduler.request import Request
from scheduler.workers.circuit_breakers import NOBODY
from scheduler.workers.worker import DecodeWorker, PrefillWorker, Worker

_NOTHING_FETCHED = Beginning(0)


def place(
    cluster: Cluster,
    request: Request,
    prefill: Worker,
    decode: DecodeWorker,
    now: float,
    begins: Beginning = _NOTHING_FETCHED,
) -> None:
    """Place a request on two workers that have room for it. Its chunks start after `request.cached_tokens`."""
    pool, queue = cluster.pools[request.submit.model], cluster.queues[request.submit.model]
    cluster.drop_retained(request)
    pool.bindings.unbind(request)
    queue.placed(request)
    count_load(request, prefill, decode, pool, now)
    _reserve(request, prefill, decode)
    queue.count_uncomputed(request, request.submit.prompt_tokens - request.cached_tokens)
    if pool.room_for_large.request is request:
        pool.room_for_large.end_placed(
            request.key, decode.allocations[request.key].kv_blocks / decode.capacity.kv_blocks, now
        )
        pool.wakeups.look_anew()
    if request.suspicion is not None and request.suspicion.in_decode:
        pool.trials.begin(request, decode)
    one, other = prefill.incarnation, decode.incarnation
    for pair in ((one, other), (one, NOBODY), (NOBODY, other)):
        pool.breakers.placed(pair, request.key)
    progress = request.attempt_progress
    progress.placed_at = now
    _, progress.fetched_tokens, progress.fetch_s, progress.compute_s = begins
    queue.projection.place(request, now)
    request.fire(Trigger.PLACE, now)
    blocks = decode.allocations[request.key].kv_blocks
    returns = pool.sessions.returns(request.submit.tenant)
    cluster.decisions.append(Placement(request, prefill, decode, blocks, returns))


def place_at_once(cluster: Cluster, request: Request, prefill: Worker, decode: DecodeWorker, now: float) -> None:
    """Place a request and wake its prefill worker. The worker's next step takes the request in its turn and charges for it."""
    pool, queue = cluster.pools[request.submit.model], cluster.queues[request.submit.model]
    pool.bindings.unbind(request)
    begins = beginning(request.submit, prefill, decode, pool, now)
    request.cached_tokens = request.dispatched_tokens = begins.tokens
    place(cluster, request, prefill, decode, now, begins)
    queue.settle_on(request, prefill.incarnation)
    pool.wakeups.waits_no_more(request)
    pool.wakeups.has_own_work(prefill)


def _reserve(request: Request, prefill: Worker, decode: DecodeWorker) -> None:
    if isinstance(prefill, PrefillWorker):
        prefill.reserve(request)
    decode.reserve(request)
    attempt_progress = request.attempt_progress
    attempt_progress.prefill_incarnation, attempt_progress.decode_incarnation = prefill.incarnation, decode.incarnation
    attempt_progress.computed_tokens = request.cached_tokens
    request.numerics = request.numerics or decode.hello.numerics
    prefill.placed[request.id] = request
    prefill.expect(request)
