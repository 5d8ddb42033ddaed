"""Copies from pool to pool: what they copy, what they do not, and their digests."""

import subprocess
import sys
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer.memory.copying import PIECE_BYTES, Copier
from kvtransfer.memory.digests import Digester
from kvtransfer.memory.layout import KvLayout
from kvtransfer.memory.pool import PoolRows
from tests.kvtransfer.ends import filled_pool, same_bytes, shuffled

ROOT = Path(__file__).parents[2]


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([64, 4096, 40_000, PIECE_BYTES, PIECE_BYTES + 64]),
    st.integers(1, 12),
    st.integers(0, 1 << 20),
    st.booleans(),
)
def test_copied_blocks_match_their_digest(block_bytes: int, count: int, seed: int, contiguous: bool) -> None:
    """A copy writes the chosen blocks only, and returns the digest that the target pool has."""
    layout = KvLayout(layers=1, kv_heads=1, head_dim=block_bytes // 8, block_size=1, dtype="float32")
    source, target = filled_pool(layout, 16, seed), filled_pool(layout, 16, seed + 1)
    before = target.clone()
    from_, to = (
        (list(range(2, 2 + count)), list(range(count))) if contiguous else (shuffled(16, count, n) for n in (seed, 1))
    )
    rows = PoolRows(source, layout)
    copier = Copier(rows, PoolRows(target, layout), Digester(rows))
    assert copier.copy(from_, to, lambda copied: True) == Digester(PoolRows(target, layout)).digest(to)
    assert same_bytes(target[to], source[from_])
    rest = sorted(set(range(16)) - set(to))
    assert same_bytes(target[rest], before[rest])


def test_unwanted_copy_stops_at_next_piece():
    """A copy that is no longer wanted stops at the next piece and returns no digest."""
    layout = KvLayout(layers=1, kv_heads=1, head_dim=PIECE_BYTES // 8, block_size=1, dtype="float32")
    source, target = filled_pool(layout, 4, 1), filled_pool(layout, 4, 2)
    before = target.clone()
    asked = iter([True, True, False])
    rows = PoolRows(source, layout)
    copier = Copier(rows, PoolRows(target, layout), Digester(rows))
    assert copier.copy([0, 1, 2, 3], [0, 1, 2, 3], lambda copied: next(asked)) == b""
    assert same_bytes(target[:2], source[:2]) and same_bytes(target[2:], before[2:])


GUARDED = """
import torch
from kvtransfer.memory.copying import Copier
from kvtransfer.memory.digests import Digester, unpack
from kvtransfer.memory.layout import KvLayout
from kvtransfer.memory.pool import OutsidePool, PoolRows
assert False, "this runs under -O"
layout = KvLayout(layers=1, kv_heads=1, head_dim=8, block_size=1, dtype="float32")
rows = PoolRows(torch.zeros(layout.shape(4)), layout)
for ids in ([4], [0, -1], [1 << 40]):
    for move in (
        lambda: Copier(rows, rows, Digester(rows)).copy([0] * len(ids), ids, lambda copied: True),
        lambda: Copier(rows, rows, Digester(rows)).copy(ids, [0] * len(ids), lambda copied: True),
        lambda: unpack(torch.zeros((len(ids), 8), dtype=torch.int64), rows, ids),
    ):
        try:
            move()
        except OutsidePool:
            continue
        raise SystemExit(f"{ids} was copied")
print("guarded")
"""


def test_copy_outside_pool_is_refused():
    """Block ids outside a pool are refused in copies, also when Python runs with assertions off."""
    child = subprocess.run(
        [sys.executable, "-O", "-c", GUARDED], cwd=ROOT, capture_output=True, text=True, timeout=90, check=False
    )
    assert (child.returncode, child.stdout) == (0, "guarded\n"), child.stderr
