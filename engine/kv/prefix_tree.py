"""The blocks that hold a known prefix: a tree of chained hashes over a pool's blocks. Pure; only the allocator uses it.

A hash stands for a full block *and* all that comes before it, so a node's parent is the block before it. Two rules:
- A node never outlives its parent: what cannot be reached from the start of a prompt is no longer known.
- Among idle blocks, the one least likely to be used again is evicted first (`IdleBlocks`). A chain is evicted from its tail.

Two requests that compute the same prefix at the same time end up with two blocks for one hash. The older one stays; the other
is remembered as its copy while it is held, so that letting go of a chain counts as use of the blocks that stand for it.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from engine.kv.idle_blocks import IdleBlocks
from proto.parts import Returns

CHANGES_MAX = 1 << 16  # kept for the next report; the oldest are forgotten, since reports are hints


class _Node:
    __slots__ = ("block", "children", "hash", "parent", "returns")

    def __init__(self, hash_: bytes, block: int, parent: "_Node | None") -> None:
        self.hash = hash_
        self.block = block
        self.parent = parent
        self.children: dict[bytes, _Node] = {}
        self.returns = Returns()  # of the last user


class PrefixChanges:
    """The prefixes that became known or were given up since the last question, for a caller that keeps a copy."""

    def __init__(self, known: Iterable[bytes]) -> None:
        self._changes: OrderedDict[bytes, bool] = OrderedDict()  # hash → whether it is known now
        self.begin(known)

    def begin(self, known: Iterable[bytes]) -> None:
        """Start over: the caller's copy is empty, so report every known hash."""
        self._changes = OrderedDict.fromkeys(known, True)

    def note(self, hash_: bytes, known: bool) -> None:
        if self._changes.pop(hash_, known) is not known:
            return  # there and back again since the last report
        self._changes[hash_] = known
        if len(self._changes) > CHANGES_MAX:
            self._changes.popitem(last=False)

    def take(self, most: int) -> tuple[bytes, bytes]:
        """(hashes known since, hashes given up since) the last report, joined; at most `most` in all."""
        parts: dict[bool, list[bytes]] = {True: [], False: []}
        for _ in range(min(most, len(self._changes))):
            hash_, known = self._changes.popitem(last=False)
            parts[known].append(hash_)
        return b"".join(parts[True]), b"".join(parts[False])


class PrefixTree:
    def __init__(self) -> None:
        self._nodes: dict[bytes, _Node] = {}
        self._node_of: dict[int, _Node] = {}
        self._copies: dict[int, _Node] = {}  # held blocks with the contents of another block's node
        self.idle = IdleBlocks()  # with a node that nobody holds
        self._followers: list[PrefixChanges] = []

    @property
    def hashes(self) -> Iterable[bytes]:
        """All that are known, parents before children."""
        return self._nodes

    def __contains__(self, hash_: bytes) -> bool:
        return hash_ in self._nodes

    def follow(self) -> PrefixChanges:
        """Tell the caller of all changes from here on; the first ones are what is known already."""
        changes = PrefixChanges(self._nodes)
        self._followers.append(changes)
        return changes

    def unfollow(self, changes: PrefixChanges) -> None:
        self._followers.remove(changes)

    def longest(self, hashes: Sequence[bytes]) -> list[int]:
        blocks: list[int] = []
        before: _Node | None = None
        for hash_ in hashes:
            node = self._nodes.get(hash_)
            if node is None or node.parent is not before:
                break  # not known, or (the hashes are a gateway's word) no chain: a block would be named twice, or out of place
            blocks.append(node.block)
            before = node
        return blocks

    def insert(self, hashes: Sequence[bytes], blocks: Sequence[int], start: int) -> None:
        """`blocks[i]` holds what `hashes[i]` stands for; those before `start` were inserted before."""
        assert len(hashes) == len(blocks) and 0 <= start <= len(blocks)
        if start and hashes[start - 1] not in self._nodes:
            start = 0  # what stood for our prefix is gone, but our own blocks hold it as well
        parent = self._nodes[hashes[start - 1]] if start else None
        for hash_, block in zip(hashes[start:], blocks[start:], strict=True):
            node = self._nodes.get(hash_)
            if node is None:
                assert block not in self._node_of, f"block {block} has a hash already"
                self._copies.pop(block, None)
                node = _Node(hash_, block, parent)
                self._nodes[hash_] = self._node_of[block] = node
                if parent is not None:
                    parent.children[hash_] = node
                self._note(hash_, True)
            elif node.block != block:
                self._copies[block] = node
            parent = node

    def hold(self, block: int) -> None:
        self.idle.discard(block)

    def release(self, block: int, returns: Returns | None) -> bool:
        """Nobody holds this block any more. True if it is kept for its hash, False if it is free. `returns`: of who used it;
        None: as before."""
        node = self._node_of.get(block)
        if node is not None:
            node.returns = returns or node.returns
            self.idle.add(block, node.returns)
            return True
        node = self._copies.pop(block, None)
        if node is not None and node.block in self.idle and self._node_of.get(node.block) is node:
            self.idle.used(node.block)
        return False

    def evict(self) -> list[int]:
        """Give up the block that is worth least, and what hangs on it; returns those that are free now."""
        while True:
            node = self._node_of[self.idle.first()]
            child = next(iter(node.children.values()), None)
            # A block that others continue is worth as much as the block that continues it.
            if child is None or child.block not in self.idle or not self.idle.keep_with(node.block, child.block):
                return self._remove(node)

    def end(self, hash_: bytes) -> list[int]:
        """If the block of `hash_` is idle, evict it and all that continues it. Then evict its ancestors up to the first that
        is held or has other children. Returns the freed blocks."""
        node: _Node | None = self._nodes[hash_]
        freed: list[int] = []
        while node is not None and node.block in self.idle and (not freed or not node.children):
            parent = node.parent
            freed += self._remove(node)
            node = parent
        return freed

    def forget(self, blocks: Sequence[int]) -> list[int]:
        """Drops these blocks' contents for good; returns the blocks that are free now."""
        freed: list[int] = []
        for block in blocks:
            self._copies.pop(block, None)
            if block in self._node_of:
                freed += self._remove(self._node_of[block])
        return freed

    def check_invariants(self, held: set[int]) -> None:
        """Asserts that the maps agree, that no node outlives its parent, and that nobody holds an idle block."""
        assert len(self._nodes) == len(self._node_of)
        assert set(self.idle) == set(self._node_of) - held, "a block with a hash is neither held nor idle, or both"
        assert not set(self._copies) & set(self._node_of) and set(self._copies) <= held
        for block, node in self._node_of.items():
            assert node.block == block and self._nodes[node.hash] is node
            assert node.parent is None or self._nodes.get(node.parent.hash) is node.parent, "an unreachable tail"
            assert node.parent is None or node.parent.children[node.hash] is node
            assert all(self._nodes.get(child.hash) is child for child in node.children.values())

    def _remove(self, root: _Node) -> list[int]:
        if root.parent is not None:
            del root.parent.children[root.hash]
        freed, left = [], [root]
        while left:
            node = left.pop()
            left.extend(node.children.values())
            del self._nodes[node.hash], self._node_of[node.block]
            if node.block in self.idle:
                self.idle.discard(node.block)
                freed.append(node.block)
            self._note(node.hash, False)
        return freed

    def _note(self, hash_: bytes, known: bool) -> None:
        for changes in self._followers:
            changes.note(hash_, known)
