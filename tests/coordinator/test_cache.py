"""The prefix cache seen from the coordinator: what is cached is not dispatched and not charged, and is found again."""

import random

import pytest

from coordinator.core import Core
from coordinator.events import Limits, PeerDown, PeerUp, Received
from gateway.text.block_hashes import block_hashes
from proto.codec import pack_tokens
from proto.drain import Draining
from proto.errors import CancelReason, Interrupt
from proto.messages import (
    CacheEvents,
    CacheMiss,
    Cancel,
    Finished,
    HandedOver,
    Prefill,
    Release,
    Reserve,
    Role,
    Step,
    StepDone,
    Submit,
    WorkFailed,
)
from scheduler.limits import Weights
from tests.coordinator.herding import BLOCK_SIZE, LONGEST_PREFIX_FIRST, Arrival, cluster, hot_traffic, serve
from tests.coordinator.world import Harness, RandomWorld, named, submit, worker_hello
from tests.helpers import first


def hashes(blocks: int, text: int = 1) -> bytes:
    return named(submit("x", 4 * blocks), text).block_hashes


def ask(h: Harness, name: str, tokens: int, text: int | None = 1) -> list[Step]:
    h.receive(1, named(submit(name, tokens), text))
    return [step for step in h.take(Step) if isinstance(step, Step)]


def chunks(steps: list[Step]) -> list[tuple[int, int]]:
    return [(chunk.start, chunk.length) for step in steps for chunk in step.chunks]


def make(prefill: int = 1, decode: int = 1, **limits: object) -> Harness:
    return Harness.make(prefill, decode, Limits(**{"step_tokens": 16, **limits}))  # type: ignore[arg-type]


def test_chunks_start_behind_cached_prefix() -> None:
    """Chunks start behind the prompt tokens that are believed to be cached."""
    h = make()
    h.receive(10, CacheEvents(hashes(3), b""))
    h.receive(20, CacheEvents(hashes(2), b""))
    steps = ask(h, "a", 22)
    [prefill], [reserve] = h.take(Prefill), h.take(Reserve)
    assert isinstance(prefill, Prefill) and isinstance(reserve, Reserve)
    assert prefill.cached_tokens == 12 and prefill.block_hashes == reserve.block_hashes == hashes(5)
    assert reserve.kv_blocks == 7, (
        "what is cached is not left out of a reservation: it may have to make room for itself"
    )
    assert chunks(steps) == [(12, 10)]
    h.receive(10, StepDone(0, steps[0].chunks, 1.0, 10))
    h.receive(10, HandedOver("a", 1, 9, 1.0))
    h.receive(20, Finished("a", 1, 4, 0))
    assert h.ended["a"] == ["finished"] and h.core.cluster.counters["prompt_tokens_cached"] == 12


def test_last_token_is_always_dispatched() -> None:
    """The last prompt token is dispatched even if all blocks are cached."""
    h = make()
    h.receive(10, CacheEvents(hashes(8), b""))
    assert chunks(ask(h, "a", 16)) == [(12, 4)] and chunks(ask(h, "b", 17)) == [(16, 1)]


def test_other_block_size_hashes_unused() -> None:
    """Block hashes made for another block size are not used."""
    h = make()
    h.receive(10, CacheEvents(hashes(3), b""))
    stale = named(submit("a", 16), 1)
    fields = {name: getattr(stale, name) for name in Submit.__struct_fields__} | {"hash_block_size": 8}
    h.receive(1, Submit(**fields))
    [prefill] = h.take(Prefill)
    assert isinstance(prefill, Prefill) and prefill.block_hashes == b"" and prefill.cached_tokens == 0


def test_cache_miss_redispatches_missing_tokens() -> None:
    """A cache miss has the missing tokens dispatched before the rest, and they are not believed again."""
    h = make()
    h.receive(10, CacheEvents(hashes(10), b""))
    first = ask(h, "a", 60)
    assert chunks(first) == [(40, 16), (56, 4)], "all of it is dispatched"
    assert h.core.cluster.requests["a"].entry is None
    h.receive(10, CacheMiss("a", 1, 8))
    assert h.take(Step) == [], "two steps are in flight"
    for step in first:
        h.receive(10, StepDone(step.step_id, (), 0.0, 0))
    again: list[tuple[int, int]] = []
    while steps := h.take(Step):
        for step in steps:  # type: ignore[assignment]
            assert isinstance(step, Step)
            again += [(chunk.start, chunk.length) for chunk in step.chunks]
            h.receive(10, StepDone(step.step_id, step.chunks, 1.0, 0))
    assert again == [(8, 16), (24, 16), (40, 16), (56, 4)]
    assert h.core.cluster.counters["prompt_tokens_cached"] == 8
    assert h.core.cluster.pools["m"].locality.longest(10, hashes(10)) == 2, "and it is not believed again"


