"""Room is kept for large requests on one decode worker; all others go on with small ones. In virtual time."""

import random

from coordinator.events import Limits
from lab.cluster.cluster import MODEL
from lab.cluster.surroundings import Timing
from tests.helpers import p99
from tests.uniform_cluster import UniformCluster

SECONDS = 30.0
SMALL_PER_S = 30.0


def run(large: int) -> tuple[UniformCluster, int]:
    """Six decode workers, nearly full of small streams; `large` requests that need one of them nearly alone."""
    timing = Timing(prefill_step_s=0.002, decode_step_s=0.01)
    world = UniformCluster(
        Limits(bypasses_max=16, kv_overcommit=1.0), timing, prefill=2, decode=6, decode_blocks=200, progress=False
    )
    rnd, now, number, kept = random.Random(3), 0.0, 0, 0
    pool = world.core.cluster.pools[MODEL]
    while (now := now + rnd.expovariate(SMALL_PER_S)) < SECONDS:
        number += 1
        world.at(now, world.submit, f"s{number}", f"t{number % 20}", 64, 100)
    for n in range(large):
        world.at(5.0 + 0.01 * n, world.submit, f"large{n}", f"big{n}", 64, 3000)

    def look() -> None:
        nonlocal kept
        kept += pool.room_for_large.request is not None

    for tick in range(int(SECONDS / 0.05)):
        world.at(0.05 * tick, look)
    world.run(SECONDS + 100.0)
    return world, kept


def small_p99(world: UniformCluster) -> float:
    return p99([ttft_s for name, ttft_s in world.ttft_s.items() if name.startswith("s")])


def test_small_requests_run_beside_kept_room() -> None:
    """Small requests run about as fast while room is kept for large ones, and each large one runs too."""
    alone, _ = run(0)
    beside, kept = run(3)
    assert kept > 0 and all(f"large{n}" in beside.ttft_s for n in range(3)), "room was kept, and each got some"
    assert len(beside.ttft_s) == len(beside.requests)
    assert small_p99(beside) <= small_p99(alone) + 0.05, (small_p99(alone), small_p99(beside))
