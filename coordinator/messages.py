"""The messages that tell workers of a placement, and gateways what the cluster can serve. Pure."""

from collections.abc import Mapping

from proto.messages import ClusterState, Destination, Hello, Prefill, Reserve
from proto.parts import Room
from scheduler.decisions import Placement
from scheduler.workers.pool import Pool
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
        *what,
        gateway,
        Destination(decode.hello.address, decode.incarnation),
        decode_size,
        hashes,
        request.cached_tokens,
        request.attempt_progress.fetched_tokens > 0,
        placed.returns,
    )


def cluster_state(pools: Mapping[str, Pool]) -> ClusterState:
    """Returns the summary for gateways: the models that can be served, and the largest request that each can have."""
    servable = {model: pools[model] for model in sorted(pools) if pools[model].servable()}
    sizes = tuple(pool.hash_block_size() for pool in servable.values())
    return ClusterState(tuple(servable), sizes, rooms=tuple(map(_room, servable.values())))


def _room(pool: Pool) -> Room:
    """Returns the largest request that workers which are up can hold; each role has one."""
    prompt_tokens = min(pool.context_tokens, max(worker.kv_tokens for worker in pool.prefill.values()))
    decode = max(pool.decode.values(), key=lambda worker: worker.kv_tokens).capacity
    return Room(pool.context_tokens, prompt_tokens, decode.kv_blocks, decode.block_size)
