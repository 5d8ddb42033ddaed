"""What a prefill worker is given in advance is bounded by time, and what tenants share is its time."""

from collections import Counter
from random import Random

import pytest

from coordinator.events import Limits
from lab.cluster.surroundings import Timing
from scheduler.step_times import STEP_TOKENS_MIN, StepLimits, StepPace
from tests.coordinator.world import MODEL
from tests.uniform_cluster import UniformCluster


def paced(token_ms: float, **limits: float) -> StepPace:
    pace = StepPace(StepLimits(**{"tokens": 256, "ms": 250.0, **limits}))  # type: ignore[arg-type]
    for _ in range(10):
        pace.measure(pace.budget, pace.budget * token_ms)
    return pace


def test_fast_worker_gets_two_full_steps() -> None:
    """A fast worker has steps of full size, and two of them at a time."""
    pace = paced(0.1)
    assert pace.budget == 256
    assert pace.may_have_more(1, 256) and not pace.may_have_more(2, 512)


def test_slow_worker_gets_short_single_steps() -> None:
    """A slow worker has shorter steps, one at a time unless the first is short."""
    pace = paced(2.5)
    assert pace.budget == 100
    assert not pace.may_have_more(1, 100)
    assert pace.may_have_more(1, 20), "the rest of a prompt: the next step may be sent ahead"


def test_very_slow_worker_has_minimum_step() -> None:
    """A very slow worker still has steps of a minimum size."""
    assert paced(100.0).budget == STEP_TOKENS_MIN
    assert paced(100.0, tokens=16).budget == 16


def test_pace_recovers_from_slow_step() -> None:
    pace = paced(0.1)
    pace.measure(256, 60_000.0)
    assert pace.budget == STEP_TOKENS_MIN
    for _ in range(12):
        pace.measure(pace.budget, pace.budget * 0.1)
    assert pace.budget == 256


def test_short_steps_do_not_change_pace() -> None:
    pace = paced(0.1)
    pace.measure(8, 100.0)
    assert pace.token_ms == pytest.approx(0.1)


@pytest.mark.parametrize(("fixed_ms", "token_ms", "slice_ms", "tokens"), [
    (6.0, 0.04, 5.0, 150), (6.0, 0.04, 30.0, 600), (2.0, 10.0, 40.0, 4), (0.0, 10.0, 40.0, 4),
])  # fmt: skip
def test_slices_outweigh_their_fixed_cost(fixed_ms: float, token_ms: float, slice_ms: float, tokens: int) -> None:
    """Beside streams a step takes as long as they leave, but not less than twice its fixed cost."""
    pace, random = StepPace(StepLimits(2048)), Random(1)
    pace.slice_ms = slice_ms
    for _ in range(200):
        chunk = min(pace.budget, random.randrange(1, 4000))  # the end of a prompt may be shorter than the step
        pace.measure(chunk, (fixed_ms + token_ms * chunk) * random.uniform(0.95, 1.05))
    assert 0.7 * tokens <= pace.budget <= 1.3 * tokens + 1


def test_no_time_limit_counts_only_tokens() -> None:
    pace = paced(100.0, ms=0.0)
    assert pace.budget == 256 and pace.may_have_more(1, 256)


@pytest.mark.parametrize(("step_ms", "least_s", "most_s"), [(250.0, 0.0, 0.8), (0.0, 1.0, 4.0)])
def test_new_tenant_waits_one_short_step(step_ms: float, least_s: float, most_s: float) -> None:
    """A new tenant waits for one short step of a slow worker, longer if steps have no time limit."""
    world = UniformCluster(Limits(step_ms=step_ms), Timing(prefill_tokens_per_s=200.0))
    for number in range(4):
        world.submit(f"long-{number}", "crowd", 4000)
    world.at(20.0, world.submit, "small", "other", 32)
    world.run(30.0)
    assert least_s <= world.ttft_s["small"] <= most_s


def share_of_time(attention_tokens: int) -> float:
    """What "short" has of a prefill worker's time beside "long", both with more than it can do."""
    world = UniformCluster(Limits(step_tokens=128, steps_in_flight=1), Timing(prefill_tokens_per_s=4096.0))
    world.core.cluster.queues[MODEL].attention_tokens = attention_tokens
    for number in range(40):
        world.submit(f"long-{number}", "long", 8192)
    for number in range(2000):
        world.submit(f"short-{number}", "short", 128)
    spent: Counter[str] = Counter()
    worker = next(iter(world.core.cluster.workers[one] for one in world.prefill))
    seen = -1
    while sum(spent.values()) < 60_000:
        world.step()
        for number, (step, _) in worker.steps.items():
            if number > seen:
                seen = number
                for chunk in step.chunks:
                    work = chunk.length * (1 + (chunk.start + chunk.length / 2) / 2048)
                    spent[chunk.request_id.split("-")[0]] += int(work)
    return spent["short"] / sum(spent.values())


def test_tenants_share_prefill_time() -> None:
    """Tenants share the time of prefill workers equally, not the number of tokens."""
    assert share_of_time(2048) == pytest.approx(0.5, abs=0.04)
    assert share_of_time(0) < 0.4, "by tokens alone, the one with long prompts has most of the time"
