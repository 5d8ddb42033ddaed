"""Pools with blocks of different sizes: every token's K and V arrive in their places, whatever part of a block they fill."""

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer.memory.layout import KvLayout, blocks_of, sub_blocks_of
from kvtransfer.memory.pool import PoolRows
from kvtransfer.session.session import KvFailed, KvSent, OfferAccepted
from proto.kv import PairClosed, PairOpen
from tests.kvtransfer.ends import SMALL, Ends, filled_pool, same_bytes, shuffled, with_ends

LAYOUT = KvLayout(layers=3, kv_heads=2, head_dim=4, block_size=2, dtype="float32")


def tokens_of(pool: torch.Tensor, block_ids: list[int]) -> torch.Tensor:
    """[tokens, layers, 2, kv_heads, head_dim] of these blocks, one token after the other: a naive twin of `PoolRows`."""
    return torch.cat([pool[block].permute(2, 0, 1, 3, 4) for block in block_ids])


@st.composite
def two_pools(draw: st.DrawFn) -> tuple[KvLayout, KvLayout]:
    shape = {name: draw(st.integers(1, 3)) for name in ("layers", "kv_heads", "head_dim")}
    dtype = draw(st.sampled_from(["float32", "bfloat16", "float8_e4m3fn"]))
    small = KvLayout(**shape, block_size=draw(st.integers(1, 4)), dtype=dtype)
    pair = [small, small.in_blocks_of(small.block_size * draw(st.integers(1, 4)))]
    return (pair[0], pair[1]) if draw(st.booleans()) else (pair[1], pair[0])


