"""Copying blocks from one pool to another. Large runs are copied by `memmove`. Small scattered blocks are first gathered into
one contiguous buffer. Both release the interpreter lock for most of the time.
"""

import ctypes
from collections.abc import Callable, Iterator, Sequence

from kvtransfer.memory.digests import BlockDigests, Digester
from kvtransfer.memory.layout import runs_of
from kvtransfer.memory.pool import PoolRows

PIECE_BYTES = 256 << 10
"""Bytes copied in one call; copying may be stopped between calls. The size is small enough that the data stays in the caches
for the process that copies it on (`launcher.process.STREAMED_COPIES` makes larger copies bypass them)."""
GATHERED_BYTES = 256 << 10  # in one step: source, buffer and copy fit in the second-level cache
RUN_BYTES_MIN = 16 << 10  # mean length above which copying runs one by one is faster than gathering


class Copier:
    """Copies from `source` to `target`; both have sub-blocks of one size. It is for one thread. `digests` are of the source."""

    def __init__(self, source: PoolRows, target: PoolRows, digests: BlockDigests | Digester) -> None:
        assert source.layout == target.layout
        self._source, self._target, self._digests = source, target, digests
        self._gathered_blocks = max(1, GATHERED_BYTES // source.layout.block_bytes)
        self._buffer = source.buffer(self._gathered_blocks)

    def copy(
        self, source_ids: Sequence[int], target_ids: Sequence[int], go_on: Callable[[int], bool], known: bytes = b""
    ) -> bytes:
        """Copies blocks one for one and returns the digest of the source: `known`, if it is given. `go_on` is called before
        each piece with the number of blocks copied so far. If it returns false, copying stops and the result is empty. Raises
        `OutsidePool`."""
        self._source.check(source_ids)
        self._target.check(target_ids)
        runs = runs_of(source_ids, target_ids)
        long_runs = len(source_ids) * self._source.layout.block_bytes >= RUN_BYTES_MIN * len(runs)
        if long_runs and self._source.is_flat and self._target.is_flat:
            whole = self._move(runs, go_on)
        else:
            whole = self._gather_and_spread(source_ids, target_ids, go_on)
        return (known or self._digests.digest(source_ids)) if whole else b""

    def _move(self, runs: list[tuple[int, int, int]], go_on: Callable[[int], bool]) -> bool:
        block_bytes, copied = self._source.layout.block_bytes, 0
        for source_block, target_block, count in runs:
            source = self._source.address + source_block * block_bytes
            target = self._target.address + target_block * block_bytes
            for offset, size in _pieces(count * block_bytes):
                if not go_on(copied + offset // block_bytes):
                    return False
                ctypes.memmove(target + offset, source + offset, size)
            copied += count
        return True

    def _gather_and_spread(
        self, source_ids: Sequence[int], target_ids: Sequence[int], go_on: Callable[[int], bool]
    ) -> bool:
        for start in range(0, len(source_ids), self._gathered_blocks):
            if not go_on(start):
                return False
            part = slice(start, start + self._gathered_blocks)
            self._target.spread(target_ids[part], self._source.packed(source_ids[part], self._buffer))
        return True


def _pieces(size: int) -> Iterator[tuple[int, int]]:
    """(offset, size) of the pieces of a run."""
    for offset in range(0, size, PIECE_BYTES):
        yield offset, min(PIECE_BYTES, size - offset)