def test_stray_cache_miss_changes_nothing() -> None:
    """A late, repeated or foreign cache miss changes nothing."""
    h = make(prefill=2)
    h.receive(10, CacheEvents(hashes(10), b""))
    [step] = ask(h, "a", 42)
    before = h.core.cluster.requests["a"].dispatched_tokens
    for incarnation, miss in ((11, CacheMiss("a", 1, 4)), (10, CacheMiss("a", 2, 4)), (10, CacheMiss("b", 1, 4)),
                        (10, CacheMiss("a", 1, 40))):  # fmt: skip
        h.receive(incarnation, miss)
    assert h.core.cluster.requests["a"].dispatched_tokens == before and not h.protocol_violation
    h.receive(10, StepDone(step.step_id, step.chunks, 1.0, 0))
    h.receive(10, CacheMiss("a", 1, 4))
    assert h.core.cluster.requests["a"].attempt_progress.computed_tokens == 42
    h.receive(10, CacheMiss("a", 1, 3))
    assert len(h.protocol_violation) == 1, "no whole number of blocks"


def test_miss_and_cancel_leave_nothing() -> None:
    """A cache miss followed by a cancel leaves nothing placed or queued."""
    h = make()
    h.receive(10, CacheEvents(hashes(10), b""))
    ask(h, "a", 60)
    h.receive(10, CacheMiss("a", 1, 0))
    h.receive(1, Cancel("a", 1, CancelReason.DISCONNECTED))
    assert h.take(Release, 10) and not h.core.cluster.workers[10].placed and not len(h.core.cluster.queues["m"].fair)


def test_cache_belief_ends_with_worker() -> None:
    """Believed cache contents are forgotten when their worker is lost."""
    h = make()
    h.receive(10, CacheEvents(hashes(5), b""))
    h.post(PeerDown(10, "killed"))
    h.post(PeerUp(10, worker_hello(Role.PREFILL, 10)))
    assert chunks(ask(h, "a", 10)) == [(0, 10)]


def test_prompt_goes_where_it_is_cached() -> None:
    """A prompt is placed on the prefill and the decode worker that have it cached."""
    h = make(prefill=3, decode=3)
    h.receive(11, CacheEvents(hashes(10), b""))
    h.receive(21, CacheEvents(hashes(10), b""))
    ask(h, "a", 60)
    assert (h.core.cluster.requests["a"].prefill_incarnation, h.core.cluster.requests["a"].decode_incarnation) == (
        11,
        21,
    )
    ask(h, "b", 60, text=2)
    assert (
        h.core.cluster.requests["b"].prefill_incarnation != 11 and h.core.cluster.requests["b"].decode_incarnation != 21
    )


def bound(h: Harness, incarnation: int) -> list[str]:
    return list(h.core.cluster.workers[incarnation].bound)


def test_prompt_waits_for_cached_worker() -> None:
    """A prompt waits for its worker while less waits there than its cache saves."""
    h = make(prefill=2, steps_in_flight=1)
    h.receive(10, CacheEvents(hashes(200), b""))
    [busy] = ask(h, "busy", 816)
    assert h.core.cluster.requests["busy"].prefill_incarnation == 10 and chunks([busy]) == [(800, 16)]
    assert ask(h, "a", 816) == [], "worker 11 is idle, and has nothing of it"
    [other] = ask(h, "other", 10, text=None)
    assert h.core.cluster.requests["other"].prefill_incarnation == 11, "but is there for others"
    h.now += 0.5
    h.receive(10, StepDone(busy.step_id, busy.chunks, 16.0, 0))
    assert h.core.cluster.requests["a"].prefill_incarnation == 10 and chunks(h.take(Step)) == [(800, 16)]  # type: ignore[arg-type]
    ask(h, "b", 816)
    h.receive(11, StepDone(other.step_id, other.chunks, 10.0, 0))
    assert bound(h, 10) == ["b"] and h.core.cluster.workers[10].tokens_before == 32, (
        "what is bound counts as waiting there"
    )


