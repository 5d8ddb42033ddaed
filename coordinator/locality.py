"""What each worker's prefix cache is believed to hold. Hints only: a worker that has less says so (`CacheMiss`). Pure.

Entries belong to a worker's epoch and go with it; a worker that registers starts empty, and tells what it has again.
"""

from proto.limits import HASH_BYTES
from proto.messages import Submit

HASHES_MAX = 1 << 17
"""Per worker, about 12 MB of memory. Of a larger cache no more is learnt once so much is known, until some is evicted."""


class Locality:
    def __init__(self) -> None:
        self._known: dict[int, set[bytes]] = {}
        self._blocks: dict[int, int] = {}

    def join(self, epoch: int, kv_blocks: int) -> None:
        self._known[epoch] = set()
        self._blocks[epoch] = kv_blocks

    def leave(self, epoch: int) -> None:
        self._known.pop(epoch, None)
        self._blocks.pop(epoch, None)

    def count(self, epoch: int) -> int:
        return len(self._known.get(epoch, ()))

    def learn(self, epoch: int, inserted: bytes, evicted: bytes) -> None:
        """A worker's report: joined hashes, each of them once."""
        known = self._known.get(epoch)
        if known is None:
            return
        known.difference_update(_split(evicted))
        fresh = _split(inserted)
        if self._blocks[epoch] > HASHES_MAX:
            known.update(fresh[: HASHES_MAX - len(known)])
            return
        known.update(fresh)
        if len(known) > self._blocks[epoch]:
            known.clear()  # more than it can hold: reports of evictions were lost, and what is true here is not known

    def forget(self, epoch: int, hashes: bytes, first: int) -> None:
        """The worker does not have block `first` of this chain, nor any that continues it."""
        known = self._known.get(epoch)
        if known is not None:
            known.difference_update(_split(hashes[first * HASH_BYTES :]))

    def longest(self, epoch: int, hashes: bytes, every: int = 1) -> int:
        """How many of a prompt's first blocks a worker has, in O(log n): it has no block without those before it. Every
        `every`-th hash names a block of this worker's size.

        Where reports were lost this may be wrong, in either direction.
        """
        known = self._known.get(epoch)
        step = every * HASH_BYTES
        count = len(hashes) // step
        if not known or not count or hashes[step - HASH_BYTES : step] not in known:
            return 0
        low, high = 1, 2  # the first `low` are there
        while high <= count and hashes[high * step - HASH_BYTES : high * step] in known:
            low, high = high, 2 * high
        high = min(high, count + 1)
        while high - low > 1:
            middle = (low + high) // 2
            if hashes[middle * step - HASH_BYTES : middle * step] in known:
                low = middle
            else:
                high = middle
        return low


def hashes_per_block(submit: Submit, block_size: int) -> int:
    """How many of a prompt's hashes one block of this size takes; 0 if it is not a whole number."""
    size = submit.hash_block_size
    return block_size // size if size and block_size % size == 0 else 0


def usable_hashes(submit: Submit, block_size: int) -> bytes:
    """The names of a prompt's blocks of this size: since hashes are chained, the last one in each block stands for all of
    it. None if its hashes are of blocks that do not fill one of these."""
    every = hashes_per_block(submit, block_size)
    if every <= 1:
        return submit.block_hashes if every else b""
    return b"".join(_split(submit.block_hashes)[every - 1 :: every])


def known_blocks(locality: Locality, epoch: int, submit: Submit, block_size: int) -> int:
    """How many of a prompt's first blocks, of this size, a worker is believed to have."""
    every = hashes_per_block(submit, block_size)
    return locality.longest(epoch, submit.block_hashes, every) if every else 0


def usable_tokens(blocks: int, submit: Submit, block_size: int) -> int:
    """What of a cached beginning saves work: whole blocks, and the last token is computed in any case, since the first one
    of the answer is drawn from its logits."""
    return min(blocks, (submit.prompt_tokens - 1) // block_size) * block_size


def _split(joined: bytes) -> list[bytes]:
    return [joined[at : at + HASH_BYTES] for at in range(0, len(joined) - len(joined) % HASH_BYTES, HASH_BYTES)]
