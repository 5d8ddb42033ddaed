"""The blocks that each worker's prefix cache is believed to hold. Hints only: a worker that has less says so (`CacheMiss`).
Pure.

Entries belong to a worker's incarnation and go with it; a worker that registers starts empty, and tells what it has again.

`holders` finds the workers that have the beginning of a prompt without asking all of them: for each side there is an index
from block hash to workers. Removing a worker's blocks from it at once would take long, so `holders` checks what it finds, and
every `learn` removes some of the outdated entries.
"""

from collections.abc import Callable, Iterator

from proto.limits import HASH_BYTES
from proto.messages import Submit

HASHES_MAX = 1 << 17
"""Most hashes known per worker, about 12 MB of memory. If a cache is larger, no more are learnt until some are evicted."""


CLEARED_PER_REPORT = 256  # outdated index entries that are removed with each report


Index = tuple[dict[bytes, tuple[int, ...]], ...]
"""The workers that have a block, in one table for each first byte of its hash. A single table would have millions of entries,
and growing it would take longer than any event may."""


class Locality:
    def __init__(self) -> None:
        self._known: dict[int, set[bytes]] = {}
        self._blocks: dict[int, int] = {}
        self._alone: dict[int, tuple[int]] = {}  # one shared tuple for all blocks that only this worker has
        self._index_of: dict[int, Index] = {}  # the index of each worker's side
        self._indexes: dict[str, Index] = {}
        self._outdated: list[tuple[Index, int, Iterator[bytes]]] = []

    def join(self, incarnation: int, kv_blocks: int, side: str = "") -> None:
        self._known[incarnation] = set()
        self._blocks[incarnation] = kv_blocks
        self._alone[incarnation] = (incarnation,)
        self._index_of[incarnation] = self._indexes.setdefault(side, tuple({} for _ in range(256)))

    def leave(self, incarnation: int) -> None:
        self._forget_all(incarnation)
        self._known.pop(incarnation, None)
        self._blocks.pop(incarnation, None)
        self._alone.pop(incarnation, None)
        self._index_of.pop(incarnation, None)

    def having(self, blocks: list[bytes]) -> list[int]:
        """The workers that have any of these blocks."""
        there = (index[block[0]].get(block, ()) for index in self._indexes.values() for block in blocks)
        found = {incarnation for incarnations in there for incarnation in incarnations}
        return sorted(one for one in found if not self._known.get(one, set()).isdisjoint(blocks))

    def learn(self, incarnation: int, inserted: bytes, evicted: bytes) -> None:
        """A worker's report: joined hashes, each of them once."""
        self._clear_outdated()
        known = self._known.get(incarnation)
        if known is None:
            return
        self._drop(incarnation, _split(evicted))
        fresh, index, alone = _split(inserted), self._index_of[incarnation], self._alone[incarnation]
        if self._blocks[incarnation] > HASHES_MAX:
            fresh = fresh[: HASHES_MAX - len(known)]
        for block in fresh:
            if block not in known:
                known.add(block)
                table = index[block[0]]
                there = table.get(block)
                if there is None:
                    table[block] = alone
                elif incarnation not in there:
                    table[block] = (*there, incarnation)
        if len(known) > self._blocks[incarnation]:
            self._forget_all(incarnation)  # more than it can hold: reports of evictions were lost, so all is forgotten

    def forget(self, incarnation: int, hashes: bytes, first: int) -> None:
        """The worker does not have block `first` of this chain, nor any that continues it."""
        if incarnation in self._known:
            self._drop(incarnation, _split(hashes[first * HASH_BYTES :]))

    def holders(self, side: str, hashes: bytes, every: int, most: int) -> list[int]:
        """Up to `most` workers of a side that have a beginning of a prompt, about those with the longest first.

        Each further block has fewer holders. The search finds the last block that any worker has, in O(log n), and then goes
        back by halves, so that workers with much of the prompt come before those with its first block only.
        """
        index, step = self._indexes.get(side), every * HASH_BYTES
        if not index:
            return []
        low = _last_known(hashes, step, lambda block: block in index[block[0]])
        found: dict[int, None] = {}
        while low:
            block = hashes[low * step - HASH_BYTES : low * step]
            there = index[block[0]].get(block, ())
            start = block[0] % len(there) if len(there) > most else 0  # prompts differ in which they find
            for incarnation in (*there[start:], *there[:start]):
                if block in self._known.get(incarnation, ()):
                    found[incarnation] = None
                    if len(found) == most:
                        return list(found)
            low //= 2
        return list(found)

    def _drop(self, incarnation: int, blocks: list[bytes]) -> None:
        known, index = self._known[incarnation], self._index_of[incarnation]
        for block in blocks:
            if block in known:
                known.remove(block)
                _unlink(index, block, incarnation)

    def _forget_all(self, incarnation: int) -> None:
        known = self._known.get(incarnation)
        if known:
            self._outdated.append((self._index_of[incarnation], incarnation, iter(known)))
            self._known[incarnation] = set()

    def _clear_outdated(self) -> None:
        for _ in range(CLEARED_PER_REPORT if self._outdated else 0):
            index, incarnation, blocks = self._outdated[-1]
            block = next(blocks, None)
            if block is None:
                self._outdated.pop()
                if not self._outdated:
                    return
            elif block not in self._known.get(incarnation, ()):
                _unlink(index, block, incarnation)

    def longest(self, incarnation: int, hashes: bytes, every: int = 1) -> int:
        """How many of a prompt's first blocks a worker has, in O(log n): it has no block without those before it. Every
        `every`-th hash names a block of this worker's size.

        Where reports were lost this may be wrong, in either direction.
        """
        known = self._known.get(incarnation)
        return _last_known(hashes, every * HASH_BYTES, known.__contains__) if known else 0


