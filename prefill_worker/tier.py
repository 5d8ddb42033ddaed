"""The second tier of a prefill worker's KV: which blocks it holds, and the copies to and from it. Pure.

Blocks are copied to the tier as soon as they are computed, while their prompt holds them, so that evicting them from the pool
needs no copy. If the beginning of a prompt is in the tier but not in the pool, it is loaded, unless computing it is faster.
The coordinator counts a block as cached here while it is in either of the two.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Final, NamedTuple, Protocol

from engine.kv.prefix_tree import PrefixChanges
from prefill_worker.prompts import FetchPhase, FinalReport, Key, PrefillRequest, PromptTable
from proto.codec import split_hashes
from proto.limits import HASH_BYTES

SAVES_MAX: Final = 64  # under way at once; blocks that become full meanwhile are not copied
TRY_AGAIN: Final = 0.9
"""While computing is faster, each prompt that is computed instead lowers the estimated load time by this factor, so that
loading is tried again later."""
_GAIN: Final = 0.2


class Slot(NamedTuple):
    number: int
    digest: bytes  # when it was copied to the slot


class Copies(Protocol):
    """Copies between pool and slots, on threads. Each call leads to one of `KvTier.saved` and `loaded`."""

    def save(self, key: Key, hashes: Sequence[bytes], blocks: Sequence[int], slots: Sequence[int]) -> None: ...

    def load(self, key: Key, slots: Sequence[Slot], blocks: Sequence[int]) -> None: ...


class KvTier:
    def __init__(
        self,
        copies: Copies,
        table: PromptTable,
        slots: int,
        say: Callable[[list[FinalReport]], None],
        go_on: Callable[[PrefillRequest], None],
    ) -> None:
        """`say` sends final reports of ended attempts. `go_on` continues a prompt after its load has ended."""
        self._copies, self._table, self._say, self._go_on = copies, table, say, go_on
        self._slots: OrderedDict[bytes, Slot] = OrderedDict()
        """Keys are hashes. Blocks used longest ago come first; the last ones of a prompt come before its first ones."""
        self._free = list(range(slots))
        self._changes = PrefixChanges(())
        self._pinned: Counter[bytes] = Counter()  # being loaded
        self._saving: dict[bytes, Key] = {}  # being copied → the prompt that holds the block
        self._saves = 0
        self._loads: dict[Key, list[bytes]] = {}
        self._compute_ms = self._load_ms = 0.0  # per token; 0: not measured yet
        self.loaded_tokens = self.failures = 0

    def counts(self) -> tuple[int, int, int]:
        """(blocks that are there, tokens that came back, copies that failed)"""
        return len(self._slots), self.loaded_tokens, self.failures

    # --- back to the pool -----------------------------------------------------------------------------------------------

    def begin_load(self, prompt: PrefillRequest) -> bool:
        """Begin to load blocks for a prompt. Returns whether any are loaded; if so, `go_on` is called later."""
        first, believed = prompt.known_blocks, self._table.believed_blocks(prompt.order)
        hashes: list[bytes] = []
        for hash_ in prompt.hashes[first:believed]:
            if hash_ not in self._slots:
                break
            hashes.append(hash_)
        if not hashes:
            return False
        if self._compute_ms and self._load_ms > self._compute_ms:
            self._load_ms *= TRY_AGAIN
            return False
        self._pinned.update(hashes)
        self._loads[prompt.key] = hashes
        prompt.fetch = FetchPhase.LOADING
        self._copies.load(prompt.key, [self._slots[one] for one in hashes], prompt.blocks[first : first + len(hashes)])
        return True

    def loaded(self, key: Key, blocks: int, ms: float) -> None:
        """Handle the end of a load, with the number of blocks that came back intact."""
        hashes = self._loads.pop(key)
        self._pinned -= Counter(hashes)
        if blocks:
            self._load_ms = _smooth(self._load_ms, ms / (blocks * self._table.block_size))
        for hash_ in hashes[blocks : blocks + 1]:
            self.failures += 1
            if hash_ in self._slots:
                self._drop(hash_)
        prompt = self._table.prompts[key]
        self._table.found_later(prompt, blocks)
        self.loaded_tokens += blocks * self._table.block_size
        prompt.fetch = FetchPhase.NONE
        if prompt.final_report is not None:
            self._say(self._table.close(prompt, prompt.final_report))
        else:
            self._go_on(prompt)

    # --- out of it ------------------------------------------------------------------------------------------------------

    def computed(self, prompt: PrefillRequest) -> None:
        """Copy the prompt's newly full blocks to the tier."""
        full = slice(prompt.saved_blocks, prompt.known_blocks)
        prompt.saved_blocks = prompt.known_blocks
        pairs = zip(prompt.hashes[full], prompt.blocks[full], strict=True)
        new = [(one, block) for one, block in pairs if one not in self._slots and one not in self._saving]
        slots = self._take(len(new)) if self._saves < SAVES_MAX else []
        if slots:
            hashes, blocks = zip(*new[: len(slots)], strict=True)
            self._saves += 1
            self._saving |= dict.fromkeys(hashes, prompt.key)
            prompt.saving += 1
            self._copies.save(prompt.key, hashes, blocks, slots)
        if prompt.done:
            for one in reversed(prompt.hashes[: prompt.known_blocks]):
                if one in self._slots:
                    self._slots.move_to_end(one)

    def saved(self, key: Key, hashes: Sequence[bytes], slots: Sequence[int], digests: Sequence[bytes]) -> None:
        """Handle the end of a copy. Blocks without a digest were not copied."""
        self._saves -= 1
        for hash_, slot, digest in reversed(list(zip(hashes, slots, digests, strict=False))):
            if self._saving.pop(hash_, None) == key:
                self._slots[hash_] = Slot(slot, digest)
                self._changes.note(hash_, True)
            else:
                self._free.append(slot)  # it has become suspect meanwhile
        for hash_ in hashes[len(digests) :]:
            self._saving.pop(hash_, None)
        self._free += slots[len(digests) :]
        self.failures += len(digests) < len(slots)
        prompt = self._table.prompts[key]
        prompt.saving -= 1
        if prompt.final_report is not None:
            self._say(self._table.close(prompt, prompt.final_report))

    def forget(self, hashes: Sequence[bytes]) -> None:
        """The blocks of these hashes are suspect."""
        for hash_ in hashes:
            self._saving.pop(hash_, None)
            if hash_ in self._slots:
                self._drop(hash_)

    def measured(self, tokens: int, step_ms: float) -> None:
        """Update the computing time per token from a step."""
        self._compute_ms = _smooth(self._compute_ms, step_ms / tokens)

    # --- what the coordinator is told -----------------------------------------------------------------------------------

    def take_changes(self, most: int) -> tuple[bytes, bytes]:
        """See `BlockAllocator.take_changes`; for both tiers."""
        allocator = self._table.allocator
        inserted, evicted = allocator.take_changes(most)
        left = most - (len(inserted) + len(evicted)) // HASH_BYTES
        put, dropped = self._changes.take(max(left, 0))
        gone = [one for one in split_hashes(evicted) if one not in self._slots]
        gone += [one for one in split_hashes(dropped) if not allocator.knows(one)]
        new = [one for one in split_hashes(put) if not allocator.knows(one)]
        return inserted + b"".join(new), b"".join(gone)

    def report_all(self) -> None:
        self._table.allocator.report_all()
        self._changes.begin(self._slots)

    # --- slots ----------------------------------------------------------------------------------------------------------

    def _take(self, count: int) -> list[int]:
        """Take up to `count` slots, and drop the least recently used blocks to free them."""
        wanted = max(count - len(self._free), 0)
        for hash_ in list(islice((one for one in self._slots if not self._pinned[one]), wanted)):
            self._drop(hash_)
        taken, self._free = self._free[:count], self._free[count:]
        return taken

    def _drop(self, hash_: bytes) -> None:
        self._free.append(self._slots.pop(hash_).number)
        self._changes.note(hash_, False)


def _smooth(before: float, value: float) -> float:
    return before + _GAIN * (value - before) if before else value
