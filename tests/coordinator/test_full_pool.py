"""Requests as large as a decode worker's pool, from many users of one organisation, beside tenants who use most of the pool."""

import random
from dataclasses import dataclass
from functools import cache, partial

import pytest

from coordinator.events import Limits
from lab.cluster.surroundings import Timing
from tests.coordinator.world import MODEL
from tests.helpers import first, p99
from tests.uniform_cluster import UniformCluster

SECONDS, ATTACK_S = 25.0, 5.0
VICTIMS = 9
PER_S = 50.0
"""Requests of all victims. They use about half of six decode workers, each of which runs about 16 of one second each."""
NO_RESERVATION = 10**9


@dataclass
class Found:
    ttft_s: list[float]
    """Of the victims."""
    served: int
    """Requests of the attacker."""
    room_share: float
    """Of the decode workers' blocks, held by the attacker's requests, on average."""


@cache
def run(users: int, bypasses_max: int) -> Found:
    """Each user of the attacking organisation has always one request that fills a decode worker and runs for a second."""
    world = UniformCluster(
        Limits(bypasses_max=bypasses_max, queue_requests_max=4096, kv_overcommit=1.0),
        Timing(prefill_step_s=0.002, decode_step_s=0.01),
        prefill=2,
        decode=6,
        decode_blocks=320,
        progress=False,
    )
    rnd, now, victims, attacks = random.Random(1), 0.0, 0, 0
    pool = world.core.cluster.pools[MODEL]
    shares: list[float] = []

    def attack(user: int) -> None:
        nonlocal attacks
        attacks += 1
        world.submit(f"a{user}-{attacks}", f"attacker/user{user}", 64, 5000, output_tokens=(100,))

    def again() -> None:
        alive = {request.path[2] for request in world.core.cluster.requests.values() if request.path[1] == "attacker"}
        if len(alive) < users:
            for user in range(users):
                if f"user{user}" not in alive:
                    attack(user)
        held = [h.kv_blocks for w in pool.decode.values() for h in w.allocations.values() if h.path[1] == "attacker"]
        shares.append(sum(held) / (6 * 320))

    while (now := now + rnd.expovariate(PER_S)) < SECONDS:
        victims += 1
        who, length = f"v{victims % VICTIMS}", rnd.choice([100, 200, 300])
        world.at(now, partial(world.submit, f"v{victims}", who, 64, length, output_tokens=(length // 2,)))
    for tick in range(int((SECONDS - ATTACK_S) / 0.05)) if users else ():
        world.at(ATTACK_S + 0.05 * tick, again)
    world.run(SECONDS)
    served = sum(name.startswith("a") for name in world.ttft_s)
    world.run(SECONDS + 10.0)
    assert not [rejected for rejected in world.rejected if rejected.request_id.startswith("v")]
    ttft_s = [t for name, t in world.ttft_s.items() if name.startswith("v")]
    assert len(ttft_s) == victims, "each of them is served"
    return Found(ttft_s, served, sum(shares) / max(len(shares), 1))


@pytest.mark.parametrize("users", first(1, [1000, 1, 10, 100]))
def test_unplaceable_requests_delay_no_others(users: int) -> None:
    """Without reservations, so that nothing but the order of the queue decides."""
    alone, beside = run(0, NO_RESERVATION), run(users, NO_RESERVATION)
    assert p99(beside.ttft_s) <= 1.5 * p99(alone.ttft_s), (p99(alone.ttft_s), p99(beside.ttft_s))


@pytest.mark.parametrize("users", first(1, [1000, 100, 10]))
def test_user_count_wins_no_pool_share(users: int) -> None:
    """A thousand users of an organisation get no more of a full pool than ten."""
    alone, beside = run(0, 64), run(users, 64)
    assert beside.served > 0, "large requests are served in the end"
    assert beside.room_share <= 1 / 6 + 0.02, "one at a time"
    median = sorted(beside.ttft_s)[len(beside.ttft_s) // 2]
    assert median <= 1.5 * sorted(alone.ttft_s)[len(alone.ttft_s) // 2]
    assert p99(beside.ttft_s) <= 1.5 * p99(alone.ttft_s), (p99(alone.ttft_s), p99(beside.ttft_s))
