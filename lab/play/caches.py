"""Names of KV blocks, and the prefix cache of a virtual worker, as the scheduler hears of it.

Blocks with equal names hold equal tokens. The cache gives up whole parts, the least recently used first: a part is a session,
or a block of a trace.
"""

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from lab.play.request import Sent
from proto.limits import HASH_BYTES

Parts = Sequence[tuple[int, bytes]]  # each with its names, in the order of the prompt


def names(owner: int, first: int, until: int) -> bytes:
    """The names of blocks `first` to `until` of what `owner` stands for."""
    table = np.empty((max(until - first, 0), 2), dtype="<u8")
    table[:, 0], table[:, 1] = np.arange(first, max(until, first)), owner
    return table.tobytes()


class Namer:
    """The names of the blocks of prompts and answers."""

    def __init__(self, block_size: int, trace_block_tokens: int) -> None:
        self._size, self._trace_blocks = block_size, max(trace_block_tokens // block_size, 1)
        self._sessions: dict[int, bytes] = {}

    def parts(self, sent: Sent, number: int) -> Parts:
        """The full blocks of a request's prompt and of its answer; none if nothing of it may be used again."""
        if sent.session:
            blocks = (sent.prompt_tokens + sent.output_tokens - 1) // self._size
            known = self._sessions.get(sent.session, b"")[: sent.reused_tokens // self._size * HASH_BYTES]
            found = known + names(number + 1, len(known) // HASH_BYTES, blocks)
            self._sessions[sent.session] = found
            return [(sent.session, found)]
        left, each = sent.prompt_tokens // self._size, self._trace_blocks
        parts = []
        for block in sent.blocks:
            parts.append((block, names(block, 0, min(left, each))))
            left = max(left - each, 0)
        return parts


class PlayedCache:
    """The blocks that a worker keeps of what it no longer computes or decodes."""

    def __init__(self) -> None:
        self._kept: OrderedDict[int, bytes] = OrderedDict()
        self._blocks = 0

    def keep(self, parts: Parts, room_blocks: int) -> tuple[bytes, bytes]:
        """Keeps these parts. Returns the names of blocks that are new here, and of those that it gives up."""
        inserted, evicted = [], []
        for part, found in reversed(parts):  # the beginning of a prompt is used last, and so given up last
            before = self._kept.get(part, b"")
            if not before.startswith(found):
                same = len(before) if found.startswith(before) else _same(before, found)
                inserted.append(found[same:])
                evicted.append(before[same:])
                self._blocks += (len(found) - len(before)) // HASH_BYTES
                self._kept[part] = found
            if part in self._kept:
                self._kept.move_to_end(part)
        while self._blocks > room_blocks and self._kept:
            _, gone = self._kept.popitem(last=False)
            self._blocks -= len(gone) // HASH_BYTES
            evicted.append(gone)
        return b"".join(inserted), b"".join(evicted)


def _same(one: bytes, other: bytes) -> int:
    """The length of the beginning, in whole names, that both have."""
    blocks = min(len(one), len(other)) // HASH_BYTES
    pair = (np.frombuffer(text, dtype="V16", count=blocks) for text in (one, other))
    differ = np.flatnonzero(next(pair) != next(pair))
    return int(differ[0] if len(differ) else blocks) * HASH_BYTES
