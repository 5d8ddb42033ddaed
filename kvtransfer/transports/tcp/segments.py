"""A segment as the records that cross a `tcp` connection: where their bytes come from and where they go.

Both ends cut a segment in the same way, from lengths that they know without the wire: the number of blocks was announced on
the control link, and the bytes of a block are those of their own layout. A record is as many whole sub-blocks as fit
`RECORD_BYTES`, or a part of one larger sub-block.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import xxhash

from kvtransfer.memory.digests import of_packed, of_segment
from kvtransfer.memory.layout import is_run
from kvtransfer.memory.pool import PoolRows, as_bytes

RECORD_BYTES: Final = 512 << 10  # encrypted, received, decrypted and digested in one go, in the second-level cache


@dataclass(frozen=True, slots=True)
class TcpRecord:
    """`sub_blocks` sub-blocks of a segment from `first` on, or, of one larger sub-block, `size` bytes from `offset` on."""

    first: int
    sub_blocks: int
    offset: int
    size: int


def records_of(blocks: int, sub_block_bytes: int) -> Iterator[TcpRecord]:
    """The records of a segment of so many sub-blocks, in order."""
    if sub_block_bytes > RECORD_BYTES:
        for sub_block in range(blocks):
            for offset in range(0, sub_block_bytes, RECORD_BYTES):
                yield TcpRecord(sub_block, 1, offset, min(RECORD_BYTES, sub_block_bytes - offset))
        return
    together = sub_blocks_together(sub_block_bytes)
    for first in range(0, blocks, together):
        sub_blocks = min(together, blocks - first)
        yield TcpRecord(first, sub_blocks, 0, sub_blocks * sub_block_bytes)


def sub_blocks_together(sub_block_bytes: int) -> int:
    """Returns the sub-blocks in the largest record; 1 if a sub-block is larger than a record."""
    return max(1, RECORD_BYTES // sub_block_bytes)


def record_bytes_max(sub_block_bytes: int) -> int:
    return min(RECORD_BYTES, sub_blocks_together(sub_block_bytes) * sub_block_bytes)


class SegmentDigest:
    """The digest of a segment, from its records in order."""

    def __init__(self, sub_block_bytes: int) -> None:
        self._sub_block_bytes = sub_block_bytes
        self._sub_blocks: list[bytes] = []
        self._sub_block = xxhash.xxh3_64()
        self._hashed = 0

    def add(self, data: memoryview) -> None:
        if self._sub_block_bytes <= RECORD_BYTES:
            self._sub_blocks += of_packed(data, self._sub_block_bytes)
            return
        self._sub_block.update(data)
        self._hashed += len(data)
        if self._hashed == self._sub_block_bytes:
            self._sub_blocks.append(self._sub_block.digest())
            self._sub_block, self._hashed = xxhash.xxh3_64(), 0

    def digest(self) -> bytes:
        return of_segment(self._sub_blocks)


class Source:
    def __init__(self, rows: PoolRows) -> None:
        self._rows = rows
        self._buffer = rows.buffer(sub_blocks_together(rows.layout.block_bytes))
        self._packed: Any = None

    def read(self, block_ids: Sequence[int], record: TcpRecord) -> memoryview:
        """The record's bytes, in the pool where they lie there in one piece of host memory; they stay until the next call.
        `block_ids` are the whole segment's."""
        if not record.offset:
            ids = block_ids[record.first : record.first + record.sub_blocks]
            self._packed = as_bytes(self._rows.packed(ids, self._buffer)).reshape(-1)
        return memoryview(self._packed[record.offset : record.offset + record.size])


class SegmentTarget:
    def __init__(self, rows: PoolRows) -> None:
        self._rows = rows
        self._sub_block_bytes = rows.layout.block_bytes
        self._buffer = rows.buffer(sub_blocks_together(self._sub_block_bytes))
        self._buffer_bytes: Any = as_bytes(self._buffer).reshape(-1)
        self._in_place = False

    def room(self, block_ids: Sequence[int] | None, record: TcpRecord) -> memoryview:
        """Where to put the record's bytes: in their sub-blocks, or in a buffer where those are in several pieces, or are
        None."""
        ids = () if block_ids is None else block_ids[record.first : record.first + record.sub_blocks]
        self._in_place = bool(ids) and self._rows.is_flat and is_run(ids)
        memory, first = (self._rows.flat_bytes, ids[0]) if self._in_place else (self._buffer_bytes, 0)
        start = first * self._sub_block_bytes + record.offset
        return memoryview(memory[start : start + record.size])

    def filled(self, block_ids: Sequence[int], record: TcpRecord) -> None:
        """All bytes of the record are where `room` said when it was asked last."""
        if not self._in_place and record.offset + record.size == record.sub_blocks * self._sub_block_bytes:
            self._rows.spread(
                block_ids[record.first : record.first + record.sub_blocks], self._buffer[: record.sub_blocks]
            )
