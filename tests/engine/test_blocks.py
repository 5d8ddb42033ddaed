"""The allocator and the block tables against naive twins, over random histories."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.kv.allocator import BlockAllocator, BlockPool, OutOfBlocks
from engine.kv.sequence import SequenceBlocks
from engine.sampling.finish import finish_reason
from proto.errors import FinishReason
from proto.sampling import Sampling

TOTAL = 12


def test_allocators_share_pool_and_cache() -> None:
    """As the two roles of a mixed worker do."""
    pool = BlockPool(TOTAL)
    prefill, decode = BlockAllocator(4, pool), BlockAllocator(TOTAL - 4, pool)
    taken = prefill.allocate(4)
    with pytest.raises(OutOfBlocks, match="1 KV blocks wanted, 0 of 4 free"):
        prefill.allocate(1)
    prefill.insert([b"a", b"b"], taken[:2])
    assert decode.match_prefix([b"a", b"b", b"c"]) == taken[:2]
    prefill.free(taken)
    assert (prefill.held_count, decode.held_count, decode.room) == (0, 2, TOTAL - 6)
    assert decode.allocate(TOTAL - 6) and prefill.room == 4, "what one of them holds is not taken from the other"
    assert set(prefill.allocate(4)).isdisjoint(taken[:2]), "the other one still holds them"
    for allocator in (prefill, decode):
        assert allocator.take_changes(9) == (b"ab", b"") and allocator.take_changes(9) == (b"", b"")
        allocator.check_invariants()
    decode.close()
    prefill.forget(taken[:2])
    assert (prefill.take_changes(9), decode.take_changes(9)) == ((b"", b"ab"), (b"", b""))
    assert BlockAllocator(1, pool).take_changes(9) == (b"", b"")


@given(st.data())
def test_shared_pool_keeps_each_roles_quota(data: st.DataObject) -> None:
    """A role that shares a pool always finds the blocks that are its own."""
    pool = BlockPool(TOTAL)
    roles = [BlockAllocator(5, pool), BlockAllocator(TOTAL - 5, pool)]
    held: list[list[tuple[list[int], bool]]] = [[], []]
    for _ in range(data.draw(st.integers(1, 30))):
        at = data.draw(st.integers(0, 1))
        role = roles[at]
        if held[at] and data.draw(st.booleans()):  # type: ignore[arg-type]
            blocks, is_quarantined = held[at].pop(data.draw(st.integers(0, len(held[at]) - 1)))
            (role.unquarantine if is_quarantined else role.free)(blocks)
        else:
            chain = [bytes([number]) for number in range(data.draw(st.integers(1, 4)))]
            known = role.match_prefix(chain)
            room = role.total - role.held_count - role.quarantined_count
            assert role.room == room, "whatever the other one holds"
            if len(chain) - len(known) > room:
                role.free(known)
                continue
            blocks = known + role.allocate(len(chain) - len(known))
            is_quarantined = not known and data.draw(st.booleans())
            if is_quarantined:
                role.quarantine(blocks)
            else:
                role.insert(chain, blocks, len(known))
            held[at].append((blocks, is_quarantined))
        for one in roles:
            one.check_invariants()


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
def test_misuse_of_unheld_blocks_is_asserted(misuse: str) -> None:
    """Misuse of blocks that are not held raises an AssertionError."""
    with pytest.raises(AssertionError):
        getattr(BlockAllocator(4), misuse)([2])


def test_shared_blocks_are_not_quarantined() -> None:
    """Quarantine of a shared block raises an AssertionError."""
    allocator = BlockAllocator(4)
    blocks = allocator.allocate(1)
    allocator.share(blocks)
    with pytest.raises(AssertionError):
        allocator.quarantine(blocks)


def test_fresh_blocks_come_in_one_run() -> None:
    """Blocks of a fresh pool are allocated with consecutive numbers, also after they were freed."""
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
    """A fork that finds no block for its next token keeps its length, table and references."""
    allocator = BlockAllocator(1)
    blocks = SequenceBlocks(allocator, 2, allocator.allocate(1), length=1)
    fork = blocks.fork()
    with pytest.raises(OutOfBlocks):
        fork.append_slot()
    assert (fork.length, fork.table, allocator.refs(0)) == (1, [0], 2)
    fork.release()
    assert blocks.append_slot() is None and blocks.length == 2


def test_stop_token_precedes_length_limit() -> None:
    """A stop token finishes as STOP, also at the length limit; any other token at the limit finishes as LENGTH."""
    sampling = Sampling(max_tokens=3, stop_token_ids=(2, 9))
    assert finish_reason(5, 1, sampling) is None
    assert finish_reason(9, 1, sampling) is FinishReason.STOP
    assert finish_reason(5, 3, sampling) is FinishReason.LENGTH
    assert finish_reason(2, 3, sampling) is FinishReason.STOP
