"""Keeps the KV of ended streams findable until their gateways send the hashes of its blocks. Pure.

A worker cannot name blocks that hold output: names are hashes under a key that only gateways have. So it names them by their
origin (`proto.kv.kept_names`), and the next attempt at the same request finds them by these names. Once the stream has ended,
its gateway sends the hashes of its blocks, which replace the names. The next turn of a conversation, whose prompt begins with
this answer, then finds the blocks. Meanwhile they are not held: they count as room and are evicted when it is needed.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final, NamedTuple

from engine.kv.allocator import BlockAllocator
from engine.kv.sequence import SequenceBlocks
from proto.codec import split_hashes
from proto.kv import kept_names
from proto.messages import Reserve
from proto.parts import Returns
from proto.progress import AnswerNames

REMEMBERED_MAX: Final = 4096


class _Kept(NamedTuple):
    gateway_incarnation: int
    hashes: tuple[bytes, ...]  # of the prompt's full blocks
    names: list[bytes]  # of all full blocks, until their hashes are known
    returns: Returns


class EndedStreams:
    def __init__(self, allocator: BlockAllocator, block_size: int) -> None:
        self._allocator, self._block_size = allocator, block_size
        self._kept: OrderedDict[tuple[str, int, int], _Kept] = OrderedDict()  # (request, attempt, choice), oldest first

    def keep(self, order: Reserve, choice: int, hashes: Sequence[bytes], held: SequenceBlocks) -> None:
        """Name the blocks of a stream while they are still held, if all of the prompt's full blocks are in the prefix tree."""
        size, full = self._block_size, held.length // self._block_size
        known = self._allocator.match_prefix(hashes)
        self._allocator.free(known)
        is_whole = len(hashes) == order.prompt_tokens // size and known == held.table[: len(known)]
        may_be_cached = bool(hashes) or order.prompt_tokens < size
        if not may_be_cached or not is_whole or len(known) < len(hashes):
            return
        stream_id = order.request_id if order.choices == 1 else f"{order.request_id} choice {choice}"
        names = split_hashes(kept_names(b"".join(hashes), stream_id, order.attempt, size, held.length))
        self._allocator.insert(names, held.table[:full])
        key = (order.request_id, order.attempt, choice)
        self._kept[key] = _Kept(order.gateway.incarnation, tuple(hashes), names, order.returns)
        if len(self._kept) > REMEMBERED_MAX:
            self._kept.popitem(last=False)

    def name(self, gateway_incarnation: int, message: AnswerNames) -> None:
        """Replace the names of an answer's blocks by the hashes that its gateway sends. Messages of other gateways are
        ignored."""
        size, key = self._block_size, (message.request_id, message.attempt, message.choice)
        kept = self._kept.get(key)
        if kept is None or kept.gateway_incarnation != gateway_incarnation or size % message.block_size:
            return
        del self._kept[key]
        every, first = size // message.block_size, message.first_block
        known = first // every
        if known > len(kept.hashes):
            return  # what lies between has no hashes
        new = split_hashes(message.block_hashes)[(known + 1) * every - 1 - first :: every]
        names = [*kept.hashes[:known], *new]
        blocks = self._allocator.match_prefix(kept.names)
        count = min(len(blocks), len(names))
        if count > known:
            self._allocator.forget(blocks[known:])
            self._allocator.insert(names[:count], blocks[:count], known)
        self._allocator.free(blocks, kept.returns)
