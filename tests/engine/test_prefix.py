"""The prefix cache in the allocator against a naive twin, over random histories of prompts that share their beginnings."""

import hashlib
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.kv.allocator import BlockAllocator, OutOfBlocks

TOTAL = 14
Prefix = tuple[int, ...]  # a block's contents with all that comes before it; one number stands for one block's tokens


def hash_of(prefix: Prefix) -> bytes:
    return hashlib.blake2b(repr(prefix).encode(), digest_size=16).digest()


def prefixes(chain: Prefix) -> list[Prefix]:
    return [chain[: end + 1] for end in range(len(chain))]


def hashes(chain: Prefix) -> list[bytes]:
    return [hash_of(prefix) for prefix in prefixes(chain)]


class Twin:
    """The same cache over prefixes written out: two dictionaries and a clock, everything searched for."""

    def __init__(self) -> None:
        self.known: dict[Prefix, int] = {}
        self.idle_since: dict[Prefix, int] = {}
        self.copy_of: dict[int, Prefix] = {}
        self.clock = itertools.count()

    def longest(self, chain: Prefix) -> list[int]:
        return [self.known[p] for p in itertools.takewhile(lambda p: p in self.known, prefixes(chain))]

    def evict(self) -> None:
        self.forget(min(self.idle_since, key=lambda prefix: self.idle_since[prefix]))

    def forget(self, root: Prefix) -> None:
        for prefix in [p for p in self.known if p[: len(root)] == root]:
            del self.known[prefix]
            self.idle_since.pop(prefix, None)

    def insert(self, chain: Prefix, blocks: list[int]) -> None:
        for prefix, block in zip(prefixes(chain), blocks, strict=True):
            if self.known.setdefault(prefix, block) != block:
                self.copy_of[block] = prefix
            else:
                self.copy_of.pop(block, None)

    def release(self, block: int) -> None:
        prefix = next((p for p, b in self.known.items() if b == block), None)
        if prefix is None:
            prefix = self.copy_of.pop(block, None)
            if prefix is None or prefix not in self.idle_since:
                return
        self.idle_since[prefix] = next(self.clock)


class PrefixMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.allocator = BlockAllocator(TOTAL)
        self.twin = Twin()
        self.requests: list[tuple[Prefix, list[int], int]] = []
        """(chain, blocks, how many are inserted) of everything that holds blocks."""
        self.contents: dict[int, Prefix] = {}
        self.told: set[bytes] = set()
        self.refs = [0] * TOTAL

    @rule(chain=st.lists(st.integers(0, 1), min_size=1, max_size=6).map(tuple))
    def begin(self, chain: Prefix) -> None:
        expected = self.twin.longest(chain)
        found = self.allocator.match_prefix(hashes(chain))
        assert found == expected
        assert [self.contents[block] for block in found] == prefixes(chain)[: len(found)], "a hit on other contents"
        for block in found:
            self.refs[block] += 1
            self.twin.idle_since.pop(self.contents[block], None)
        wanted = len(chain) - len(found)
        idle = set(self.twin.idle_since)
        free = self.refs.count(0) - len(idle)
        if wanted > free + len(idle):
            with pytest.raises(OutOfBlocks):
                self.allocator.allocate(wanted)
            self.drop(found)
            return
        while wanted > self.refs.count(0) - len(self.twin.idle_since):
            self.twin.evict()
        fresh = self.allocator.allocate(wanted)
        for block, prefix in zip(fresh, prefixes(chain)[len(found) :], strict=True):
            assert self.refs[block] == 0 and block not in self.twin.known.values()
            self.refs[block] = 1
            self.contents[block] = prefix
        self.requests.append((chain, found + fresh, len(found)))

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def insert(self, data: st.DataObject) -> None:
        at = data.draw(st.integers(0, len(self.requests) - 1))
        chain, blocks, inserted = self.requests[at]
        end = data.draw(st.integers(inserted, len(chain)))
        self.allocator.insert(hashes(chain)[:end], blocks[:end], inserted)
        if end > inserted or inserted == 0 or chain[:inserted] not in self.twin.known:
            self.twin.insert(chain[:end], blocks[:end])
        self.requests[at] = (chain, blocks, end)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        _, blocks, _ = self.requests.pop(data.draw(st.integers(0, len(self.requests) - 1)))
        self.drop(blocks)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), quarantine=st.booleans())
    def suspect(self, data: st.DataObject, quarantine: bool) -> None:
        """A request's blocks turn out to be wrong; or, if nobody shares them, must not be touched for a while."""
        at = data.draw(st.integers(0, len(self.requests) - 1))
        chain, blocks, _ = self.requests[at]
        for block in blocks:
            self.twin.copy_of.pop(block, None)
            for prefix in [p for p, b in self.twin.known.items() if b == block]:
                self.twin.forget(prefix)
        if quarantine and all(self.refs[block] == 1 for block in blocks):
            self.allocator.quarantine(blocks)
            assert self.allocator.quarantined_count == len(blocks)
            self.allocator.check_invariants()
            self.allocator.unquarantine(blocks)
            for block in blocks:
                self.refs[block] = 0
            del self.requests[at]
        else:
            self.allocator.forget(blocks)
            self.requests[at] = (chain, blocks, 0)

    @rule(most=st.integers(1, 9))
    def report(self, most: int) -> None:
        inserted, evicted = self.allocator.take_changes(most)
        assert len(inserted) + len(evicted) <= 16 * most
        self.told |= {inserted[at : at + 16] for at in range(0, len(inserted), 16)}
        self.told -= {evicted[at : at + 16] for at in range(0, len(evicted), 16)}

    @rule()
    def start_reports_anew(self) -> None:
        self.told = set()
        self.allocator.report_all()

    def drop(self, blocks: list[int]) -> None:
        self.allocator.free(blocks)
        for block in reversed(blocks):
            self.refs[block] -= 1
            if self.refs[block] == 0:
                self.twin.release(block)

    @invariant()
    def agrees(self) -> None:
        a, twin = self.allocator, self.twin
        a.check_invariants()
        assert a.free_count + a.held_count + a.cached_count + a.quarantined_count == TOTAL
        assert [a.refs(block) for block in range(TOTAL)] == self.refs
        assert a.cached_count == len(twin.idle_since)
        assert all(self.contents[block] == prefix for prefix, block in twin.known.items())
        assert all(prefix[:-1] in twin.known for prefix in twin.known if len(prefix) > 1), "an unreachable tail"
        for prefix in twin.known:
            assert a._prefixes.longest(hashes(prefix)) == twin.longest(prefix)
            assert len(twin.longest(prefix)) == len(prefix)

    def teardown(self) -> None:
        for _, blocks, _ in self.requests:
            self.allocator.free(blocks)
        self.report(10_000)
        assert self.told == {hash_of(prefix) for prefix in self.twin.known}, "reports do not add up to what is known"
        assert self.allocator.free_count + self.allocator.cached_count == TOTAL
        assert len(self.allocator.allocate(TOTAL)) == TOTAL, "what is cached is room"
        assert self.allocator.match_prefix(hashes((0,))) == self.allocator.match_prefix(hashes((1,))) == []


