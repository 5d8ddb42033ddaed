"""What a decode worker keeps of an answer, and the names that the gateway gives its blocks: the next turn finds them."""

from dataclasses import replace

import msgspec
import pytest

from decode_worker.core import DecodeCore
from gateway.text.block_hashes import BlockNames
from kvtransfer.session.session import OfferAccepted
from proto.codec import pack_tokens, split_hashes
from proto.kv import Commit, FirstToken, Offer
from proto.messages import Destination, Release, Reserve
from proto.parts import Returns
from proto.progress import AnswerNames, EndPrefix
from proto.sampling import Sampling
from tests.workers.test_batch import BLOCK
from tests.workers.test_reservations import PREFILL_INCARNATION, Ports, make_core

GATEWAY, STRANGER = 1, 2
PROMPT = (3, 1, 4, 1, 5, 9)
NAMES = BlockNames.of(pack_tokens(PROMPT), BLOCK, "tenant:a", b"key")


def order(choices: int = 1, names: BlockNames | None = NAMES) -> Reserve:
    hashes = names.hashes if names is not None else b""
    gateway = Destination("tcp://a", GATEWAY)
    return Reserve("a", 1, len(PROMPT), Sampling(max_tokens=50), choices, 0, 0, 4, gateway, PREFILL_INCARNATION, hashes)


def streamed(tokens: int, choices: int = 1, names: BlockNames | None = NAMES) -> tuple[DecodeCore[str], Ports]:
    """Each choice has drawn so many tokens, the last of which is not forwarded."""
    core, ports = make_core()
    core.order(order(choices, names))
    answer = core.offered(PREFILL_INCARNATION, Offer("a", 1, 1, 2))
    assert isinstance(answer, OfferAccepted)
    first = tuple(FirstToken(choice, 10 + choice) for choice in range(choices))
    core.committed(PREFILL_INCARNATION, Commit("a", 1, (), 0, first), list(answer.block_ids), [])
    for number in range(tokens - 1):
        plan = core.plan()
        assert plan is not None
        core.apply([(20 + number + row.running.choice, None) for row in plan.rows])
    return core, ports


def output(tokens: int, choice: int = 0) -> list[int]:
    return [10 + choice, *(20 + number + choice for number in range(tokens - 1))]


