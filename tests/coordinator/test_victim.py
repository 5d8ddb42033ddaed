"""One small tenant beside a flood, through the whole core, in virtual time: one prefill worker with a fixed rate."""

import heapq
import random

import pytest

from coordinator.events import Limits
from proto.messages import Finished, HandedOver, Rejected, Step, StepDone, Submit
from proto.sampling import Sampling
from tests.coordinator.world import MODEL, Harness

TOKENS_PER_S = 8192.0
SECONDS = 40.0


def arrivals(seed: int, abuse: bool) -> list[tuple[float, str, int]]:
    """(time, tenant, prompt tokens): 0.5 requests/s of 512 tokens, and a hundred times its tokens as prompts of 8k."""
    rnd = random.Random(seed)
    found, now = [], 0.0
    while (now := now + rnd.expovariate(0.5)) < SECONDS:
        found.append((now, "victim", 512))
    now = 0.0
    while abuse and (now := now + rnd.expovariate(0.5 * 512 * 100 / 8192)) < SECONDS:
        found.append((now, "abuser", 8192))
    return sorted(found)


def ttfts(seed: int, abuse: bool) -> list[float]:
    """Seconds from submit to the end of prefill, of the victim's requests."""
    h = Harness.make(limits=Limits(), kv_blocks=10**6, max_seqs=10**4, context_tokens=20_000)
    waiting = arrivals(seed, abuse)
    submitted: dict[str, float] = {}
    left: dict[str, int] = {}
    found: list[float] = []
    steps: list[Step] = []
    done: list[tuple[float, Step]] = []
    while waiting or (done and len(found) < sum(name.startswith("victim") for name in submitted)):
        if waiting and (not done or waiting[0][0] <= done[0][0]):
            h.now, tenant, tokens = waiting.pop(0)
            name = f"{tenant}-{len(submitted)}"
            submitted[name], left[name] = h.now, tokens
            h.receive(1, Submit(name, 1, MODEL, tokens, Sampling(max_tokens=2), tenant=tenant))
        else:
            h.now, step = heapq.heappop(done)
            h.receive(10, StepDone(step.step_id, step.chunks, 1.0, 0))
            for chunk in step.chunks:
                left[chunk.request_id] -= chunk.length
                if left[chunk.request_id] == 0:
                    if chunk.request_id.startswith("victim"):
                        found.append(h.now - submitted[chunk.request_id])
                    h.receive(10, HandedOver(chunk.request_id, 1, 0, 0.0))
                    h.receive(20, Finished(chunk.request_id, 1, 2, 0))
        steps += [m for m in h.take(Step) if isinstance(m, Step)]
        if not done and steps:
            step = steps.pop(0)
            heapq.heappush(done, (h.now + sum(c.length for c in step.chunks) / TOKENS_PER_S, step))
        assert not any(m.request_id.startswith("victim") for m in h.take(Rejected) if isinstance(m, Rejected))
    return found


def p99(values: list[float]) -> float:
    return sorted(values)[int(len(values) * 0.99)]


@pytest.mark.parametrize("block", range(4))
def test_a_flood_of_long_prompts_at_most_triples_the_victims_ttft(block: int) -> None:
    """The goal is 2.0; two steps already in flight and the flood's own half of the service make it 2.4 to 2.9 today."""
    seeds = range(block * 5, block * 5 + 5)
    alone = [t for seed in seeds for t in ttfts(seed, False)]
    beside = [t for seed in seeds for t in ttfts(seed, True)]
    assert len(alone) == len(beside) > 50
    assert p99(beside) <= 3.0 * p99(alone), (seeds, p99(alone), p99(beside))
