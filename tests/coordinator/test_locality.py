"""What is believed of workers' caches, and the score that weighs it against everything else."""

import hashlib
import itertools
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.score import DecodeSide, PrefillSide, Weights, best_decode, decode_s, prefill_s
from coordinator.workers import prefix_index as locality
from coordinator.workers.prefix_index import Locality, usable_hashes, usable_tokens
from engine.kv.allocator import BlockAllocator
from proto.messages import Submit
from proto.sampling import Sampling

WEIGHTS = Weights()
HERE = PrefillSide(tokens_before=0, tokens_per_s=1000.0, cached_tokens=0, fullness=0.0, failure_rate=0.0, host="a")
DECODE = DecodeSide(missing_blocks=10, fullness=0.0, failure_rate=0.0, host="a")


def test_a_mixed_workers_own_half_is_preferred_until_it_is_fuller_than_the_transfer_is_worth() -> None:
    own, other = replace(DECODE, is_same_process=True), replace(DECODE, missing_blocks=10)
    assert best_decode([(1, other), (2, own)], "a", WEIGHTS) == 2
    assert best_decode([(1, other), (2, replace(own, fullness=0.004))], "a", WEIGHTS) == 2
    assert best_decode([(1, other), (2, replace(own, fullness=0.006))], "a", WEIGHTS) == 1


def chain(*parts: int) -> list[bytes]:
    found = [b""]
    for part in parts:
        found.append(hashlib.blake2b(found[-1] + bytes([part]), digest_size=16).digest())
    return found[1:]


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=40), min_size=1, max_size=8), st.data())
def test_the_longest_prefix_is_found_in_steps_that_halve(chains: list[list[int]], data: st.DataObject) -> None:
    known = Locality()
    known.join(7, 1000)
    held: set[bytes] = set()
    for parts in chains:
        inserted = chain(*parts)
        known.learn(7, b"".join(inserted), b"")
        held |= set(inserted)
    asked = chain(*data.draw(st.sampled_from(chains)), *data.draw(st.lists(st.integers(0, 1), max_size=9)))
    naive = len(list(itertools.takewhile(held.__contains__, asked)))
    assert known.longest(7, b"".join(asked)) == naive
    assert known.longest(8, b"".join(asked)) == 0 and known.longest(7, b"") == 0


@given(st.lists(st.booleans(), max_size=40))
def test_with_reports_lost_nothing_is_made_up(there: list[bool]) -> None:
    known = Locality()
    known.join(7, 1000)
    hashes = chain(*[0] * len(there))
    known.learn(7, b"".join(h for h, is_there in zip(hashes, there, strict=True) if is_there), b"")
    found = known.longest(7, b"".join(hashes))
    assert found <= len(there) and (found == 0 or there[found - 1])


def test_a_workers_reports_add_up_to_what_its_allocator_knows() -> None:
    """Random prompts through a real allocator: after each report, what is believed is what is there."""
    seed = 11
    rng = random.Random(seed)
    allocator, known = BlockAllocator(30), Locality()
    known.join(7, allocator.total)
    for _ in range(300):
        hashes = chain(*(rng.randrange(2) for _ in range(rng.randint(1, 12))))
        found = allocator.match_prefix(hashes)
        assert known.longest(7, b"".join(hashes)) == len(found), seed
        blocks = found + allocator.allocate(len(hashes) - len(found))
        allocator.insert(hashes, blocks, len(found))
        allocator.free(blocks)
        known.learn(7, *allocator.take_changes(1000))
        assert known.count(7) == allocator.cached_count


def test_what_is_believed_dies_with_the_incarnation_and_a_miss_mends_it() -> None:
    known, hashes = Locality(), b"".join(chain(1, 2, 3, 4))
    known.learn(7, hashes, b"")
    assert known.longest(7, hashes) == 0, "nobody has registered"
    known.join(7, 10)
    known.learn(7, hashes, b"")
    known.forget(7, hashes, 3)
    assert known.longest(7, hashes) == 3
    known.learn(7, b"", hashes[32:])
    assert known.longest(7, hashes) == 2
    known.join(7, 10)
    assert known.longest(7, hashes) == 0, "registered again: it starts empty"
    known.learn(7, hashes, b"")
    known.leave(7)
    assert known.longest(7, hashes) == known.count(7) == 0


