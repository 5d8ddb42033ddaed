"""Workers of one model whose KV blocks differ in size: accounts in each one's own, one size for the hashes of prompts."""

import msgspec

from coordinator.events import Limits, PeerDown, PeerUp
from proto.errors import Reject
from proto.messages import (
    CacheEvents,
    CacheMiss,
    Finished,
    HandedOver,
    Prefill,
    Rejected,
    Reserve,
    Role,
    Step,
    StepDone,
)
from scheduler.workers.prefix_index import Locality, known_blocks, usable_hashes
from tests.coordinator.world import MODEL, Harness, named, submit, worker_hello

WIDE = 12


def make(prefill_size: int, decode_size: int, **limits: int) -> Harness:
    h = Harness.make(0, 0, Limits(**{"step_tokens": 16, **limits}))  # type: ignore[arg-type]
    h.post(PeerUp(10, worker_hello(Role.PREFILL, 10, block_size=prefill_size)))
    h.post(PeerUp(20, worker_hello(Role.DECODE, 20, block_size=decode_size)))
    return h


def wide(hashes: bytes) -> bytes:
    """Of every third block of 4 tokens: the names of blocks of 12."""
    return b"".join(hashes[at : at + 16] for at in range(32, len(hashes), 48))


def test_each_worker_counts_its_own_blocks() -> None:
    """Each worker is counted, and told block hashes, in its own block size."""
    for prefill_size, decode_size in ((4, WIDE), (WIDE, 4)):
        h = make(prefill_size, decode_size)
        states = h.cluster_states()
        assert states[-1] == (("m",), (4,)), "prompts are hashed in the smallest blocks"
        asked = named(submit("a", 50, max_tokens=7), 1)
        h.receive(1, asked)
        [prefill], [reserve] = h.take(Prefill), h.take(Reserve)
        assert isinstance(prefill, Prefill) and isinstance(reserve, Reserve)
        names = {4: asked.block_hashes, WIDE: wide(asked.block_hashes)}
        assert prefill.block_hashes == names[prefill_size] and reserve.block_hashes == names[decode_size]
        assert prefill.decode_block_size == decode_size
        assert reserve.kv_blocks == -(-56 // decode_size), "the last token drawn is never written"
        assert h.core.cluster.pools[MODEL].prefill[10].kv_blocks_taken == -(-50 // prefill_size)
        while steps := h.take(Step):
            for step in steps:
                assert isinstance(step, Step)
                assert all(c.start % prefill_size == 0 for c in step.chunks)
                h.receive(10, StepDone(step.step_id, step.chunks, 1.0, 0))
        h.receive(10, HandedOver("a", 1, 9, 1.0))
        h.receive(20, Finished("a", 1, 7, 0))
        assert h.ended["a"] == ["finished"]
        assert all(worker.free_blocks == 1000 for worker in h.core.cluster.workers.values())


def test_larger_cached_blocks_are_found() -> None:
    """KV cached in larger blocks is found, and a cache miss corrects what is known of it."""
    h = make(WIDE, 4, step_tokens=64)
    asked = named(submit("a", 60), 1)
    h.receive(10, CacheEvents(wide(asked.block_hashes), b""))
    h.receive(20, CacheEvents(asked.block_hashes[: 7 * 16], b""))
    h.receive(1, asked)
    [prefill], steps = h.take(Prefill), h.take(Step)
    assert isinstance(prefill, Prefill) and prefill.cached_tokens == 48, "the last token is computed in any case"
    assert [(c.start, c.length) for s in steps for c in s.chunks] == [(48, 12)]  # type: ignore[attr-defined]
    h.receive(10, CacheMiss("a", 1, 24))
    assert not h.protocol_violation
    pool = h.core.cluster.pools["m"]
    assert known_blocks(pool.locality, 10, asked, WIDE) == 2, "what was not there is not believed again"
    assert known_blocks(pool.locality, 20, asked, 4) == 7


def test_hashes_serve_only_fitting_blocks() -> None:
    """Block hashes are usable where their blocks fill a worker's blocks."""
    asked = named(submit("a", 50), 1)  # of 4 tokens each
    assert usable_hashes(asked, 4) == asked.block_hashes and usable_hashes(asked, WIDE) == wide(asked.block_hashes)
    assert usable_hashes(asked, 6) == usable_hashes(asked, 2) == b""
    assert usable_hashes(submit("a", 50), 4) == b""
    known = Locality()
    known.join(7, 100)
    for blocks in range(5):
        known.learn(7, wide(asked.block_hashes)[: 16 * blocks], b"")
        assert known_blocks(known, 7, asked, WIDE) == blocks and known_blocks(known, 7, asked, 6) == 0


def test_request_must_fit_both_workers() -> None:
    """A request must fit the blocks of a prefill worker and of a decode worker."""
    h = Harness.make(0, 0)
    h.post(PeerUp(10, worker_hello(Role.PREFILL, 10, block_size=4, kv_blocks=10)))
    h.post(PeerUp(20, worker_hello(Role.DECODE, 20, block_size=8, kv_blocks=6)))
    for tokens, fits in ((40, True), (41, False)):
        h.receive(1, submit(f"r{tokens}", tokens, max_tokens=4))
        rejected = h.take(Rejected)
        assert bool(rejected) is not fits
        assert all(r.reason is Reject.TOO_LARGE for r in rejected)  # type: ignore[attr-defined]


def test_misfit_block_size_is_refused() -> None:
    """A worker whose block size does not fit all others is refused, with the field and both values."""
    h = make(4, WIDE)
    for size, fits in ((4, True), (2, True), (24, True), (6, False), (8, False)):
        refusal = h.core.refusal(worker_hello(Role.PREFILL, 30, block_size=size))
        assert (refusal is None) is fits
        assert fits or f"block_size is {4 if size % 4 else WIDE} at" in str(refusal)
        assert fits or f"and {size} at prefill-30" in str(refusal)
    other = h.core.refusal(worker_hello(Role.PREFILL, 30, fingerprint="dtype=bfloat16", block_size=4))
    assert "dtype is not said at prefill-10 and bfloat16 at prefill-30" in str(other)


def test_gateways_follow_smallest_block_size() -> None:
    """Gateways hash in smaller blocks while a worker with such blocks is registered."""
    h = make(8, 16)
    h.cluster_states()
    h.post(PeerUp(21, worker_hello(Role.DECODE, 21, block_size=4)))
    assert h.cluster_states() == [(("m",), (4,))]
    late = msgspec.structs.replace(named(submit("late", 40), 1), hash_block_size=8)
    h.receive(1, late)
    [prefill] = h.take(Prefill)
    assert isinstance(prefill, Prefill) and prefill.block_hashes == late.block_hashes, "hashed before: still good here"
    h.post(PeerDown(21, "gone"))
    assert h.cluster_states() == [(("m",), (8,))]