def _last_known(hashes: bytes, step: int, is_known: Callable[[bytes], bool]) -> int:
    """How many of the first blocks are known, if each known one follows known ones. Every `step` bytes end a block's hash."""
    count = len(hashes) // step
    if not count or not is_known(hashes[step - HASH_BYTES : step]):
        return 0
    low, high = 1, 2  # the first `low` are known
    while high <= count and is_known(hashes[high * step - HASH_BYTES : high * step]):
        low, high = high, 2 * high
    high = min(high, count + 1)
    while high - low > 1:
        middle = (low + high) // 2
        if is_known(hashes[middle * step - HASH_BYTES : middle * step]):
            low = middle
        else:
            high = middle
    return low


def _unlink(index: Index, block: bytes, incarnation: int) -> None:
    table = index[block[0]]
    left = tuple([other for other in table.get(block, ()) if other != incarnation])
    if left:
        table[block] = left
    else:
        table.pop(block, None)


def hashes_per_block(submit: Submit, block_size: int) -> int:
    """How many of a prompt's hashes one block of this size takes; 0 if it is not a whole number."""
    size = submit.hash_block_size
    return block_size // size if size and block_size % size == 0 else 0


def usable_hashes(submit: Submit, block_size: int) -> bytes:
    """Returns the hashes of a prompt's blocks of this size. Hashes are chained, so the last one in each block stands for all
    of it. Empty if this size is no multiple of the prompt's hash block size."""
    every = hashes_per_block(submit, block_size)
    if every <= 1:
        return submit.block_hashes if every else b""
    return b"".join(_split(submit.block_hashes)[every - 1 :: every])


def known_blocks(locality: Locality, incarnation: int, submit: Submit, block_size: int) -> int:
    """How many of a prompt's first blocks, of this size, a worker is believed to have."""
    every = hashes_per_block(submit, block_size)
    return locality.longest(incarnation, submit.block_hashes, every) if every else 0


def usable_tokens(blocks: int, submit: Submit, block_size: int) -> int:
    """The tokens of a cached beginning that save work: whole blocks; the last token is computed in any case, since the first
    one of the answer is drawn from its logits."""
    return min(blocks, (submit.prompt_tokens - 1) // block_size) * block_size


def _split(joined: bytes) -> list[bytes]:
    return [joined[at : at + HASH_BYTES] for at in range(0, len(joined) - len(joined) % HASH_BYTES, HASH_BYTES)]