def test_cached_prompt_keeps_decode_room() -> None:
    """A prompt cached on an idle worker does not lose the room in decode to the next request."""
    h = Harness.make(2, 1, Limits(steps_in_flight=1), max_seqs=1)
    [running] = ask(h, "running", 32, text=None)
    assert h.core.cluster.requests["running"].prefill_incarnation == 10, "the one that is asked first"
    h.receive(10, StepDone(running.step_id, running.chunks, 1.0, 0))
    h.receive(10, HandedOver("running", 1, 9, 1.0))
    h.receive(11, CacheEvents(hashes(200), b""))
    assert ask(h, "cached", 816) == [] and ask(h, "next", 816, text=None) == [], "neither has room"
    h.receive(20, Finished("running", 1, 1, 0))
    assert h.core.cluster.requests["cached"].prefill_incarnation == 11 and not bound(h, 11)
    assert chunks(h.take(Step, 11)) == [(800, 16)] and h.core.cluster.requests["next"].state == "queued"  # type: ignore[arg-type]


def test_shared_prefix_requests_are_spread() -> None:
    """Requests with one prefix are spread before the worker that has it cached is overloaded."""
    h = make(prefill=2, steps_in_flight=1)
    h.receive(10, CacheEvents(hashes(200), b""))
    for number in range(400):
        ask(h, f"r{number}", 816)
    on_other = [r for r in h.core.cluster.requests.values() if r.prefill_incarnation == 11]
    assert on_other, "one of them computes the prefix once more"
    assert len(bound(h, 10)) * 16 < 4 * 3 * 816


def test_lost_worker_frees_bound_requests() -> None:
    """Requests bound to a worker go back to all workers when it is lost or drained."""
    for how in (PeerDown(10, "killed"), Received(10, Draining(10_000))):
        h = make(prefill=2, steps_in_flight=1)
        h.receive(10, CacheEvents(hashes(200), b""))
        for name in ("busy", "a"):
            ask(h, name, 816)
        assert bound(h, 10) == ["a"]
        h.post(how)
        assert h.core.cluster.requests["a"].prefill_incarnation == 11


def test_idle_worker_takes_over_bound_request() -> None:
    """An idle worker takes over a request bound elsewhere if it starts earlier there."""
    h = make(prefill=2, steps_in_flight=1)
    h.receive(10, CacheEvents(hashes(200), b""))
    [busy] = ask(h, "busy", 816)
    ask(h, "a", 816)
    assert bound(h, 10) == ["a"]
    [other] = ask(h, "other", 10, text=None)
    h.receive(11, CacheEvents(hashes(200), b""))
    h.receive(11, StepDone(other.step_id, other.chunks, 10.0, 0))
    assert h.core.cluster.requests["a"].prefill_incarnation == 11 and chunks(h.take(Step)) == [(800, 16)]  # type: ignore[arg-type]
    assert busy.chunks


def test_prompt_skips_blocked_worker() -> None:
    """A prompt does not wait for a worker from which no KV may go."""
    h = make(prefill=2, decode=2, steps_in_flight=1)
    h.receive(10, CacheEvents(hashes(200), b""))
    for failure in range(3):
        h.core.cluster.pools["m"].breakers.failed((10, 20), float(failure), float(failure))
    h.receive(21, Draining(10_000))
    ask(h, "a", 816)
    assert h.core.cluster.requests["a"].prefill_incarnation == 11


def test_blocked_worker_takes_nothing_over() -> None:
    """A worker from which no KV may go takes over no bound request."""
    h = make(prefill=2, steps_in_flight=1)
    h.receive(10, CacheEvents(hashes(200), b""))
    for failure in range(3):
        h.core.cluster.pools["m"].breakers.failed((11, 20), float(failure), float(failure))
    [busy] = ask(h, "busy", 816)
    ask(h, "a", 816)
    h.receive(11, CacheEvents(hashes(200), b""))
    assert h.core.cluster.requests["a"].prefill_incarnation != 11 and not bound(h, 11)
    h.receive(10, StepDone(busy.step_id, busy.chunks, 16.0, 0))
    assert h.core.cluster.requests["a"].prefill_incarnation == 10


def test_blocked_worker_frees_bound_requests() -> None:
    """Bound requests go back to all workers once no KV may go from their worker."""
    h = make(prefill=2, decode=2, steps_in_flight=1)
    h.receive(10, CacheEvents(hashes(200), b""))
    for decode, failures in ((20, 2), (21, 3)):
        for _ in range(failures):
            h.core.cluster.pools["m"].breakers.failed((10, decode), h.now, h.now)
    ask(h, "busy", 816)
    ask(h, "a", 816)
    assert h.core.cluster.requests["busy"].decode_incarnation == 20 and bound(h, 10) == ["a"]
    h.receive(10, WorkFailed("busy", 1, Interrupt.TRANSFER_FAILED, "planted"))
    assert h.core.cluster.requests["a"].prefill_incarnation == 11


