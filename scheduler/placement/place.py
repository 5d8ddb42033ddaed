"""Places a request on a pair of workers and tells both. Room is reserved before any work, on both or on neither."""

from coordinator.state import State
from proto.messages import Destination, Hello, Prefill, Reserve
from proto.parts import Returns
from scheduler.lifecycle import Trigger
from scheduler.placement.fetch import Beginning, beginning
from scheduler.request import Request
from scheduler.workers.circuit_breakers import NOBODY
from scheduler.workers.prefix_index import usable_hashes
from scheduler.workers.worker import Worker

_NOTHING_FETCHED = Beginning(0)


def place(
    state: State, request: Request, prefill: Worker, decode: Worker, now: float, begins: Beginning = _NOTHING_FETCHED
) -> None:
    """Place a request on two workers that have room for it. Its chunks start after `request.cached_tokens`."""
    pool, queue = state.pools[request.submit.model], state.queues[request.submit.model]
    state.drop_retained(request)
    pool.bindings.unbind(request)
    queue.placed(request)
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
    state.billing.hold(request.id, 1 if prefill is decode else 2)
    state.counters["suffixes_on_decode"] += prefill is decode
    state.counters["prefixes_fetched"] += begins.fetched_tokens > 0
    progress = request.attempt_progress
    progress.placed_at = now
    _, progress.fetched_tokens, progress.fetch_s, progress.compute_s = begins
    gateway = state.peers.get(request.gateway_incarnation) or state.lost_gateways[request.gateway_incarnation]
    keep, take_in = _orders(request, prefill, decode, gateway, pool.sessions.returns(request.submit.tenant))
    state.send(decode.incarnation, keep)
    state.send(prefill.incarnation, take_in, request.blob)
    request.blob = b""
    names = dict.fromkeys((prefill.hello.name, decode.hello.name))
    state.move(request, Trigger.PLACE, now, " + ".join(names))


def place_at_once(state: State, request: Request, prefill: Worker, decode: Worker, now: float) -> None:
    """Place a request and wake its prefill worker. The worker's next step takes the request in its turn and charges for it."""
    pool, queue = state.pools[request.submit.model], state.queues[request.submit.model]
    pool.bindings.unbind(request)
    begins = beginning(request.submit, prefill, decode, pool, now)
    request.cached_tokens = request.dispatched_tokens = begins.tokens
    place(state, request, prefill, decode, now, begins)
    queue.settle_on(request, prefill.incarnation)
    pool.wakeups.waits_no_more(request)
    pool.wakeups.has_own_work(prefill)


def _reserve(request: Request, prefill: Worker, decode: Worker) -> None:
    if prefill is not decode:
        prefill.hold(request.key, prefill.prefill_allocation(request.submit, request.path))
    decode.hold(
        request.key, decode.decode_allocation(request.submit, request.path, request.expected_left, request.tpot_ms)
    )
    attempt_progress = request.attempt_progress
    attempt_progress.prefill_incarnation, attempt_progress.decode_incarnation = prefill.incarnation, decode.incarnation
    attempt_progress.computed_tokens = request.cached_tokens
    request.numerics = request.numerics or decode.hello.numerics
    prefill.placed[request.id] = request
    prefill.expect(request)


def _orders(
    request: Request, prefill: Worker, decode: Worker, gateway_hello: Hello, returns: Returns
) -> tuple[Reserve, Prefill]:
    """The two messages that make a placement real."""
    submit, gateway = request.submit, Destination(gateway_hello.address, request.gateway_incarnation)
    what = (
        *request.key,
        submit.prompt_tokens,
        submit.sampling,
        submit.choices,
        submit.first_choice,
        submit.resumed_tokens,
    )
    blocks = decode.allocations[request.key].kv_blocks
    size, decode_size = prefill.capacity.block_size, decode.capacity.block_size
    hashes = usable_hashes(submit, size)
    decode_hashes = hashes if decode_size == size else usable_hashes(submit, decode_size)
    return Reserve(*what, blocks, gateway, prefill.incarnation, decode_hashes, request.tpot_ms, returns), Prefill(
        *what, gateway, Destination(decode.hello.address, decode.incarnation), decode_size, hashes, request.cached_tokens,
        request.attempt_progress.fetched_tokens > 0, returns,
    )  # fmt: skip
