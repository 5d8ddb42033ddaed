"""Which pair of workers a request goes to, and what they are told. Reservation before work: both or none."""

from coordinator.pool import Pool, Worker
from coordinator.request import Request
from proto.messages import Hello, Peer, Prefill, Reserve, Submit


def room(submit: Submit, prefill: Worker, pool: Pool) -> Worker | None:
    """The decode worker with the most room for a request that `prefill` could take, or None if it cannot run there now."""
    if not prefill.fits(prefill.prefill_holding(submit)):
        return None
    decode = [w for w in pool.decode.values() if w.fits(w.decode_holding(submit))]
    return max(decode, key=lambda w: (w.free_seqs, w.free_blocks, w.epoch), default=None)


def room_anywhere(submit: Submit, pool: Pool) -> tuple[Worker, Worker] | None:
    """A pair with room, the prefill worker being the one with the least to do."""
    for prefill in sorted(pool.prefill.values(), key=lambda w: (w.undispatched_tokens() + w.tokens_in_flight, w.epoch)):
        decode = room(submit, prefill, pool)
        if decode is not None:
            return prefill, decode
    return None


def reserve(request: Request, prefill: Worker, decode: Worker) -> None:
    prefill.hold(request.key, prefill.prefill_holding(request.submit, request.path))
    decode.hold(request.key, decode.decode_holding(request.submit, request.path))
    request.prefill_epoch, request.decode_epoch = prefill.epoch, decode.epoch
    prefill.placed[request.id] = request


def orders(request: Request, prefill: Worker, decode: Worker, gateway_hello: Hello) -> tuple[Reserve, Prefill]:
    """The two messages that make a placement real."""
    submit, gateway = request.submit, Peer(gateway_hello.address, request.gateway_epoch)
    what = (
        *request.key,
        submit.prompt_tokens,
        submit.sampling,
        submit.choices,
        submit.first_choice,
        submit.resumed_tokens,
    )
    blocks = decode.holdings[request.key].kv_blocks
    return Reserve(*what, blocks, gateway, prefill.epoch), Prefill(
        *what, gateway, Peer(decode.hello.address, decode.epoch)
    )