def test_failing_worker_is_avoided_then_retried() -> None:
    """A failing worker is avoided for a while, and then tried again."""
    h = make(decode=2)

    def one(name: str) -> int:
        [step] = ask(h, name, 8, text=None)
        request = h.core.cluster.requests[name]
        h.receive(10, StepDone(step.step_id, step.chunks, 1.0, 0))
        return request.decode_incarnation

    def finish(name: str, decode: int) -> None:
        h.receive(10, HandedOver(name, 1, 9, 1.0))
        h.receive(decode, Finished(name, 1, 4, 4))

    troubled = one("a")
    h.receive(troubled, WorkFailed("a", 1, Interrupt.ENGINE_ERROR, "planted"))
    h.receive(10, WorkFailed("a", 1, Interrupt.TRANSFER_FAILED, "aborted"))
    for number in range(120):
        h.now += 0.1
        decode = one(f"b{number}")
        finish(f"b{number}", decode)
        if decode == troubled:
            break
    assert 10 < number < 119, "avoided for a while, and tried again"


@pytest.mark.parametrize("seed", first(1, range(3)))
@pytest.mark.parametrize(("blocks", "hot", "per_s"), first(1, [(700, 24, 12.0), (2000, 12, 8.0), (2000, 12, 20.0)]))
def test_hot_prefixes_hit_like_longest_prefix(seed: int, blocks: int, hot: int, per_s: float) -> None:
    """From a light load to an overload, with room for every hot prefix everywhere, and with room for less than two of each."""
    hit = {}
    traffic = hot_traffic(seed, 300, per_s, hot)
    prompt_tokens = sum(len(arrival.prompt) for arrival in traffic)
    for name, weights in (("longest", LONGEST_PREFIX_FIRST), ("score", Weights())):
        made, queue = cluster(4, weights, blocks)
        serve(made, traffic)
        computed_tokens = sum(worker.computed_tokens for worker in made.prefill.values())
        cached_tokens = sum(request.cached_tokens for request in made.requests.values())
        hit[name] = cached_tokens / prompt_tokens
        assert queue.bill.total() == pytest.approx(computed_tokens), "charged is what was computed"
        assert cached_tokens == prompt_tokens - computed_tokens == made.core.cluster.counters["prompt_tokens_cached"]
    assert hit["score"] >= 0.95 * hit["longest"] > 0.5, (seed, hit)


def test_charge_equals_computed_tokens() -> None:
    """Prompts are missed, what had been dispatched is skipped and dispatched again, and charged once."""
    made, queue = cluster(3, blocks=600)
    traffic, rnd = hot_traffic(5, 300, 6.0, 12), random.Random(0)
    for arrival in traffic:
        if rnd.random() < 0.3:
            hashes = block_hashes(pack_tokens(arrival.prompt), BLOCK_SIZE, f"tenant:{arrival.tenant}")
            half = hashes[: len(hashes) // 32 * 16]
            made.at(arrival.at_s, made.receive, rnd.choice(list(made.prefill)), CacheEvents(half, b""))
    serve(made, traffic)
    assert made.core.cluster.counters["cache_misses"] > 10
    assert queue.bill.total() == pytest.approx(sum(worker.computed_tokens for worker in made.prefill.values()))


def test_tenants_share_no_cached_prefix() -> None:
    """All tenants send the very same prompts; each computes each of them once, and then only what must be."""
    prompts = [[text * 1000 + token for token in range(160)] for text in range(3)]
    tenants = [f"org/u{number}" for number in range(4)]
    made, _ = cluster(1)
    serve(made, [Arrival(10.0 * n, prompt, tenant) for n, (tenant, prompt) in enumerate(
        (tenant, prompt) for _ in range(2) for tenant in tenants for prompt in prompts)])  # fmt: skip
    found = [request.cached_tokens for request in made.requests.values()]
    assert found[: len(found) // 2] == [0] * 12, "a first time for each tenant"
    assert found[len(found) // 2 :] == [144] * 12


def test_chaos_has_hits_and_misses() -> None:
    """What makes the seeded chaos of the core's own tests a test of this as well."""
    world = RandomWorld(3)
    for _ in range(2000):
        world.step()
    world.heal()
    assert isinstance(world.core, Core)
    assert world.core.cluster.counters["cache_misses"] > 5 and world.core.cluster.counters["prompt_tokens_cached"] > 20