def test_a_worker_is_believed_to_have_no_more_than_it_can_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locality, "HASHES_MAX", 5)
    known = Locality()
    known.join(7, 3)
    known.join(8, 100)
    for incarnation in (7, 8):
        for part in range(50):
            known.learn(incarnation, b"".join(chain(part, 1)), b"")
            assert known.count(incarnation) <= {7: 3, 8: 5}[incarnation]


def test_of_a_cache_larger_than_the_table_what_is_known_stays_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locality, "HASHES_MAX", 5)
    known = Locality()
    known.join(8, 100)
    first, later = chain(1, 1, 1), chain(2, 2, 2, 2)
    known.learn(8, b"".join(first), b"")
    for part in range(3, 50):
        known.learn(8, b"".join(chain(part)), b"")
    known.learn(8, b"".join(later), b"")
    assert known.longest(8, b"".join(first)) == 3 and known.count(8) == 5
    known.learn(8, b"".join(later), b"".join(reversed(first)))
    assert known.longest(8, b"".join(later)) == 3, "as much as there is room for, from its beginning on"


def test_names_of_other_blocks_are_not_used_and_the_last_token_is_computed() -> None:
    submit = Submit("r", 1, "m", 32, Sampling(max_tokens=1), block_hashes=bytes(32), hash_block_size=16)
    assert usable_hashes(submit, 16) == bytes(32) and usable_hashes(submit, 24) == b""
    assert (
        usable_tokens(2, submit, 16) == 16 and usable_tokens(1, submit, 16) == 16 and usable_tokens(0, submit, 16) == 0
    )


BETTER_PREFILL = [
    ("more cached", replace(HERE, cached_tokens=500), HERE),
    ("less to do before", HERE, replace(HERE, tokens_before=300)),
    ("faster", replace(HERE, tokens_per_s=2000.0), HERE),
    ("more room", replace(HERE, fullness=0.2), replace(HERE, fullness=0.9)),
    ("healthier", HERE, replace(HERE, failure_rate=0.5)),
    ("cached beats a short queue", replace(HERE, cached_tokens=900, tokens_before=500), HERE),
    ("a long queue beats cached", HERE, replace(HERE, cached_tokens=900, tokens_before=5000)),
]
BETTER_DECODE = [
    ("more cached", replace(DECODE, missing_blocks=1), DECODE),
    ("same host", DECODE, replace(DECODE, host="b")),
    ("more room", DECODE, replace(DECODE, fullness=0.8)),
    ("healthier", DECODE, replace(DECODE, failure_rate=0.1)),
    ("all cached on another host", replace(DECODE, missing_blocks=0, host="b"), DECODE),
]


@pytest.mark.parametrize(("why", "better", "worse"), BETTER_PREFILL, ids=[c[0] for c in BETTER_PREFILL])
def test_each_factor_of_the_prefill_side(why: str, better: PrefillSide, worse: PrefillSide) -> None:
    assert prefill_s(1000, better, WEIGHTS) < prefill_s(1000, worse, WEIGHTS), why


@pytest.mark.parametrize(("why", "better", "worse"), BETTER_DECODE, ids=[c[0] for c in BETTER_DECODE])
def test_each_factor_of_the_decode_side(why: str, better: DecodeSide, worse: DecodeSide) -> None:
    assert decode_s(better, "a", WEIGHTS) < decode_s(worse, "a", WEIGHTS), why
    assert best_decode([(1, worse), (2, better)], "a", WEIGHTS) == 2
    assert best_decode([(2, worse), (1, better)], "a", WEIGHTS) == 1


def test_nobody_to_choose_from() -> None:
    assert best_decode([], "a", WEIGHTS) is None
