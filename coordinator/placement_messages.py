"""The two messages that make a placement real. Pure."""

from proto.messages import Destination, Hello, Prefill, Reserve
from scheduler.decisions import Placement
from scheduler.workers.prefix_index import usable_hashes


def placement_messages(placed: Placement, gateway_hello: Hello) -> tuple[Reserve, Prefill]:
    """Returns the message for the decode worker and the one for the prefill worker."""
    request, prefill, decode = placed.request, placed.prefill, placed.decode
    submit, gateway = request.submit, Destination(gateway_hello.address, request.gateway_incarnation)
    what = (
        *request.key,
        submit.prompt_tokens,
        submit.sampling,
        submit.choices,
        submit.first_choice,
        submit.resumed_tokens,
    )
    size, decode_size = prefill.capacity.block_size, decode.capacity.block_size
    hashes = usable_hashes(submit, size)
    decode_hashes = hashes if decode_size == size else usable_hashes(submit, decode_size)
    reserve = Reserve(
        *what, placed.kv_blocks, gateway, prefill.incarnation, decode_hashes, request.tpot_ms, placed.returns
    )
    return reserve, Prefill(
        *what, gateway, Destination(decode.hello.address, decode.incarnation), decode_size, hashes, request.cached_tokens,
        request.attempt_progress.fetched_tokens > 0, placed.returns,
    )  # fmt: skip
