"""Digests of KV, which the computing worker makes and the receiving worker checks.

A block's digest is the xxh3-64 of its bytes, a segment's the xxh3-64 of those of its blocks, in order. The prefill worker
digests a block as soon as it is final, on the thread that computed it. So a decode worker compares with the KV that was
computed, and damage between computing and sending is found. This also covers blocks that are kept for other prompts. The
sender of a transfer only moves bytes.

On GPUs both ends digest when a segment is sent, with a checksum made there (`device_copy`).
"""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
import xxhash

from kvtransfer.memory.layout import runs_of
from kvtransfer.memory.pool import PoolRows, as_bytes

PIECE_BYTES = 256 << 10  # source and copy fit the second-level cache of a server core


def of_packed(packed: Any, sub_block_bytes: int) -> list[bytes]:
    """Digests of each of the sub-blocks in this array of bytes."""
    view = memoryview(packed)  # cut in half the time of an array
    return [xxhash.xxh3_64_digest(view[at : at + sub_block_bytes]) for at in range(0, len(view), sub_block_bytes)]


def of_segment(sub_block_digests: Sequence[bytes]) -> bytes:
    """8 bytes, from the digests of a segment's sub-blocks."""
    return xxhash.xxh3_64_digest(b"".join(sub_block_digests))


class Digester:
    """Digests of sub-blocks of one pool, where they lie in host memory. It is for one thread."""

    def __init__(self, rows: PoolRows) -> None:
        self._rows = rows
        self._piece_sub_blocks = max(1, PIECE_BYTES // rows.layout.block_bytes)
        self._buffer = None if rows.is_flat else rows.buffer(self._piece_sub_blocks)

    def digest(self, block_ids: Sequence[int], begun: Sequence[bytes] = ()) -> bytes:
        """The digest of these blocks as a segment; `begun` are digests of the first of them."""
        return of_segment([*begun, *self.each(block_ids[len(begun) :])])

    def each(self, block_ids: Sequence[int]) -> list[bytes]:
        sub_block_bytes, found = self._rows.layout.block_bytes, []
        if self._buffer is None:
            for block, _, count in runs_of(block_ids, block_ids):
                found += of_packed(
                    self._rows.flat_bytes[block * sub_block_bytes : (block + count) * sub_block_bytes], sub_block_bytes
                )
            return found
        for start in range(0, len(block_ids), self._piece_sub_blocks):
            part = block_ids[start : start + self._piece_sub_blocks]
            found += of_packed(as_bytes(self._rows.packed(part, self._buffer)).reshape(-1), sub_block_bytes)
        return found


class BlockDigests:
    """A sender's digests of the blocks of its pool, which is in host memory and crosses in blocks of its own size. Blocks
    without a digest are digested when they are sent. Any thread may call this, but not about a block that is being changed."""

    def __init__(self, rows: PoolRows) -> None:
        assert rows.is_flat
        self._digester = Digester(rows)
        self._digests = [b""] * rows.sub_blocks  # empty: not made

    def make(self, block_ids: Sequence[int]) -> None:
        for block, digest in zip(block_ids, self._digester.each(block_ids), strict=True):
            self._digests[block] = digest

    def forget(self, block_ids: Sequence[int]) -> None:
        """Drop the digests of these blocks, whose contents have changed."""
        for block in block_ids:
            self._digests[block] = b""

    def known(self, block_ids: Sequence[int]) -> bytes:
        """Returns the digest of these blocks as a segment, or empty bytes if a block's digest is missing."""
        found = [self._digests[block] for block in block_ids]
        return of_segment(found) if all(found) else b""

    def digest(self, block_ids: Sequence[int]) -> bytes:
        if found := self.known(block_ids):
            return found
        self.make([block for block in block_ids if not self._digests[block]])
        return self.known(block_ids)


def unpack(packed: torch.Tensor, rows: PoolRows, block_ids: Sequence[int]) -> bytes:
    """Copy packed sub-blocks of host memory to their blocks and return the digest of the copy. The copy is complete on return.
    Raises `OutsidePool`.

    If the pool is in host memory, each piece is copied and digested while it is in the core's cache. The copy is what is
    digested, so `packed` may change meanwhile. If the pool is on a GPU, `packed` must not change."""
    rows.check(block_ids)
    sub_block_bytes = rows.layout.block_bytes
    if not rows.is_flat:
        rows.spread(block_ids, packed)
        return of_segment(of_packed(as_bytes(packed).reshape(-1), sub_block_bytes))
    found, source, copied = [], packed.data_ptr(), memoryview(rows.flat_bytes)
    for at, block in enumerate(block_ids):
        hasher = xxhash.xxh3_64()
        for start in range(0, sub_block_bytes, PIECE_BYTES):
            size = min(PIECE_BYTES, sub_block_bytes - start)
            target = block * sub_block_bytes + start
            ctypes.memmove(rows.address + target, source + at * sub_block_bytes + start, size)
            hasher.update(copied[target : target + size])
        found.append(hasher.digest())
    return of_segment(found)
