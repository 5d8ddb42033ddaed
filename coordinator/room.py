"""The summary of the workers that gateways get: which models can be served, and the largest request that each can have."""

from collections.abc import Mapping

from proto.messages import ClusterState
from proto.parts import Room
from scheduler.workers.pool import Pool


def cluster_state(pools: Mapping[str, Pool]) -> ClusterState:
    servable = {model: pools[model] for model in sorted(pools) if pools[model].servable()}
    sizes = tuple(pool.hash_block_size() for pool in servable.values())
    return ClusterState(tuple(servable), sizes, rooms=tuple(map(_room, servable.values())))


def _room(pool: Pool) -> Room:
    """Returns the largest request that workers which are up can hold; each role has one."""
    prompt_tokens = min(pool.context_tokens, max(worker.kv_tokens for worker in pool.prefill.values()))
    decode = max(pool.decode.values(), key=lambda worker: worker.kv_tokens).capacity
    return Room(pool.context_tokens, prompt_tokens, decode.kv_blocks, decode.block_size)