def said(tokens: int, choice: int = 0, block_size: int = BLOCK) -> AnswerNames:
    names = BlockNames.of(pack_tokens(PROMPT), block_size, "tenant:a", b"key")
    behind = names.behind(pack_tokens(PROMPT), output(tokens, choice))
    return AnswerNames("a", 1, choice, block_size, len(names.hashes) // 16, behind)


def found(core: DecodeCore[str], tokens: int, choice: int = 0, cache_group: str = "tenant:a") -> int:
    """Blocks of the next turn's prompt that are here."""
    text = (*PROMPT, *output(tokens, choice), 7, 7, 7, 7)
    blocks = core.table.allocator.match_prefix(
        split_hashes(BlockNames.of(pack_tokens(text), BLOCK, cache_group, b"key").hashes)
    )
    core.table.allocator.free(blocks)
    return len(blocks)


@pytest.mark.parametrize("tokens", [2, 3, 7, 11, 15])
@pytest.mark.parametrize("named_first", [False, True])
def test_next_turn_finds_answer_blocks(tokens: int, named_first: bool) -> None:
    """A stop string, or a client that leaves, ends a stream at the gateway before its worker hears of it."""
    core, _ = streamed(tokens)
    assert found(core, tokens) <= len(PROMPT) // BLOCK
    if named_first:
        core.answer_named(GATEWAY, said(tokens))
    core.order(Release("a", 1))
    if not named_first:
        core.answer_named(GATEWAY, said(tokens))
    assert found(core, tokens) == (len(PROMPT) + tokens - 1) // BLOCK
    assert core.table.allocator.held_count == 0 and core.table.allocator.room == 8
    core.table.allocator.check_invariants()
    core.answer_named(GATEWAY, said(tokens))  # repeated


def test_other_tenant_finds_no_answer() -> None:
    """An answer that is cached for one tenant is not found by the same conversation of another."""
    core, _ = streamed(11)
    core.order(Release("a", 1))
    core.answer_named(GATEWAY, said(11))
    assert found(core, 11) and not found(core, 11, cache_group="tenant:b")


def test_each_choice_caches_its_answer() -> None:
    core, _ = streamed(8, choices=2)
    core.order(Release("a", 1))
    for choice in (1, 0):
        core.answer_named(GATEWAY, said(8, choice))
    assert found(core, 8, 0) == found(core, 8, 1) == (len(PROMPT) + 7) // BLOCK
    core.table.allocator.check_invariants()


@pytest.mark.parametrize("why", ["another gateway", "no cache", "evicted", "another block size", "a gap"])
def test_untrusted_answer_names_are_ignored(why: str) -> None:
    """Names from another gateway, without a cache, for evicted blocks or with wrong block numbers add nothing."""
    core, _ = streamed(11, names=None if why == "no cache" else NAMES)
    core.order(Release("a", 1))
    if why == "evicted":
        core.table.allocator.free(core.table.allocator.allocate(8))
    sent = said(11, block_size=3) if why == "another block size" else said(11)
    if why == "a gap":
        sent = msgspec.structs.replace(sent, first_block=sent.first_block + 2)
    core.answer_named(STRANGER if why == "another gateway" else GATEWAY, sent)
    inserted, _ = core.table.allocator.take_changes(1000)
    assert not set(split_hashes(sent.block_hashes)) & set(split_hashes(inserted))
    assert found(core, 11) == (len(PROMPT) // BLOCK if why not in ("no cache", "evicted") else 0)
    core.table.allocator.check_invariants()


def test_smaller_block_names_are_joined() -> None:
    """Gateways hash in the smallest block size of the cluster; a worker with larger blocks knows each by its last hash."""
    small = BlockNames.of(pack_tokens(PROMPT), BLOCK // 2, "tenant:a", b"key")
    core, _ = streamed(11, names=replace(NAMES, hashes=b"".join(split_hashes(small.hashes)[1::2])))
    core.order(Release("a", 1))
    core.answer_named(GATEWAY, said(11, block_size=BLOCK // 2))
    names = BlockNames.of(pack_tokens((*PROMPT, *output(11))), BLOCK // 2, "tenant:a", b"key").hashes
    assert len(core.table.allocator.match_prefix(split_hashes(names)[1::2])) == (len(PROMPT) + 10) // BLOCK


def test_expected_return_keeps_the_answer() -> None:
    """An answer whose tenant is likely to return outlives newer blocks that were used once."""
    core, _ = make_core()
    allocator = core.table.allocator
    core.order(msgspec.structs.replace(order(), returns=Returns(0.9, 60.0)))
    answer = core.offered(PREFILL_INCARNATION, Offer("a", 1, 1, 2))
    assert isinstance(answer, OfferAccepted)
    core.committed(PREFILL_INCARNATION, Commit("a", 1, (), 0, (FirstToken(0, 10),)), list(answer.block_ids), [])
    for number in range(8):
        plan = core.plan()
        assert plan is not None
        core.apply([(20 + number, None) for _ in plan.rows])
    core.order(Release("a", 1))
    core.answer_named(GATEWAY, said(9))
    assert found(core, 9) == 3
    once = allocator.allocate(allocator.free_count)
    allocator.insert([bytes([number]) * 16 for number in range(len(once))], once)
    allocator.free(once, Returns(0.1, 60.0))
    allocator.free(allocator.allocate(len(once)))
    assert found(core, 9) == 3, "it is older, and what came once goes first"


def test_session_end_drops_its_answer() -> None:
    """The end of a session removes its prompt and its answer from the cache once it no longer runs."""
    core, _ = streamed(9)
    core.order(EndPrefix(NAMES.hashes))
    core.order(Release("a", 1))
    core.answer_named(GATEWAY, said(9))
    assert found(core, 9) == 3, "it still ran"
    core.order(EndPrefix(b"?" * 16 + NAMES.hashes))
    assert found(core, 9) == 0
    core.table.allocator.check_invariants()
