"""What is believed of workers' caches, and the score that weighs it against everything else."""

import hashlib
import itertools
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.kv.allocator import BlockAllocator
from proto.messages import Submit
from proto.sampling import Sampling
from scheduler.limits import Weights
from scheduler.placement.pairs import prefill_s
from scheduler.workers import prefix_index as locality
from scheduler.workers.prefix_index import Locality, usable_hashes, usable_tokens

WEIGHTS = Weights()
HERE = {"tokens_before": 0, "uncached_tokens": 1000, "wasted_tokens": 0, "tokens_per_s": 1000.0, "fullness": 0.0}


def chain(*parts: int) -> list[bytes]:
    found = [b""]
    for part in parts:
        found.append(hashlib.blake2b(found[-1] + bytes([part]), digest_size=16).digest())
    return found[1:]


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=40), min_size=1, max_size=8), st.data())
def test_longest_prefix_matches_naive_search(chains: list[list[int]], data: st.DataObject) -> None:
    """The longest known prefix is the one that a naive search finds."""
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
def test_lost_reports_invent_no_prefix(there: list[bool]) -> None:
    """Lost reports may shorten the known prefix, but it never ends in a block that was not reported."""
    known = Locality()
    known.join(7, 1000)
    hashes = chain(*[0] * len(there))
    known.learn(7, b"".join(h for h, is_there in zip(hashes, there, strict=True) if is_there), b"")
    found = known.longest(7, b"".join(hashes))
    assert found <= len(there) and (found == 0 or there[found - 1])


def test_reports_add_up_to_allocator_cache() -> None:
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
        assert len(known._known.get(7, ())) == allocator.cached_count


def test_cache_belief_ends_with_incarnation() -> None:
    """Known blocks are forgotten when a worker registers again or leaves, and a miss corrects them."""
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
    assert known.longest(7, hashes) == len(known._known.get(7, ())) == 0


def test_cache_belief_is_bounded_by_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker is never believed to have more blocks than its pool or the table can hold."""
    monkeypatch.setattr(locality, "HASHES_MAX", 5)
    known = Locality()
    known.join(7, 3)
    known.join(8, 100)
    for incarnation in (7, 8):
        for part in range(50):
            known.learn(incarnation, b"".join(chain(part, 1)), b"")
            assert len(known._known.get(incarnation, ())) <= {7: 3, 8: 5}[incarnation]


def test_full_table_keeps_known_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Known prefixes stay known though a worker's cache is larger than the table."""
    monkeypatch.setattr(locality, "HASHES_MAX", 5)
    known = Locality()
    known.join(8, 100)
    first, later = chain(1, 1, 1), chain(2, 2, 2, 2)
    known.learn(8, b"".join(first), b"")
    for part in range(3, 50):
        known.learn(8, b"".join(chain(part)), b"")
    known.learn(8, b"".join(later), b"")
    assert known.longest(8, b"".join(first)) == 3 and len(known._known.get(8, ())) == 5
    known.learn(8, b"".join(later), b"".join(reversed(first)))
    assert known.longest(8, b"".join(later)) == 3, "as much as there is room for, from its beginning on"


def test_other_block_sizes_match_nothing() -> None:
    """Hashes of another block size are not used, and the last prompt token is always computed."""
    submit = Submit("r", 1, "m", 32, Sampling(max_tokens=1), block_hashes=bytes(32), hash_block_size=16)
    assert usable_hashes(submit, 16) == bytes(32) and usable_hashes(submit, 24) == b""
    assert (
        usable_tokens(2, submit, 16) == 16 and usable_tokens(1, submit, 16) == 16 and usable_tokens(0, submit, 16) == 0
    )


BETTER_PREFILL = [
    ("more cached", HERE | {"uncached_tokens": 500}, HERE | {"wasted_tokens": 500}),
    ("less to do before", HERE, HERE | {"tokens_before": 300}),
    ("faster", HERE | {"tokens_per_s": 2000.0}, HERE),
    ("more room", HERE | {"fullness": 0.2}, HERE | {"fullness": 0.9}),
    (
        "cached beats a short queue",
        HERE | {"uncached_tokens": 100, "tokens_before": 500},
        HERE | {"wasted_tokens": 900},
    ),
    (
        "a long queue beats cached",
        HERE | {"wasted_tokens": 900},
        HERE | {"uncached_tokens": 100, "tokens_before": 5000},
    ),
]


@pytest.mark.parametrize(("why", "better", "worse"), BETTER_PREFILL, ids=[c[0] for c in BETTER_PREFILL])
def test_each_factor_changes_prefill_score(why: str, better: dict[str, Any], worse: dict[str, Any]) -> None:
    """Each factor of the prefill score makes the better worker cheaper."""
    assert prefill_s(**better, weights=WEIGHTS) < prefill_s(**worse, weights=WEIGHTS), why
