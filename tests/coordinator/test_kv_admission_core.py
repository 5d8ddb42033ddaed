"""The room of decode workers in the whole core: placing, registering again, preemption; and under overload, with the decode
worker's own bookkeeping."""

from random import Random

import msgspec
import pytest

from benchmarks.kv_utilization import most_use, workloads
from benchmarks.kv_utilization_load import Job, OverloadedCluster
from coordinator.events import Limits, PeerUp
from proto.errors import Interrupt
from proto.messages import HandedOver, Interrupted, Message, Release, Released, Reserve, Role, Step, StepDone
from proto.parts import Held
from proto.progress import DecodeProgress, Joined
from scheduler.waiting.answer_lengths import AnswerLengths
from tests.coordinator.world import Harness, submit, worker_hello
from tests.helpers import first


def names(messages: list[Message]) -> list[str]:
    return [message.request_id for message in messages if isinstance(message, Reserve | Interrupted | Release)]


def hand_over(h: Harness) -> None:
    """All prompts with a chunk dispatched are computed and handed over."""
    while steps := h.take(Step, 10):
        for step in steps:
            assert isinstance(step, Step)
            h.receive(10, StepDone(step.step_id, step.chunks, 1.0, 0))
            for chunk in step.chunks:
                h.receive(10, HandedOver(chunk.request_id, chunk.attempt, 0, 0.0))


def test_placement_awaits_known_ends() -> None:
    """A request is placed once the running ones are known to end in time."""
    h = Harness.make(kv_blocks=13)
    for name in ("a", "b", "c"):
        h.receive(1, submit(name, 8, max_tokens=17))  # 2 blocks, and 6 in the end
    assert names(h.take(Reserve)) == ["a", "b"]
    hand_over(h)
    h.receive(20, DecodeProgress(12, 4, 0))
    assert not h.take(Reserve)
    h.receive(20, DecodeProgress(12, 4, 0, (Joined("a", 1, 0), Joined("b", 1, 8))))
    # At step 16, a's last, a holds 6, b 4 and c at the most 3; at step 24, b's last, b holds 6 and c 5.
    assert names(h.take(Reserve)) == ["c"]
    assert h.core.cluster.workers[20].free_blocks == 0


def test_returning_worker_may_exceed_pool() -> None:
    """Streams of a worker that comes back may count for more than its pool."""
    h = Harness.make(1, 0)
    hello = worker_hello(Role.DECODE, 22, kv_blocks=10)
    held = tuple(Held(name, 1, 6, 1) for name in ("x", "y"))
    h.post(PeerUp(22, msgspec.structs.replace(hello, held=held)))
    h.receive(1, submit("new", 4, max_tokens=2))
    assert not h.protocol_violation and not h.take(Reserve)
    h.receive(22, Released("x", 1))
    assert names(h.take(Reserve)) == ["new"]
    h.post(PeerUp(23, msgspec.structs.replace(hello, incarnation=23, held=(Held("z", 1, 11, 1),))))
    assert len(h.protocol_violation) == 1


def overcommitted() -> Harness:
    h = Harness.make(limits=Limits(kv_overcommit=4.0), kv_blocks=78)
    h.core.cluster.queues["m"].lengths.of(()).long_tokens = 128.0
    for name in ("a", "b"):
        h.now += 1
        h.receive(1, submit(name, 8, max_tokens=300))  # 77 blocks in the end; 34 for 128 tokens
    assert names(h.take(Reserve)) == ["a", "b"]
    hand_over(h)
    return h


def test_newest_is_preempted_and_counts_whole() -> None:
    """The newest stream is preempted when blocks run short, and counts whole when it comes back."""
    h = overcommitted()
    h.receive(20, DecodeProgress(5, 1, 2, (Joined("a", 1, 0), Joined("b", 1, 0))))
    [interrupted] = h.take(Interrupted)
    assert isinstance(interrupted, Interrupted)
    assert (interrupted.request_id, interrupted.reason) == ("b", Interrupt.PREEMPTED)
    assert names(h.take(Release, 20)) == ["b"]
    h.receive(20, DecodeProgress(6, 1, 2))
    assert not h.take(Interrupted), "what b will give back is counted"
    h.receive(1, submit("b", 14, attempt=2, max_tokens=300, resumed=6))
    h.receive(20, Released("b", 1, 5))
    assert not h.take(Reserve)
    h.receive(20, DecodeProgress(7, 5, 0))
    assert names(h.take(Reserve)) == ["b"]
    assert h.core.cluster.workers[20].free_blocks == 1, "not 10: it is counted with all of its 77"


