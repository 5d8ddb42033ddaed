"""Which cached block goes first, and what ends with a conversation."""

from hashlib import blake2b
from math import exp

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.kv.allocator import BlockAllocator
from engine.kv.idle_blocks import IdleBlocks
from proto.parts import Returns

AGENTS, CHAT = Returns(0.9, 4.0), Returns(0.25, 4.0)


def chain(text: str) -> list[bytes]:
    return [blake2b(text[: end + 1].encode(), digest_size=16).digest() for end in range(len(text))]


def cached(allocator: BlockAllocator, text: str, returns: Returns | None) -> None:
    """Blocks for a prompt, of which each letter is one, that nobody holds any more."""
    known = allocator.match_prefix(chain(text))
    blocks = [*known, *allocator.allocate(len(text) - len(known))]
    allocator.insert(chain(text), blocks, len(known))
    allocator.free(blocks, returns)


def left(allocator: BlockAllocator, text: str) -> int:
    blocks = allocator.match_prefix(chain(text))
    allocator.free(blocks)
    return len(blocks)


@given(
    st.lists(
        st.tuples(
            st.sampled_from([0.0, 0.25, 0.5, 0.875]), st.sampled_from([1.0, 4.0, 16.0, 256.0]), st.integers(0, 400)
        ),
        min_size=1,
        max_size=20,
    )
)
def test_least_likely_block_is_evicted_first(used: list[tuple[float, float, int]]) -> None:
    """The block with the lowest probability of being used again is evicted first."""
    blocks = IdleBlocks()
    used.sort(key=lambda one: one[2])
    for number, (share, mean_s, at) in enumerate(used):
        blocks.now = at
        blocks.add(number, Returns(share, mean_s))
    blocks.now = 400.0

    def probability(number: int) -> float:
        share, mean_s, at = used[number]
        alive = share * exp(-(blocks.now - at) / mean_s)
        return alive / (alive + 1 - share)

    left = set(range(len(used)))
    while left:
        first = blocks.first()
        assert probability(first) == pytest.approx(min(map(probability, left)))
        same = [one for one in left if used[one][:2] == used[first][:2]]
        assert first == min(same), "of equal tenants the one used longest ago"
        blocks.discard(first)
        left.discard(first)
        blocks.now += 7.0 * (first % 3 == 0)
    assert len(blocks) == 0


def test_fresh_prompt_goes_before_older_turn() -> None:
    """A fresh prompt of a tenant that asks once is evicted before an older turn of a conversation."""
    allocator = BlockAllocator(8)
    allocator.tick(100.0)
    cached(allocator, "turn", AGENTS)
    allocator.tick(103.0)
    cached(allocator, "once", CHAT)
    cached(allocator, "new", CHAT)
    assert (left(allocator, "turn"), left(allocator, "once")) == (4, 1), "of a chain, the tail goes first"
    allocator.tick(200.0)
    for text in ("more", "five"):
        cached(allocator, text, CHAT)
    assert left(allocator, "turn") == 0, "a conversation that has not gone on for long goes too"
    allocator.check_invariants()


def test_unknown_tenants_blocks_go_oldest_first() -> None:
    """The block used longest ago is evicted first if nothing is known of the tenants."""
    allocator = BlockAllocator(8)
    for text in ("abcd", "efgh"):
        cached(allocator, text, None)
    assert left(allocator, "abcd") == 4
    cached(allocator, "xy", None)
    assert (left(allocator, "abcd"), left(allocator, "efgh")) == (4, 2)


def test_shared_beginning_outlives_last_user() -> None:
    """A shared beginning stays as long as a conversation that continues it."""
    allocator = BlockAllocator(9)
    cached(allocator, "ssabc", AGENTS)
    cached(allocator, "ssd", CHAT)
    cached(allocator, "xyz", CHAT)
    cached(allocator, "uvw", AGENTS)
    assert left(allocator, "ssabc") == 5, "its beginning was last used by a tenant whose turns hardly ever go on"
    allocator.check_invariants()


def test_ended_conversation_frees_own_blocks() -> None:
    """The end of a conversation frees the blocks that no other conversation has."""
    allocator = BlockAllocator(12)
    cached(allocator, "systemAB", AGENTS)
    cached(allocator, "systemAans", AGENTS)
    allocator.end(chain("systemA")[-2:])
    assert (left(allocator, "systemAans"), left(allocator, "systemAB")) == (0, 0), "both go on from that prompt"
    assert allocator.cached_count == 0
    cached(allocator, "systemA", AGENTS)
    cached(allocator, "systemB", AGENTS)
    held = allocator.match_prefix(chain("systemB"))
    allocator.end(chain("systemA"))
    assert left(allocator, "systemA") == 6, "others have the rest"
    allocator.end(chain("systemB"))
    assert left(allocator, "systemB") == 7, "what runs keeps what it holds"
    allocator.free(held)
    allocator.end(chain("unknown"))
    allocator.check_invariants()
