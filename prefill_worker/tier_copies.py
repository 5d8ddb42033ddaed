"""Copies between a prefill worker's pool and its second tier, on threads."""

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from kvtransfer.memory.pool import PoolRows
from kvtransfer.memory.tier import TierFile
from prefill_worker.prompts import Key
from prefill_worker.tier import KvTier, Slot
from proto.errors import BadOption
from runtime.process.rate_limited_log import RateLimitedLog
from runtime.settings.workers import WorkerSettings

THREADS: Final = 2  # loads need not wait behind copies to the tier


class TierCopies:
    def __init__(
        self,
        settings: WorkerSettings,
        rows: PoolRows,
        warn: RateLimitedLog,
        changed: Callable[[Sequence[int]], None],
        wake: Callable[[], None],
    ) -> None:
        """`changed` is told of blocks of the pool that were loaded, and `wake` is called when their prompt may go on. Raises
        `BadOption`."""
        self.slots = settings.tier_blocks(rows.layout.block_bytes)
        try:
            if not self.slots:
                raise OSError(f"{settings.kv_tier_gib:g} GiB are less than one KV block")
            self._file = TierFile(rows, self.slots, settings.kv_tier_folder)
        except OSError as error:
            bad = BadOption(f"no second tier for KV of {settings.kv_tier_gib:g} GiB: {error}")
            bad.option = "--kv-tier-folder" if settings.kv_tier_folder else "--kv-tier-gib"
            raise bad from error
        self.tier: KvTier | None = None  # told of what has been copied
        self._warn, self._changed, self._wake = warn, changed, wake
        self._loop = asyncio.get_running_loop()
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="kv-tier")

    def save(self, key: Key, hashes: Sequence[bytes], blocks: Sequence[int], slots: Sequence[int]) -> None:
        self._threads.submit(self._save, key, hashes, blocks, slots)

    def load(self, key: Key, slots: Sequence[Slot], blocks: Sequence[int]) -> None:
        self._threads.submit(self._load, key, slots, blocks)

    async def close(self) -> None:
        await asyncio.to_thread(self._threads.shutdown, cancel_futures=True)
        self._file.close()

    def _save(self, key: Key, hashes: Sequence[bytes], blocks: Sequence[int], slots: Sequence[int]) -> None:
        """Save; this runs in a thread."""
        digests: list[bytes] = []
        try:
            digests = self._file.write(blocks, slots)
        except OSError as error:
            self._warn("KV could not be copied to the second tier", error=str(error))
        self._loop.call_soon_threadsafe(self._saved, key, hashes, slots, digests)

    def _saved(self, key: Key, hashes: Sequence[bytes], slots: Sequence[int], digests: Sequence[bytes]) -> None:
        assert self.tier is not None
        self.tier.saved(key, hashes, slots, digests)

    def _load(self, key: Key, slots: Sequence[Slot], blocks: Sequence[int]) -> None:
        """Load; this runs in a thread."""
        began, count = time.perf_counter(), 0
        try:
            count = self._file.read([one.number for one in slots], [one.digest for one in slots], blocks)
        except OSError as error:
            self._warn("KV could not be read from the second tier", error=str(error))
        if count < len(slots):
            self._warn("KV in the second tier is not what was put there, and is computed", blocks=len(slots) - count)
        self._loop.call_soon_threadsafe(self._loaded, key, blocks, count, 1000 * (time.perf_counter() - began))

    def _loaded(self, key: Key, blocks: Sequence[int], count: int, ms: float) -> None:
        assert self.tier is not None
        self._changed(blocks)
        self.tier.loaded(key, count, ms)
        self._wake()
