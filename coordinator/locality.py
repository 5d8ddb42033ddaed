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

    def longest(self, epoch: int, hashes: bytes) -> int:
        """How many of a prompt's first blocks a worker has, in O(log n): it has no block without those before it.

        Where reports were lost this may be wrong, in either direction.
        """
        known = self._known.get(epoch)
        count = len(hashes) // HASH_BYTES
        if not known or not count or hashes[:HASH_BYTES] not in known:
            return 0
        low, high = 1, 2  # the first `low` are there
        while high <= count and hashes[(high - 1) * HASH_BYTES : high * HASH_BYTES] in known:
            low, high = high, 2 * high
        high = min(high, count + 1)
        while high - low > 1:
            middle = (low + high) // 2
            if hashes[(middle - 1) * HASH_BYTES : middle * HASH_BYTES] in known:
                low = middle
            else:
                high = middle
        return low


def usable_hashes(submit: Submit, block_size: int) -> bytes:
    """The names of a prompt's blocks where they are of blocks of this size, else none."""
    return submit.block_hashes if submit.hash_block_size == block_size else b""


def usable_tokens(blocks: int, submit: Submit, block_size: int) -> int:
    """What of a cached beginning saves work: whole blocks, and the last token is computed in any case, since the first one
    of the answer is drawn from its logits."""
    return min(blocks, (submit.prompt_tokens - 1) // block_size) * block_size


def _split(joined: bytes) -> list[bytes]:
    return [joined[at : at + HASH_BYTES] for at in range(0, len(joined) - len(joined) % HASH_BYTES, HASH_BYTES)]
