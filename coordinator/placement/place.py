"""Which pair of workers a request goes to, and what they are told. Reservation before work: both or none."""

from coordinator.placement.choice import best_prefill_first, choose_decode
from coordinator.request import Request
from coordinator.workers.pool import Pool
from coordinator.workers.prefix_index import usable_hashes
from coordinator.workers.worker import Worker
from proto.messages import Hello, Peer, Prefill, Reserve


def room(request: Request, prefill: Worker, pool: Pool, now: float) -> Worker | None:
    """The best decode worker for a request that `prefill` could take, or None if it cannot run there now."""
    submit = request.submit
    if prefill.draining or not prefill.fits(submit):
        return None
    candidates = pool.decode_candidates(request, prefill, now)
    waiting_ms = pool.waiting_target()
    fitting = [worker for worker in candidates if pool.decode_fits(worker, request, waiting_ms)]
    return choose_decode(request, prefill, fitting, pool, now)


def prefill_for(request: Request, decode: Worker, pool: Pool, now: float) -> Worker | None:
    """The best prefill worker with room for a request that has room on this decode worker."""
    for prefill in best_prefill_first(request.submit, pool):
        if not prefill.draining and prefill.fits(request.submit) and pool.may_pair(prefill, decode, now):
            return prefill
    return None


def reserve(request: Request, prefill: Worker, decode: Worker) -> None:
    prefill.hold(request.key, prefill.prefill_holding(request.submit, request.path))
    decode.hold(
        request.key, decode.decode_holding(request.submit, request.path, request.expected_left, request.tpot_ms)
    )
    attempt_progress = request.begin()
    attempt_progress.prefill_incarnation, attempt_progress.decode_incarnation = prefill.incarnation, decode.incarnation
    attempt_progress.computed_tokens = request.cached_tokens
    request.numerics = request.numerics or decode.hello.numerics
    prefill.placed[request.id] = request
    prefill.expect(request)


def orders(request: Request, prefill: Worker, decode: Worker, gateway_hello: Hello) -> tuple[Reserve, Prefill]:
    """The two messages that make a placement real."""
    submit, gateway = request.submit, Peer(gateway_hello.address, request.gateway_incarnation)
    what = (
        *request.key,
        submit.prompt_tokens,
        submit.sampling,
        submit.choices,
        submit.first_choice,
        submit.resumed_tokens,
    )
    blocks = decode.holdings[request.key].kv_blocks
    size, decode_size = prefill.capacity.block_size, decode.capacity.block_size
    hashes = usable_hashes(submit, size)
    decode_hashes = hashes if decode_size == size else usable_hashes(submit, decode_size)
    return Reserve(*what, blocks, gateway, prefill.incarnation, decode_hashes), Prefill(
        *what, gateway, Peer(decode.hello.address, decode.incarnation), decode_size, hashes, request.cached_tokens
    )
