"""The second tier of a worker's KV: copies of blocks in a file, or in host memory where the pool is on a GPU.

Each block has a slot, and its owner keeps its digest: a block that reads back with another digest counts as lost. The file has
no name, so it is gone when the process ends. Called from threads; callers never write a slot while it is read.
"""

import os
import tempfile
from collections.abc import Sequence
from typing import Any

import torch
import xxhash

from kvtransfer.memory.pool import PoolRows, as_bytes


class TierFile:
    def __init__(self, rows: PoolRows, slots: int, folder: str = "") -> None:
        """`rows` are those of the pool, in whole blocks. `folder` is where the file lies; empty: the folder for temporary
        files. Raises `OSError` if there is no room for all slots."""
        self._rows, self.block_bytes = rows, rows.layout.block_bytes
        if rows.is_flat:
            with tempfile.TemporaryFile(dir=folder or None, buffering=0) as file:
                os.posix_fallocate(file.fileno(), 0, slots * self.block_bytes)  # a full disk shows now, and not in use
                self._file = os.dup(file.fileno())
        else:
            self._file = os.memfd_create("crossdock-kv-tier")
            os.ftruncate(self._file, slots * self.block_bytes)

    def close(self) -> None:
        os.close(self._file)

    def write(self, block_ids: Sequence[int], slots: Sequence[int]) -> list[bytes]:
        """Copy blocks of the pool to these slots; returns the digest of each. Raises `OSError`."""
        found, buffer = [], self._buffer()
        for block, slot in zip(block_ids, slots, strict=True):
            data = self._bytes_of(block, buffer)
            if os.pwrite(self._file, data, slot * self.block_bytes) != self.block_bytes:
                raise OSError("the file of the KV tier takes no more")
            found.append(xxhash.xxh3_64_digest(data))
        return found

    def read(self, slots: Sequence[int], digests: Sequence[bytes], block_ids: Sequence[int]) -> int:
        """Copy slots to these blocks of the pool, and stop at the first slot whose contents have changed. Returns the number
        of blocks that were copied intact. Raises `OSError`."""
        buffer = self._buffer()
        for at, (slot, digest, block) in enumerate(zip(slots, digests, block_ids, strict=True)):
            target = self._bytes_of(block, None) if buffer is None else as_bytes(buffer).reshape(-1)
            size = os.preadv(self._file, [target], slot * self.block_bytes)
            if size != self.block_bytes or xxhash.xxh3_64_digest(target) != digest:
                return at
            if buffer is not None:
                self._rows.spread([block], buffer)
        return len(slots)

    def _buffer(self) -> torch.Tensor | None:
        """Host memory for a block, where the pool itself is not there."""
        return None if self._rows.is_flat else self._rows.buffer(1)

    def _bytes_of(self, block: int, buffer: torch.Tensor | None) -> Any:
        self._rows.check([block])
        if buffer is None:
            return self._rows.flat_bytes[block * self.block_bytes : (block + 1) * self.block_bytes]
        packed = self._rows.packed([block], buffer)
        self._rows.wait()
        return as_bytes(packed).reshape(-1)