@settings(deadline=None)
@given(two_pools(), st.integers(1, 12), st.integers(0, 1 << 20), st.booleans())
def test_block_sizes_keep_token_places(
    layouts: tuple[KvLayout, KvLayout], sub_blocks: int, seed: int, contiguous: bool
) -> None:
    """KV packed from one pool and spread into a pool of other block sizes puts each token's bytes in place."""
    rng = random.Random(seed)
    sub_block = min(layout.block_size for layout in layouts)
    pools = [filled_pool(layout, 16, seed + at) for at, layout in enumerate(layouts)]
    before = pools[1].clone()
    rows = [PoolRows(pool, layout, sub_block) for pool, layout in zip(pools, layouts, strict=True)]
    blocks = [-(-sub_blocks // one.ratio) for one in rows]
    ids = [list(range(count)) if contiguous else rng.sample(range(16), count) for count in blocks]
    first = rng.randrange(sub_blocks)
    places = [sub_blocks_of(chosen, one.ratio)[first:sub_blocks] for chosen, one in zip(ids, rows, strict=True)]
    assert blocks_of(sub_blocks_of(ids[1], rows[1].ratio), rows[1].ratio) == tuple(ids[1])
    packed = rows[0].packed(places[0], rows[0].buffer(sub_blocks))
    assert packed.nbytes == (sub_blocks - first) * rows[0].layout.block_bytes
    rows[1].spread(places[1], packed.view(torch.uint8).clone().view(packed.dtype))
    again = rows[1].packed(places[1], rows[1].buffer(sub_blocks))
    assert same_bytes(again, packed)
    span = slice(first * sub_block, sub_blocks * sub_block)
    assert same_bytes(tokens_of(pools[1], ids[1])[span], tokens_of(pools[0], ids[0])[span])
    tokens = tokens_of(pools[1], ids[1])
    tokens[span] = tokens_of(before, ids[1])[span]
    assert same_bytes(tokens, tokens_of(before, ids[1])), "other tokens of the same blocks were written to"
    others = [block for block in range(16) if block not in ids[1]]
    assert same_bytes(pools[1][others], before[others])


@pytest.mark.usefixtures("transport")
@pytest.mark.parametrize(("ours", "theirs"), [(2, 4), (4, 2), (2, 8), (6, 2), (4, 4)])
def test_pairs_may_differ_in_block_size(ours: int, theirs: int) -> None:
    """Prompts that end anywhere, decode sides that have the beginning, several at once."""
    sender, receiver = LAYOUT.in_blocks_of(ours), LAYOUT.in_blocks_of(theirs)
    segment_bytes = 3 * LAYOUT.in_blocks_of(min(ours, theirs)).block_bytes

    async def test(ends: Ends) -> None:
        rng = random.Random(f"{ours} {theirs}")
        sources, targets = shuffled(64, 64, 3), shuffled(64, 64, 4)
        asked: dict[str, tuple[int, list[int], list[int], int]] = {}
        for number in range(5):
            tokens = rng.randint(1, 20)
            there = [targets.pop() for _ in range(-(-tokens // theirs))]
            here = [sources.pop() for _ in range(-(-tokens // ours))]
            asked[f"r{number}"] = tokens, here, there, rng.randint(0, tokens // theirs)
        counts: dict[str, int] = {}

        def accept(incarnation: int, offer: object) -> OfferAccepted:
            counts[offer.request_id] = offer.blocks  # type: ignore[attr-defined]
            _, _, there, cached = asked[offer.request_id]  # type: ignore[attr-defined]
            return OfferAccepted(tuple(there), cached)

        ends.accept = accept
        before = ends.target.clone()
        for name, (tokens, here, _, _) in asked.items():
            ends.transfer(name, here, chunks=rng.randint(1, 3), tokens=tokens)
        await ends.ended(len(asked))
        assert all(isinstance(result, KvSent) for result in ends.results), ends.results
        given_out = {commit.request_id: blocks for commit, blocks, _ in ends.committed}
        for name, (tokens, here, there, cached) in asked.items():
            assert given_out[name] == there and counts[name] == len(there), "the worker counts in blocks of its own"
            cut = cached * theirs
            got, sent = tokens_of(ends.target, there), tokens_of(ends.source, here)
            assert same_bytes(got[cut:tokens], sent[cut:tokens]), name
            assert same_bytes(got[:cut], tokens_of(before, there)[:cut]), "cached blocks are not written to"
        used = {block for _, _, there, _ in asked.values() for block in there}
        others = sorted(set(range(64)) - used)
        assert same_bytes(ends.target[others], before[others])

    small = replace(SMALL, segment_bytes=segment_bytes)
    with_ends(test, layout=sender, receiver_layout=receiver, settings=small)


def test_failed_transfer_returns_its_blocks():
    """A failed transfer reports the accepted blocks by their own ids, also between different block sizes."""

    async def test(ends: Ends) -> None:
        ends.accept = lambda incarnation, offer: OfferAccepted((9, 4, 7))
        ends.sender.open("r", 1, 2, 5, 2)
        await ends.until(lambda: len(ends.frames) >= 2)
        ends.sender.abort("r", 1, "enough")
        await ends.until(lambda: bool(ends.failed))
        assert ends.failed[0][2] == [9, 4, 7]

    with_ends(test, layout=LAYOUT, receiver_layout=LAYOUT.in_blocks_of(4))


def test_indivisible_block_sizes_are_refused():
    """The reason for refusing block sizes that do not divide names both sizes."""

    async def test(ends: Ends) -> None:
        ends.receiver.handle(1, PairOpen(9, ("gloo",), 4, "here"), b"")
        ends.sender.open("r", 1, 2, 3, 4)
        await ends.until(lambda: bool(ends.results))
        [result] = ends.results
        assert isinstance(result, KvFailed) and result.reason == "block size differs: 6 here is no multiple of 4"

    closed: list[PairClosed] = []
    with_ends(
        test,
        layout=LAYOUT.in_blocks_of(6),
        to_sender=lambda message: closed.append(message) or False,  # type: ignore[func-returns-value, arg-type]
    )
    assert [message.reason for message in closed] == ["block size differs: 6 here is no multiple of 4"]
