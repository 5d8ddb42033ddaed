"""One request that cannot run now holds up no other that can, of its own tenant or of any."""

import pytest

from coordinator.events import Limits, PeerDown
from proto.drain import Draining
from proto.messages import CacheEvents, Chunk, Finished, HandedOver, Prefill, Reserve, Step, StepDone
from tests.coordinator.world import Harness, named, submit


def placed(world: Harness, *names: str) -> list[str]:
    """Which of these have been placed since the last call."""
    sent = {message.request_id for message in world.take(Reserve) if isinstance(message, Reserve)}
    return [name for name in names if name in sent]


def run_prefill(world: Harness) -> None:
    while steps := world.take(Step, 10):
        for step in steps:
            assert isinstance(step, Step)
            world.receive(10, StepDone(step.step_id, step.chunks, 1.0, 0))
            for chunk in step.chunks:
                world.receive(10, HandedOver(chunk.request_id, 1, 1, 1.0))


def test_large_request_lets_small_pass() -> None:
    """A request without room does not hold up smaller ones of its tenant."""
    world = Harness.make(kv_blocks=40)
    world.receive(1, submit("hog", 4, max_tokens=77))  # 20 of 40 blocks
    run_prefill(world)
    world.receive(1, submit("large", 4, max_tokens=97))  # 25 blocks
    for number in range(3):
        world.receive(1, submit(f"small{number}", 4, max_tokens=5))
    run_prefill(world)
    assert placed(world, "large", "small0", "small1", "small2") == ["small0", "small1", "small2"]
    world.receive(20, Finished("hog", 1, 77, 0))
    assert placed(world, "large") == ["large"]


def test_many_choices_let_fewer_pass() -> None:
    """A request with more choices than a worker has free does not hold up those with fewer."""
    world = Harness.make(max_seqs=4)
    world.receive(1, submit("hog", 4, choices=2))
    run_prefill(world)
    world.receive(1, submit("many", 4, choices=4))
    world.receive(1, submit("one", 4))
    assert placed(world, "many", "one") == ["one"]


def test_cache_wait_holds_up_no_others() -> None:
    """A request that waits for a cache does not hold up others of its tenant."""
    world = Harness.make(prefill=2, limits=Limits(step_tokens=16, steps_in_flight=1))
    cached = named(submit("busy", 816), 1)
    world.receive(10, CacheEvents(cached.block_hashes[: 200 * 16], b""))
    world.receive(1, cached)
    world.receive(1, named(submit("waits", 816), 1))
    world.receive(1, submit("other", 816))
    assert [message.request_id for message in world.take(Prefill, 10) if isinstance(message, Prefill)] == ["busy"]
    assert [message.request_id for message in world.take(Prefill, 11) if isinstance(message, Prefill)] == ["other"]
    world.receive(10, StepDone(0, (Chunk("busy", 1, 800, 16),), 16.0, 0))
    assert [message.request_id for message in world.take(Prefill, 10) if isinstance(message, Prefill)] == ["waits"]


@pytest.mark.parametrize("lost", ["ends", "is drained"])
def test_cache_wait_ends_with_worker(lost: str) -> None:
    """A request that waits for a cache runs elsewhere once that worker ends or is drained."""
    world = Harness.make(prefill=2, limits=Limits(step_tokens=16, steps_in_flight=1))
    cached = named(submit("busy", 816), 1)
    world.receive(10, CacheEvents(cached.block_hashes[: 200 * 16], b""))
    world.receive(1, cached)
    world.receive(1, named(submit("waits", 816), 1))
    assert not world.take(Prefill, 11)
    if lost == "ends":
        world.post(PeerDown(10, "killed"))
    else:
        world.receive(10, Draining(60_000.0))
    assert [message.request_id for message in world.take(Prefill, 11) if isinstance(message, Prefill)] == ["waits"]


def test_large_request_is_served_at_last() -> None:
    """Once it was bypassed `bypasses_max` times, room is kept for it."""
    world = Harness.make(limits=Limits(bypasses_max=8), kv_blocks=40)
    world.receive(1, submit("first", 4, max_tokens=37))  # 10 of 40 blocks
    run_prefill(world)
    world.receive(1, submit("large", 4, max_tokens=157))  # all of them
    running, served_before = ["first"], 0
    for number in range(60):
        world.receive(1, submit(f"small{number}", 4, max_tokens=37))
        run_prefill(world)
        running += placed(world, *(f"small{n}" for n in range(60)), "large")
        if "large" in running:
            break
        world.receive(20, Finished(running.pop(0), 1, 37, 0))
        run_prefill(world)
        served_before += 1
    assert "large" in running and served_before <= 8 + 4
