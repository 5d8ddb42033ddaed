"""Plays the second tier of a prefill worker: copies take time and never fail."""

from collections.abc import Callable, Sequence

from lab.cluster.surroundings import ClusterSurroundings
from prefill_worker.prompts import Key
from prefill_worker.tier import KvTier, Slot

TOKENS_PER_S = 50_000.0  # KV of 128 KB a token at 6.4 GB/s
DIGEST = bytes(8)


class ClusterCopies:
    """A `prefill_worker.tier.ClusterCopies`."""

    def __init__(self, cluster: ClusterSurroundings, block_size: int, wake: Callable[[], None]) -> None:
        """`wake` is called when a prompt may go on."""
        self.tier: KvTier | None = None
        self._cluster, self._wake = cluster, wake
        self._block_s = block_size / TOKENS_PER_S

    def save(self, key: Key, hashes: Sequence[bytes], blocks: Sequence[int], slots: Sequence[int]) -> None:
        self._cluster.at(self._cluster.now + len(blocks) * self._block_s, self._saved, key, hashes, slots)

    def load(self, key: Key, slots: Sequence[Slot], blocks: Sequence[int]) -> None:
        took_s = len(blocks) * self._block_s
        self._cluster.at(self._cluster.now + took_s, self._loaded, key, len(blocks), 1000 * took_s)

    def _saved(self, key: Key, hashes: Sequence[bytes], slots: Sequence[int]) -> None:
        assert self.tier is not None
        self.tier.saved(key, hashes, slots, [DIGEST] * len(hashes))

    def _loaded(self, key: Key, blocks: int, ms: float) -> None:
        assert self.tier is not None
        self.tier.loaded(key, blocks, ms)
        self._wake()
