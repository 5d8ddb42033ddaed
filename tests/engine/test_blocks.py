"""The allocator and the block tables against naive twins, over random histories."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.kv.allocator import BlockAllocator, OutOfBlocks
from engine.kv.sequence import SequenceBlocks
from engine.sampling.finish import finish_reason
from proto.errors import FinishReason
from proto.sampling import Sampling

TOTAL = 12


def test_an_allocator_over_a_part_of_a_pool_gives_out_that_part_alone() -> None:
    allocator = BlockAllocator(TOTAL, first=100)
    taken = allocator.allocate(TOTAL)
    assert taken == list(range(100, 100 + TOTAL))
    allocator.insert([b"a", b"b"], taken[:2])
    allocator.quarantine(taken[2:4])
    allocator.free([*taken[:2], *taken[4:]])
    allocator.check_invariants()
    assert allocator.match_prefix([b"a", b"b"]) == [100, 101]
    allocator.unquarantine(taken[2:4])
    allocator.check_invariants()
    with pytest.raises(OutOfBlocks):
        allocator.allocate(TOTAL)


class AllocatorMachine(RuleBasedStateMachine):
    """The twin is one list: how many references each block has, or -1 for quarantined."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = BlockAllocator(TOTAL)
        self.twin = [0] * TOTAL

    @rule(count=st.integers(0, TOTAL + 2))
    def allocate(self, count: int) -> None:
        if count > self.twin.count(0):
            with pytest.raises(OutOfBlocks):
                self.allocator.allocate(count)
            return
        taken = self.allocator.allocate(count)
        assert len(set(taken)) == count and all(self.twin[block] == 0 for block in taken)
        for block in taken:
            self.twin[block] = 1

    @precondition(lambda self: any(refs > 0 for refs in self.twin))
    @rule(data=st.data(), action=st.sampled_from(["free", "share", "quarantine"]))
    def on_held(self, data: st.DataObject, action: str) -> None:
        held = [block for block, refs in enumerate(self.twin) if refs > 0 and (action != "quarantine" or refs == 1)]
        blocks = data.draw(st.lists(st.sampled_from(held), unique=True)) if held else []
        getattr(self.allocator, action)(blocks)
        for block in blocks:
            self.twin[block] = {"free": self.twin[block] - 1, "share": self.twin[block] + 1, "quarantine": -1}[action]

    @precondition(lambda self: -1 in self.twin)
    @rule(data=st.data())
    def unquarantine(self, data: st.DataObject) -> None:
        blocks = data.draw(
            st.lists(st.sampled_from([b for b, refs in enumerate(self.twin) if refs == -1]), unique=True)
        )
        self.allocator.unquarantine(blocks)
        for block in blocks:
            self.twin[block] = 0

    @invariant()
    def agrees(self) -> None:
        self.allocator.check_invariants()
        assert [self.allocator.refs(block) for block in range(TOTAL)] == [max(refs, 0) for refs in self.twin]
        assert self.allocator.free_count == self.twin.count(0)
        assert self.allocator.quarantined_count == self.twin.count(-1)
        assert self.allocator.free_count + self.allocator.held_count + self.allocator.quarantined_count == TOTAL


TestAllocator = AllocatorMachine.TestCase


@pytest.mark.parametrize("misuse", ["free", "share", "quarantine", "unquarantine"])
def test_blocks_that_are_not_held_are_our_bug(misuse: str) -> None:
    with pytest.raises(AssertionError):
        getattr(BlockAllocator(4), misuse)([2])


def test_shared_blocks_are_not_quarantined() -> None:
    allocator = BlockAllocator(4)
    blocks = allocator.allocate(1)
    allocator.share(blocks)
    with pytest.raises(AssertionError):
        allocator.quarantine(blocks)


def test_fresh_blocks_come_in_one_run() -> None:
    allocator = BlockAllocator(8)
    assert allocator.allocate(3) == [0, 1, 2]
    allocator.free([0, 1, 2])
    assert allocator.allocate(4) == [0, 1, 2, 3]


@given(
    block_size=st.integers(1, 4),
    prompt=st.integers(0, 9),
    history=st.lists(
        st.tuples(st.integers(0, 3), st.sampled_from(["append", "append", "fork", "release"])), max_size=40
    ),
)
def test_sequences_keep_their_own_tokens(block_size: int, prompt: int, history: list[tuple[int, str]]) -> None:
    """Each sequence writes its tokens to a pretend pool; whoever forks or leaves, it always reads back exactly its own."""
    allocator = BlockAllocator(200)
    pool: dict[tuple[int, int], int] = {}
    stamp = iter(range(10_000))
    sequences: list[tuple[SequenceBlocks, list[int]]] = [(SequenceBlocks(allocator, block_size), [])]

    def append(blocks: SequenceBlocks, tokens: list[int]) -> None:
        copy = blocks.append_slot()
        if copy is not None:
            for offset in range(block_size):
                pool.pop((copy[1], offset), None)
                if (copy[0], offset) in pool:
                    pool[copy[1], offset] = pool[copy[0], offset]
        at = len(tokens)
        tokens.append(next(stamp))
        pool[blocks.table[at // block_size], at % block_size] = tokens[-1]

    for _ in range(prompt):
        append(*sequences[0])
    for which, action in history:
        if not sequences:
            break
        blocks, tokens = sequences[which % len(sequences)]
        if action == "append":
            append(blocks, tokens)
        elif action == "fork" and len(sequences) < 4:
            sequences.append((blocks.fork(), list(tokens)))
        elif action == "release":
            blocks.release()
            sequences.pop(which % len(sequences))
        allocator.check_invariants()
        for blocks, tokens in sequences:
            read = [pool[blocks.table[at // block_size], at % block_size] for at in range(blocks.length)]
            assert read == tokens
    for blocks, _ in sequences:
        blocks.release()
        blocks.release()
    assert allocator.free_count == allocator.total


def test_append_without_room_changes_nothing() -> None:
    allocator = BlockAllocator(1)
    blocks = SequenceBlocks(allocator, 2, allocator.allocate(1), length=1)
    fork = blocks.fork()
    with pytest.raises(OutOfBlocks):
        fork.append_slot()
    assert (fork.length, fork.table, allocator.refs(0)) == (1, [0], 2)
    fork.release()
    assert blocks.append_slot() is None and blocks.length == 2


def test_finish_reasons() -> None:
    sampling = Sampling(max_tokens=3, stop_token_ids=(2, 9))
    assert finish_reason(5, 1, sampling) is None
    assert finish_reason(9, 1, sampling) is FinishReason.STOP
    assert finish_reason(5, 3, sampling) is FinishReason.LENGTH
    assert finish_reason(2, 3, sampling) is FinishReason.STOP