def test_victims_are_chosen_in_order() -> None:
    """Streams of the tenant that holds most leave first, newest first; resumed ones leave last."""
    h = Harness.make(limits=Limits(kv_overcommit=4.0))
    streams = {"fed-1": ("fed", 1), "fed-2": ("fed", 1), "resumed": ("fed", 2), "lone": ("lone", 1)}
    for name, (tenant, attempt) in streams.items():
        h.now += 1
        asked = submit(name, 12, attempt=attempt, max_tokens=100, resumed=4 * (attempt - 1))
        h.receive(1, msgspec.structs.replace(asked, tenant=tenant))
    hand_over(h)
    joined = tuple(Joined(name, attempt, 0) for name, (_, attempt) in streams.items())
    h.receive(20, DecodeProgress(5, 1, 1000, joined))
    assert names(h.take(Interrupted)) == ["fed-2", "fed-1", "lone", "resumed"]


def test_short_blocks_stop_placement() -> None:
    """Nothing is placed while a worker's blocks run short."""
    h = overcommitted()
    h.receive(20, DecodeProgress(5, 1, 2, (Joined("a", 1, 0), Joined("b", 1, 0))))
    h.receive(20, Released("b", 1, 5))
    h.receive(1, submit("c", 4, max_tokens=2))
    assert not h.take(Reserve)
    h.receive(20, DecodeProgress(7, 5, 0))
    assert names(h.take(Reserve)) == ["c"]


def test_no_overcommit_means_no_preemption() -> None:
    """Nothing is interrupted where overcommit is off, whatever the worker reports."""
    h = Harness.make(limits=Limits(kv_overcommit=1.0), kv_blocks=20)
    h.receive(1, submit("a", 8, max_tokens=25))
    h.receive(20, DecodeProgress(5, 1, 9, (Joined("a", 1, 0),)))
    assert not h.take(Interrupted)


@pytest.mark.parametrize("name", first(4, sorted(workloads(64))))
def test_overload_never_runs_out(name: str) -> None:
    """Nothing is refused after prefill, preempted or out of memory in overload."""
    figures = OverloadedCluster(workloads(64)[name], 512, 16, overload=2.0, seed=3).run(128, 200)
    assert figures.refused_after_prefill == figures.out_of_memory == figures.preempted == 0
    assert figures.finished > 20


def test_pool_use_reaches_85_percent() -> None:
    """Prompts as long as max_tokens; it depends on that, and `python -m benchmarks kv-utilization` has the table."""

    def draw(random: Random) -> Job:
        return Job(256, 256, (random.randint(1, 256),))

    peak = OverloadedCluster(draw, 2048, 16, overload=2.0).run(512, 400)
    whole = OverloadedCluster(draw, 2048, 16, overload=2.0, whole_life=True).run(512, 400)
    assert peak.refused_after_prefill == peak.out_of_memory == 0
    assert most_use(1.0) > peak.kv_use >= 0.85 > 0.75 > whole.kv_use
    assert peak.output_tokens > 1.15 * whole.output_tokens


def test_most_use_depends_on_prompt_share() -> None:
    """By hand, without a prompt: 1/3 over the highest value of 1/3 + x - x² - x³/3, which it has at x = √2 - 1."""
    x = 2**0.5 - 1
    assert most_use(0.0) == pytest.approx(1 / 3 / (1 / 3 + x - x**2 - x**3 / 3), abs=1e-5)
    assert 0.84 < most_use(0.5) < 0.85 < most_use(0.55) < most_use(1.0) < most_use(2.0) < 1.0


def test_preempted_streams_all_finish(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every preempted stream finishes though lengths are underestimated."""
    monkeypatch.setattr(AnswerLengths, "long_tokens", lambda lengths, path: 32.0)

    def draw(random: Random) -> Job:
        return Job(32, 128, (random.randint(1, 128),))

    world = OverloadedCluster(draw, 512, 16, overload=2.0, overcommit=4.0)
    over = world.run(256, 300)
    careful = OverloadedCluster(draw, 512, 16, overload=2.0).run(256, 300)
    assert over.preempted > 0 and over.kv_use > careful.kv_use
    assert over.out_of_memory <= over.preempted / 50
    world.arriving = False
    for _ in range(40):
        world.run(0, 100)
        if not world.cluster.core.cluster.requests:
            break
    core = world.cluster.core
    assert not core.cluster.requests and world.decode.allocator.held_count == 0
    assert not core.cluster.counters["work_failed_engine_error"]
