"""Which pair of workers a waiting request goes to, and what they are told. Reservation before work: both or none."""

from coordinator.pool import Pool, Worker
from coordinator.queue import WaitQueue
from coordinator.request import Request
from proto.messages import Peer, Prefill, Reserve


def place(pool: Pool, queue: WaitQueue, backlog_tokens_max: int) -> tuple[Request, Worker, Worker] | None:
    """Take the next request that can run now off the queue and reserve its room on a (prefill, decode) pair."""
    pair: tuple[Worker, Worker] | None = None

    def eligible(request: Request) -> bool:
        nonlocal pair
        pair = pool.choose_pair(request.submit, backlog_tokens_max)
        return pair is not None

    request = queue.pop_first(eligible, lambda request: not pool.could_ever_fit(request.submit))
    if request is None or pair is None:
        return None
    prefill, decode = pair
    prefill.hold(request.key, prefill.prefill_holding(request.submit))
    decode.hold(request.key, decode.decode_holding(request.submit))
    request.prefill_epoch, request.decode_epoch = prefill.epoch, decode.epoch
    prefill.placed[request.id] = request
    return request, prefill, decode


def orders(request: Request, prefill: Worker, decode: Worker, gateway: Peer) -> tuple[Reserve, Prefill]:
    """The two messages that make a placement real."""
    submit = request.submit
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
