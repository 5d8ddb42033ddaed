"""Copy and checksum of GPU pools, on CPU tensors: the same code."""

import random

import pytest
import torch

from kvtransfer.memory.device_copy import UNSAMPLED, DeviceCopier, DeviceDigester, checksum, is_sampled, sub_block_sums
from kvtransfer.memory.layout import KvLayout
from kvtransfer.memory.pool import PoolRows
from tests.kvtransfer.ends import filled_pool, same_bytes

LAYOUTS = [
    KvLayout(layers=2, kv_heads=2, head_dim=8, block_size=4, dtype="float32"),
    KvLayout(layers=3, kv_heads=1, head_dim=5, block_size=2, dtype="bfloat16"),  # no whole words
    KvLayout(layers=2, kv_heads=8, head_dim=128, block_size=128, dtype="float32"),  # 2 MiB: moved as runs
]


def rows(layout: KvLayout, blocks: int, seed: int, sub_block_tokens: int = 0) -> PoolRows:
    return PoolRows(filled_pool(layout, blocks, seed), layout, sub_block_tokens)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.dtype + str(layout.block_bytes))
@pytest.mark.parametrize("seed", range(4))
def test_copy_and_target_checksums_agree(layout, seed):
    """A device copy returns the checksum that the target's digester computes, and writes no other block."""
    generator = random.Random(seed)
    source, target = filled_pool(layout, 24, 1), filled_pool(layout, 16, 2)
    before = target.clone()
    count = generator.randint(1, 12)
    from_, to = generator.sample(range(24), count), generator.sample(range(16), count)
    if seed == 0:
        from_, to = list(range(count)), list(range(count))
    copied = DeviceCopier(PoolRows(source, layout), PoolRows(target, layout), 1).copy(from_, to, lambda copied: True)
    digest = DeviceDigester(PoolRows(target, layout), 1).digest(to)
    assert copied == digest and len(digest) == 8
    assert same_bytes(target[to], source[from_])
    others = [block for block in range(16) if block not in to]
    assert same_bytes(target[others], before[others])


def test_larger_blocks_are_copied_by_cell():
    """Blocks of different sizes are copied cell by cell, and the checksums of both ends agree."""
    small, large = LAYOUTS[0], LAYOUTS[0].in_blocks_of(8)
    from_, to = [5, 1, 2, 9], [3, 2, 7, 0]
    source = rows(large, 6, 1, small.block_size)
    target = rows(small, 12, 2)
    copied = DeviceCopier(source, target, 1).copy(from_, to, lambda copied: True)
    assert copied == DeviceDigester(target, 1).digest(to) == DeviceDigester(source, 1).checksum(from_)


def test_checksum_is_weighted_word_sum():
    """The checksum is the sum of all words, modulo 2**64, each multiplied by an odd weight of its own."""
    words = torch.randint(-(2**63), 2**63 - 1, (3, 5), dtype=torch.int64)
    ones = torch.zeros(3, 5, dtype=torch.int64)
    weights = []
    for index in range(15):
        unit = ones.clone()
        unit.view(-1)[index] = 1
        weights.append(int.from_bytes(checksum([sub_block_sums(unit)]), "little"))
    assert all(weight % 2 for weight in weights) and len(set(weights)) == 15
    expected = sum(weight * word for weight, word in zip(weights, words.view(-1).tolist(), strict=True)) % 2**64
    assert int.from_bytes(checksum([sub_block_sums(words)]), "little") == expected
    assert checksum([sub_block_sums(words[:1]), sub_block_sums(words[1:])]) == checksum([sub_block_sums(words)])


def test_checksum_detects_changes_and_swaps():
    """The checksum differs after one changed bit or two swapped blocks."""
    pool = filled_pool(LAYOUTS[0], 8, 3)
    digester = DeviceDigester(PoolRows(pool, LAYOUTS[0]), 1)
    before = digester.digest([1, 2, 3])
    assert digester.digest([1, 3, 2]) != before
    pool[2].view(torch.uint8).view(-1)[77] ^= 1
    assert digester.digest([1, 2, 3]) != before


def test_both_ends_sample_the_same_segments():
    """About one segment in 16 is sampled, and both ends mark the others as unsampled."""
    layout, ids = LAYOUTS[0], [[random.Random(seed).randrange(8) for _ in range(3)] for seed in range(400)]
    sampled = [is_sampled(one, 16) for one in ids]
    assert 5 < sum(sampled) < 80
    source, target = rows(layout, 8, 1), rows(layout, 8, 2)
    left_out = ids[sampled.index(False)]
    assert DeviceCopier(source, target, 16).copy([0, 1, 2], left_out, lambda copied: True) == UNSAMPLED
    assert DeviceDigester(target, 16).digest(left_out) == UNSAMPLED
    assert DeviceDigester(target, 1).digest(left_out) != UNSAMPLED


def test_stopped_copy_writes_nothing():
    """A device copy that may not go on leaves the target pool as it was and returns no digest."""
    layout = LAYOUTS[0]
    pool = filled_pool(layout, 8, 2)
    before = pool.clone()
    assert DeviceCopier(rows(layout, 8, 1), PoolRows(pool, layout), 1).copy([1, 5], [2, 3], lambda copied: False) == b""
    assert same_bytes(pool, before)
