"""Copies blocks from one pool to another on a GPU, and computes checksums of KV there. The same code also runs on CPU tensors,
slowly, so the tests of its arithmetic need no GPU.

The checksum is multilinear (Carter and Wegman 1979; Lemire and Kaser, "Strongly universal string hashing is fast", 2014):
the sum of all 64-bit words, each times an odd weight of its own, modulo 2**64. The weight of word `c` of sub-block `r` is `a[c]
* b[r]`. One changed word always changes the sum. A sub-block in the wrong place changes it except with a chance of about one
  in 2**60. The checksum uses only elementwise products and sums, so both ends get the same bits on any device and version.

Reading the data twice more slows a copy of many gigabytes a second. So the receiver may ask for digests of only one segment in
`every`. Both ends choose it by the target blocks (`is_sampled`). The other segments have the digest `UNSAMPLED`.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
import torch
import xxhash

from kvtransfer.memory.layout import runs_of
from kvtransfer.memory.pool import PoolRows

PIECE_BYTES = 16 << 20  # gathered and digested at once; they fit the second-level cache of a large GPU
RUN_BYTES_MIN = 1 << 20  # mean length above which copying runs in one kernel is faster than gathering
UNSAMPLED = b"\xff" * 8
DIGEST_EVERY_MAX = 1024


def is_sampled(target_ids: Sequence[int], every: int) -> bool:
    """Returns whether a segment with these target blocks is digested, if one in `every` is."""
    if every == 1:
        return True
    return xxhash.xxh3_64_intdigest(np.asarray(target_ids, dtype="<u4").tobytes()) % every == 0


@lru_cache(maxsize=32)
def _weights(count: int, stream: int, device: torch.device) -> torch.Tensor:
    """Odd pseudo-random numbers (splitmix64, Steele et al. 2014), the same in every process."""
    with np.errstate(over="ignore"):
        mixed = (np.arange(1, count + 1, dtype=np.uint64) + np.uint64(stream << 40)) * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(31)
    return torch.from_numpy((mixed | np.uint64(1)).view(np.int64)).to(device)


def sub_block_sums(rows: torch.Tensor) -> torch.Tensor:
    """One number for each sub-block: [sub-blocks, words] to [sub-blocks]. Enqueued on the current stream."""
    words = rows if rows.dtype == torch.int64 else rows.to(torch.int64)
    return (words * _weights(words.shape[1], 0, words.device)).sum(1)


def checksum(sums: Sequence[torch.Tensor]) -> bytes:
    """Returns the 8-byte checksum of a segment from the sums of its sub-blocks, in order. Waits for the current stream."""
    joined = torch.cat(list(sums))
    # A power of two, so that segments of all sizes share a few tables.
    weights = _weights(1 << (joined.shape[0] - 1).bit_length(), 1, joined.device)
    return int((joined * weights[: joined.shape[0]]).sum()).to_bytes(8, "little", signed=True)


class DeviceDigester:
    """Checksums of blocks of one pool, where they lie. For one thread."""

    def __init__(self, rows: PoolRows, every: int) -> None:
        self._rows, self._every = rows, every
        self._sub_blocks = max(1, PIECE_BYTES // rows.layout.block_bytes)
        self._buffer = rows.device_buffer(self._sub_blocks)

    def digest(self, block_ids: Sequence[int], begun: Sequence[bytes] = ()) -> bytes:
        """Returns the digest of these target blocks, or `UNSAMPLED` if their segment is not sampled."""
        assert not begun, "GPUs digest whole segments"
        return self.checksum(block_ids) if is_sampled(block_ids, self._every) else UNSAMPLED

    def checksum(self, block_ids: Sequence[int]) -> bytes:
        parts = (block_ids[start : start + self._sub_blocks] for start in range(0, len(block_ids), self._sub_blocks))
        with self._rows.on_stream():
            return checksum([sub_block_sums(self._rows.rows_or_gather(part, self._buffer)) for part in parts])


class DeviceCopier:
    """Copies from `source` to `target` on one device; both have sub-blocks of one size. It is for one thread."""

    def __init__(self, source: PoolRows, target: PoolRows, every: int) -> None:
        assert source.layout == target.layout and source.device == target.device
        self._source, self._target = source, target
        self._every = every
        self._digester = DeviceDigester(source, every)
        self._sub_blocks = max(1, PIECE_BYTES // source.layout.block_bytes)
        self._buffer = source.device_buffer(self._sub_blocks)

    def copy(
        self, source_ids: Sequence[int], target_ids: Sequence[int], go_on: Callable[[int], bool], known: bytes = b""
    ) -> bytes:
        """Copies blocks one for one, waits until they are written, and returns the digest. `go_on` is called before each
        piece; if it returns false, copying stops and the result is empty."""
        assert not known, "GPUs digest when a segment is sent"
        try:
            runs = runs_of(source_ids, target_ids)
            large = len(source_ids) * self._source.layout.block_bytes >= RUN_BYTES_MIN * len(runs)
            sampled = is_sampled(target_ids, self._every)
            if large and self._source.ratio == self._target.ratio == 1 and self._source.has_runs:
                return self._copy_runs(source_ids, runs, sampled) if go_on(0) else b""
            return self._gather_and_scatter(source_ids, target_ids, sampled, go_on)
        finally:
            self._source.wait()

    def _copy_runs(self, source_ids: Sequence[int], runs: list[tuple[int, int, int]], sampled: bool) -> bytes:
        """Many runs in one kernel, which reads and writes every byte once."""
        with self._source.on_stream():
            torch._foreach_copy_(
                [self._target.run(target, count) for _, target, count in runs],
                [self._source.run(source, count) for source, _, count in runs],
            )
        return self._digester.checksum(source_ids) if sampled else UNSAMPLED

    def _gather_and_scatter(
        self, source_ids: Sequence[int], target_ids: Sequence[int], sampled: bool, go_on: Callable[[int], bool]
    ) -> bytes:
        sums: list[torch.Tensor] = []
        with self._source.on_stream():
            for start in range(0, len(source_ids), self._sub_blocks):
                if not go_on(0):
                    return b""
                part = slice(start, start + self._sub_blocks)
                packed = self._source.rows_or_gather(source_ids[part], self._buffer)
                self._target.scatter(target_ids[part], packed)
                if sampled:
                    sums.append(sub_block_sums(packed))
            return checksum(sums) if sampled else UNSAMPLED