TestPrefix = PrefixMachine.TestCase
TestPrefix.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def known(allocator: BlockAllocator, chain: Prefix) -> int:
    blocks = allocator.match_prefix(hashes(chain))
    allocator.free(blocks)
    return len(blocks)


def run(allocator: BlockAllocator, chain: Prefix) -> None:
    """A request from beginning to end."""
    found = allocator.match_prefix(hashes(chain))
    blocks = found + allocator.allocate(len(chain) - len(found))
    allocator.insert(hashes(chain), blocks, len(found))
    allocator.free(blocks)


def test_tails_and_oldest_blocks_go_first() -> None:
    """The tail of a chain is evicted before its head, and the chain used last goes last."""
    allocator = BlockAllocator(8)
    run(allocator, (1, 2, 3))
    run(allocator, (5, 6, 7))
    run(allocator, (1, 2, 4))
    allocator.free(allocator.allocate(2))
    assert (known(allocator, (1, 2, 3)), known(allocator, (5, 6, 7)), known(allocator, (1, 2, 4))) == (2, 3, 3)
    blocks = allocator.allocate(4)
    assert (known(allocator, (5, 6, 7)), known(allocator, (1, 2, 4))) == (1, 3)
    allocator.free(blocks)


def test_older_of_equal_blocks_stays() -> None:
    """The older of two blocks with one hash stays cached."""
    allocator = BlockAllocator(8)
    one, other = allocator.allocate(2), allocator.allocate(2)
    allocator.insert(hashes((1, 2)), one)
    allocator.insert(hashes((1, 2)), other)
    allocator.free(other)
    assert (allocator.cached_count, allocator.free_count) == (0, 6)
    assert allocator.match_prefix(hashes((1, 2))) == one


def test_chain_begun_twice_keeps_its_head() -> None:
    """B hangs its tail on A's blocks, which it does not hold: when both are done, the shared head is still younger."""
    allocator = BlockAllocator(6)
    a, b = allocator.allocate(2), allocator.allocate(3)
    allocator.insert(hashes((1, 2)), a)
    allocator.insert(hashes((1, 2, 3)), b)
    allocator.free(a)
    allocator.free(b)
    allocator.free(allocator.allocate(4))
    assert known(allocator, (1, 2, 3)) == 2


def test_evicted_head_hides_held_tail() -> None:
    """A held tail cannot be found once its head is evicted, but its holder keeps it."""
    allocator = BlockAllocator(4)
    a, b = allocator.allocate(1), allocator.allocate(2)
    allocator.insert(hashes((1,)), a)
    allocator.insert(hashes((1, 2)), b)
    allocator.free(a)
    allocator.free(allocator.allocate(2))
    assert known(allocator, (1, 2)) == 0 and allocator.refs(b[1]) == 1
    allocator.insert(hashes((1, 2)), b, 1)
    assert known(allocator, (1, 2)) == 2, "its own head stands for the prefix now"


def test_unchained_hashes_match_no_block_twice() -> None:
    """They come from a gateway, and nobody has checked them."""
    allocator = BlockAllocator(8)
    first, second, third = hashes((1, 2, 3))
    blocks = allocator.allocate(3)
    allocator.insert([first, second, third], blocks)
    assert allocator.match_prefix([first, first]) == blocks[:1]
    assert allocator.match_prefix([first, third]) == blocks[:1]
    assert allocator.match_prefix([second, third]) == []
    assert allocator.match_prefix([first, second, third]) == blocks


def test_unheld_blocks_get_no_hash() -> None:
    """The insertion of a hash for a block that is not held raises an AssertionError."""
    with pytest.raises(AssertionError):
        BlockAllocator(4).insert(hashes((1,)), [2])


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8).map(tuple), max_size=30), st.integers(8, 20))
def test_fitting_prompt_always_finds_room(chains: list[Prefix], total: int) -> None:
    """A prompt that fits the pool finds room after any earlier prompts, and is cached afterwards."""
    allocator = BlockAllocator(total)
    for chain in chains:
        run(allocator, chain)
        assert known(allocator, chain) == len(chain), "what was just computed is there"
        allocator.check_invariants()
