"""Room kept for a request that was bypassed too often: what an attacker can make of it, in virtual time."""

import random
from dataclasses import dataclass
from functools import partial

import pytest

from coordinator.events import Limits
from lab.cluster.cluster import MODEL
from lab.cluster.surroundings import Timing
from runtime.tenancy.priority_classes import PriorityClass
from scheduler.waiting.queue import WaitQueue
from tests.helpers import first, p99
from tests.uniform_cluster import UniformCluster

SECONDS = 80.0
NO_TARGET = {"standard": PriorityClass()}
"""Every request waits for its room, however long."""
TENANTS = 9
PER_S = 14.5
"""Requests of all victims; the pool runs about 16 of one second each."""


@dataclass
class Found:
    ttft_s: list[float]
    room_share: float
    """Of the decode pool's time: kept for the attacker, or held by it."""


def run(seed: int, attack: str = "") -> Found:
    """Nine tenants use most of a decode worker. The attacker's requests would fill it each, and run for a second; "back to
    back" has always three of them here, "cancel" leaves while room is kept for it."""
    timing = Timing(prefill_step_s=0.002, decode_step_s=0.01)
    world = UniformCluster(
        Limits(bypasses_max=16, kv_overcommit=1.0, priority_classes=NO_TARGET),
        timing,
        decode_blocks=320,
        progress=False,
    )
    rnd, now, sent, held = random.Random(seed), 0.0, 0, []
    pool = world.core.cluster.pools[MODEL]

    def attacker() -> None:
        nonlocal sent
        alive = [r for r in world.core.cluster.requests.values() if r.path[1] == "attacker"]
        for _ in range(3 - len(alive)):
            sent += 1
            world.submit(f"a{sent}", "attacker", 64, 5000, output_tokens=(100,))
        kept = pool.room_for_large.request
        if attack == "cancel" and kept is not None and rnd.random() < 0.2:
            world.cancel(kept.id)
        blocks = sum(
            h.kv_blocks for w in pool.decode.values() for h in w.allocations.values() if h.path[1] == "attacker"
        )
        held.append(1.0 if kept is not None else blocks / 320)

    n = 0
    while (now := now + rnd.expovariate(PER_S)) < SECONDS:
        n += 1
        who, length = f"v{n % TENANTS}", rnd.choice([100, 200, 300])
        world.at(now, partial(world.submit, f"v{n}", who, 64, length, output_tokens=(length // 2,)))
    for tick in range(int(SECONDS / 0.02)) if attack else ():
        world.at(0.02 * tick, attacker)
    world.run(SECONDS + 30.0)
    ttft_s = [t for name, t in world.ttft_s.items() if name.startswith("v")]
    ttft_s += [float("inf")] * (n - len(ttft_s))  # refused, or expired in the queue
    return Found(ttft_s, sum(held) / max(len(held), 1))


SEEDS = range(2)


def everything(attack: str = "") -> Found:
    found = [run(seed, attack) for seed in SEEDS]
    return Found([t for one in found for t in one.ttft_s], sum(one.room_share for one in found) / len(found))


@pytest.fixture(scope="module")
def alone() -> Found:
    return everything()


@pytest.mark.parametrize("attack", first(1, ["back to back", "cancel"]))
def test_pool_sized_requests_keep_to_share(alone: Found, attack: str) -> None:
    """Tenants with pool-sized requests take no more room time than their share, and slow others little."""
    beside = everything(attack)
    assert beside.room_share <= 1 / (TENANTS + 1) + 0.05, "the first one is free, and the last one not paid yet"
    assert p99(beside.ttft_s) <= 3 * p99(alone.ttft_s), (p99(alone.ttft_s), p99(beside.ttft_s))


def test_uncharged_room_would_be_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pool-sized requests would take more than half of all room time if kept room were free of charge."""
    monkeypatch.setattr(WaitQueue, "charge", lambda self, path, cost: None)
    assert run(0, "back to back").room_share > 0.5
