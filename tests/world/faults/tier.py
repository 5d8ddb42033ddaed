"""The second tier of a simulated prefill worker: copies take time, fail and are damaged now and then. They read and write
their blocks when they end, so that a block that was freed too early is noticed."""

from collections.abc import Callable, Sequence

from prefill_worker.prompts import Key
from prefill_worker.tier import KvTier, Slot
from tests.world.faults.worker_process import WorkerProcess
from tests.world.transfers.connections import Content, digest

FAILS, DAMAGED = 0.05, 0.03


class FaultCopies:
    """A `prefill_worker.tier.FaultCopies`."""

    def __init__(self, process: WorkerProcess, wake: Callable[[], None]) -> None:
        """`wake` is called when a prompt may go on."""
        self._wake, self._process, self._random = wake, process, process.world.random
        self.tier: KvTier | None = None
        self._slots: dict[int, Content] = {}

    def save(self, key: Key, hashes: Sequence[bytes], blocks: Sequence[int], slots: Sequence[int]) -> None:
        self._process.after(self._random.uniform(0.001, 0.02), self._save, key, hashes, blocks, slots)

    def load(self, key: Key, slots: Sequence[Slot], blocks: Sequence[int]) -> None:
        self._process.after(self._random.uniform(0.001, 0.02), self._load, key, slots, blocks)

    def _save(self, key: Key, hashes: Sequence[bytes], blocks: Sequence[int], slots: Sequence[int]) -> None:
        self._process.check_held(list(blocks), key[0])
        count = 0 if self._random.random() < FAILS else len(blocks)
        contents = [self._process.toy.packed([block], 1) for block in blocks[:count]]
        self._slots.update(zip(slots, contents, strict=False))
        assert self.tier is not None
        self.tier.saved(key, hashes, slots, [digest(content) for content in contents])

    def _load(self, key: Key, slots: Sequence[Slot], blocks: Sequence[int]) -> None:
        self._process.check_writable(blocks)
        count = 0
        for slot, block in zip(slots, blocks, strict=True):
            content = self._slots[slot.number]
            if self._random.random() < DAMAGED:
                content = ((content[0][0] ^ 1, *content[0][1:]), *content[1:])
            self._process.toy.spread([block], 1, content)
            if digest(content) != slot.digest:
                self._process.world.injected["tier damaged"] += 1
                break
            count += 1
        assert self.tier is not None
        self.tier.loaded(key, count, 1.0)
        self._wake()
