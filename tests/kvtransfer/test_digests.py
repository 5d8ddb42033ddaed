"""Digests of blocks: the same at both ends however their pools are laid out, made when KV is final, checked when it arrives."""

import random
from dataclasses import replace

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer.memory.digests import BlockDigests, Digester, unpack
from kvtransfer.memory.layout import KvLayout
from kvtransfer.memory.pool import PoolRows
from kvtransfer.session.session import KvFailed, KvSent
from proto.kv import Commit
from proto.messages import Message
from tests.kvtransfer.ends import LAYOUT, SMALL, Ends, filled_pool, same_bytes, shuffled, with_ends


def by_hand(blocks: torch.Tensor) -> bytes:
    """Of a segment of these blocks, in order."""
    each = (xxhash.xxh3_64_digest(block.contiguous().view(torch.uint8).numpy().tobytes()) for block in blocks)
    return xxhash.xxh3_64_digest(b"".join(each))


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([64, 4096, 40_000, 256 << 10, (256 << 10) + 64]),
    st.integers(1, 12),
    st.integers(0, 1 << 20),
    st.booleans(),
)
def test_digest_agrees_at_both_ends(block_bytes: int, count: int, seed: int, contiguous: bool) -> None:
    """A digest is the same for source blocks, for the packed segment, and for blocks in the target pool."""
    layout = KvLayout(layers=1, kv_heads=1, head_dim=block_bytes // 8, block_size=1, dtype="float32")
    source, target = filled_pool(layout, 16, seed), filled_pool(layout, 16, seed + 1)
    before = target.clone()
    from_, to = (
        (list(range(2, 2 + count)), list(range(count))) if contiguous else (shuffled(16, count, n) for n in (seed, 1))
    )
    expected = by_hand(source[from_])
    rows = PoolRows(target, layout)
    assert BlockDigests(PoolRows(source, layout)).digest(from_) == expected
    packed = PoolRows(source[from_].contiguous(), layout).run(0, count)
    assert unpack(packed, rows, to) == expected == Digester(rows).digest(to)
    assert same_bytes(target[to], source[from_])
    rest = sorted(set(range(16)) - set(to))
    assert same_bytes(target[rest], before[rest])


@pytest.mark.parametrize("ratio", [2, 3, 8])
def test_larger_blocks_are_digested_by_cell(ratio: int) -> None:
    """A pool with larger blocks gives the digests of the smaller cells that cross."""
    large = LAYOUT.in_blocks_of(LAYOUT.block_size * ratio)
    pool = filled_pool(large, 8, ratio)
    rows = PoolRows(pool, large, LAYOUT.block_size)
    sub_blocks = random.Random(ratio).sample(range(rows.sub_blocks), 11)
    packed = rows.packed(sub_blocks, rows.buffer(11))
    assert Digester(rows).digest(sub_blocks) == by_hand(packed.view(torch.float32).view(LAYOUT.shape(11)))


def test_final_blocks_are_digested_once() -> None:
    """A block keeps the digest made when it was final until its digest is made anew."""
    pool = filled_pool(LAYOUT, 8, 1)
    digests = BlockDigests(PoolRows(pool, LAYOUT))
    digests.make([1, 2, 3])
    as_computed = by_hand(pool[[3, 1, 5]])
    pool[1].view(torch.uint8).view(-1)[7] ^= 1
    assert digests.digest([3, 1, 5]) == as_computed  # 5 was digested now
    pool[5].zero_()
    assert digests.digest([3, 1, 5]) == as_computed
    digests.make([1, 5])  # other KV was computed into them
    assert digests.digest([3, 1, 5]) == by_hand(pool[[3, 1, 5]]) != as_computed


@pytest.mark.usefixtures("transport")
def test_changed_kv_is_refused() -> None:
    """KV that changed between computation and transfer fails its digest check until it is computed anew."""

    async def test(ends: Ends) -> None:
        ends.sender.digest(range(ends.blocks))
        ends.source[5].view(torch.uint8).view(-1)[100] ^= 4
        ends.transfer("spoiled", [4, 5, 6, 7, 8])
        await ends.ended(1)
        assert isinstance(ends.results[0], KvFailed) and "digest of segment 0" in ends.failed[0][3]
        ends.sender.digest([5])  # computed anew
        ends.transfer("whole", [4, 5, 6, 7, 8])
        await ends.ended(2)
        assert isinstance(ends.results[1], KvSent)
        assert same_bytes(ends.target[ends.committed[0][1]], ends.source[4:9])

    with_ends(test)


@pytest.mark.usefixtures("transport")
@pytest.mark.parametrize("remembers", [True, False])
def test_foreign_blocks_are_digested_in_sending(remembers: bool) -> None:
    """What was loaded or fetched, which the sender is told of; and what the other role of a mixed worker wrote, where it
    remembers nothing."""

    async def test(ends: Ends) -> None:
        ends.sender.digest(range(ends.blocks))
        ends.source[5].view(torch.uint8).view(-1)[100] ^= 4
        if remembers:
            ends.sender.received([5])
        ends.transfer("whole", [4, 5, 6, 7, 8])
        await ends.ended(1)
        assert isinstance(ends.results[0], KvSent)
        assert same_bytes(ends.target[ends.committed[0][1]], ends.source[4:9])

    with_ends(test, settings=replace(SMALL, remembers_digests=remembers))


@pytest.mark.usefixtures("transport")
@pytest.mark.parametrize(("made_before", "answered"), [(True, 0), (False, 2)])
def test_commit_waits_for_unmade_digests(made_before: bool, answered: int) -> None:
    """As the sender is wired, and not its session alone."""

    async def test(ends: Ends) -> None:
        seen: list[int] = []

        def note(message: Message) -> bool:
            if isinstance(message, Commit):
                seen.append(ends.sender.counters["segments"])
            return True

        ends.to_receiver = note
        if made_before:
            ends.sender.digest(range(ends.blocks))
        ends.transfer("r", [4, 5, 6, 7, 8])
        await ends.ended(1)
        assert isinstance(ends.results[0], KvSent) and seen == [answered]

    with_ends(test)
