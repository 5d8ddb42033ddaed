"""Pools of tensor parallelism: blocks of which each rank has some heads cross as the blocks that one rank would have."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer.memory.copying import Copier
from kvtransfer.memory.device_copy import UNSAMPLED, DeviceCopier
from kvtransfer.memory.digests import Digester
from kvtransfer.memory.layout import KvLayout
from kvtransfer.memory.pool import PoolRows, rows_of
from tests.kvtransfer.ends import filled_pool, same_bytes, shuffled

HEADS = 8
LAYOUT = KvLayout(layers=3, kv_heads=HEADS, head_dim=4, block_size=2, dtype="float16")
ORDERS = {"LHNC": 1, "LNHC": 2, "HLNC": 0}
"""Order of layers, heads, tokens and content in a block, and where the heads are in it."""
BLOCKS = 9


def divided(pool: torch.Tensor, order: str, ranks: int) -> list[torch.Tensor]:
    """The pools of ranks of a pool whose blocks lie in this order, naively: the heads of each rank, where they are."""
    sizes = {"L": LAYOUT.layers, "H": HEADS, "N": LAYOUT.block_size, "C": 2 * LAYOUT.head_dim}
    at, shares = ORDERS[order], min(ranks, HEADS)
    whole = pool.view(BLOCKS, *(sizes[dim] for dim in order))
    parts = [part.contiguous().view(BLOCKS, -1) for part in whole.chunk(shares, dim=at + 1)]
    outer = 1
    for dim in order[:at]:
        outer *= sizes[dim]
    return [parts[rank * shares // ranks].clone().view(BLOCKS, outer, -1) for rank in range(ranks)]


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(sorted(ORDERS)),
    st.sampled_from([(1, 2), (2, 1), (2, 4), (4, 2), (8, 16), (16, 1)]),
    st.integers(1, BLOCKS),
    st.integers(0, 1 << 20),
)
def test_heads_find_their_rank(order: str, ranks: tuple[int, int], count: int, seed: int) -> None:
    """A copy between any numbers of ranks is that between the whole pools, with its digest; copies of heads stay equal."""
    sent, kept = filled_pool(LAYOUT, BLOCKS, seed), filled_pool(LAYOUT, BLOCKS, seed + 1)
    from_, to = shuffled(BLOCKS, count, seed), shuffled(BLOCKS, count, seed + 1)
    pools = [
        [pool] if many == 1 else divided(pool, order, many) for pool, many in zip((sent, kept), ranks, strict=True)
    ]
    source, target = (rows_of(one, LAYOUT) for one in pools)
    expected = kept.clone()
    expected[to] = sent[from_]
    after = [expected] if ranks[1] == 1 else divided(expected, order, ranks[1])
    digest = Copier(source, target, Digester(source)).copy(from_, to, lambda copied: True)
    assert all(same_bytes(one, other) for one, other in zip(pools[1], after, strict=True))
    assert digest == Digester(PoolRows(expected, LAYOUT)).digest(to)
    assert DeviceCopier(source, target, 1).copy(from_, to, lambda copied: True) != UNSAMPLED
    assert all(same_bytes(one, other) for one, other in zip(pools[1], after, strict=True))


def test_wrong_rank_pools_are_refused() -> None:
    """Pools that together are no pool of this layout are refused."""
    [one, other] = divided(filled_pool(LAYOUT, BLOCKS, 1), "LHNC", 2)
    for pools in ([one, other[:-1]], [one, other, other], [one, other[:, :, :-4]]):
        with pytest.raises(ValueError, match="are not one of"):
            rows_of(pools, LAYOUT)
