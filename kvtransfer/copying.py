"""Copying blocks from one pool to another and digesting them, piece by piece, so that the second of the two finds the piece
in the core's cache: both together cost about one pass over memory.

Large runs of bytes are moved by `memmove` and digested where they lie; small scattered blocks are gathered into a buffer of
one piece first. Both release the interpreter lock for most of the time.
"""

import ctypes
from collections.abc import Callable, Iterator, Sequence

import xxhash

from kvtransfer.layout import blocks_of, runs_of
from kvtransfer.memory import Pages
from kvtransfer.pool import PoolRows, as_bytes

PIECE_BYTES = 256 << 10
"""Source and copy of a piece fit the second-level cache of any server core of the last ten years."""
RUN_BYTES_MIN = 16 << 10
"""Mean length of runs from which on moving them one by one is faster than gathering."""


class Copier:
    """From `source` to `target`; both have cells of one size. For one thread. `pages` are the target's, where it is another
    process's memory that is mapped here."""

    def __init__(self, source: PoolRows, target: PoolRows, pages: Pages | None = None) -> None:
        assert source.layout == target.layout
        self._source, self._target, self._pages = source, target, pages
        self._staging = _Staging(source)

    def copy(self, source_ids: Sequence[int], target_ids: Sequence[int], go_on: Callable[[], bool]) -> bytes:
        """Copies blocks one for one; xxh3-64 of what was copied. `go_on` is asked before each piece; when it says no, the rest
        is not copied, and nothing is returned. Raises `OSError` if the target has no memory."""
        if self._pages is not None:
            ratio = self._target.ratio
            self._pages.provide(blocks_of(target_ids, ratio), self._target.layout.block_bytes * ratio)
        hasher = xxhash.xxh3_64()
        runs = runs_of(source_ids, target_ids)
        if not self._staging.is_better(runs, len(source_ids)) and self._target.is_flat:
            return hasher.digest() if self._move(runs, hasher, go_on) else b""
        for start in range(0, len(source_ids), self._staging.blocks):
            if not go_on():
                return b""
            part = slice(start, start + self._staging.blocks)
            packed = self._source.packed(source_ids[part], self._staging.buffer)
            hasher.update(as_bytes(packed))
            self._target.spread(target_ids[part], packed)
        return hasher.digest()

    def _move(self, runs: "list[tuple[int, int, int]]", hasher: xxhash.xxh3_64, go_on: Callable[[], bool]) -> bool:
        block_bytes = self._source.layout.block_bytes
        source, target = self._source.address, self._target.address
        source_bytes = self._source.flat_bytes
        for source_block, target_block, count in runs:
            from_, to = source_block * block_bytes, target_block * block_bytes
            for offset, size in _pieces(count * block_bytes):
                if not go_on():
                    return False
                ctypes.memmove(target + to + offset, source + from_ + offset, size)
                hasher.update(source_bytes[from_ + offset : from_ + offset + size])
        return True


class Digester:
    """xxh3-64 of blocks of one pool, where they lie. For one thread."""

    def __init__(self, rows: PoolRows) -> None:
        self._rows = rows
        self._staging = _Staging(rows)

    def digest(self, block_ids: Sequence[int]) -> bytes:
        hasher = xxhash.xxh3_64()
        runs = runs_of(block_ids, block_ids)
        if self._staging.is_better(runs, len(block_ids)):
            for start in range(0, len(block_ids), self._staging.blocks):
                part = block_ids[start : start + self._staging.blocks]
                hasher.update(as_bytes(self._rows.packed(part, self._staging.buffer)))
        else:
            block_bytes = self._rows.layout.block_bytes
            for block, _, count in runs:
                hasher.update(self._rows.flat_bytes[block * block_bytes : (block + count) * block_bytes])
        return hasher.digest()


class _Staging:
    """Room for one piece of scattered blocks."""

    def __init__(self, rows: PoolRows) -> None:
        self._rows = rows
        self.blocks = max(1, PIECE_BYTES // rows.layout.block_bytes)
        self.buffer = rows.buffer(self.blocks)

    def is_better(self, runs: "list[tuple[int, int, int]]", blocks: int) -> bool:
        return not self._rows.is_flat or blocks * self._rows.layout.block_bytes < RUN_BYTES_MIN * len(runs)


def _pieces(size: int) -> Iterator[tuple[int, int]]:
    """(offset, size) of the pieces of a run."""
    for offset in range(0, size, PIECE_BYTES):
        yield offset, min(PIECE_BYTES, size - offset)
