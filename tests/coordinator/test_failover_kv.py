"""After a failover the streams that went on count with what is left of them, so that a busy pool goes on placing."""

from random import Random

import msgspec
import pytest

from benchmarks.kv_utilization_load import Job, OverloadedCluster
from coordinator.core import Core
from coordinator.events import Limits, PeerUp
from proto.messages import Interrupted, Reserve, Role
from proto.parts import Held, PrefixPart
from proto.progress import DecodeProgress, Joined
from tests.coordinator.consistent import all_covered, check_room
from tests.coordinator.world import MODEL, Harness, submit, worker_hello
from tests.uniform_cluster import FIRST_DECODE

KV_BLOCKS, BLOCK = 512, 16


def busy(text: str = "") -> OverloadedCluster:
    """A pool that has been full for a while; of its reports none is on its way."""

    def draw(random: Random) -> Job:
        return Job(128, 256, (random.randint(1, 256),), text, 96)

    world = OverloadedCluster(draw, KV_BLOCKS, BLOCK, overload=3.0, report_s=0.0)
    world.run(0, 600)
    return world


def successor(world: OverloadedCluster, held: tuple[Held, ...]) -> Core:
    """A coordinator that knows of the streams only what their worker says when it registers."""
    core = Core(Limits(queue_wait_s_max=1e6))
    for incarnation, registered in world.cluster.core.members.peers.items():
        if registered.role is Role.DECODE:
            registered = msgspec.structs.replace(registered, held=held)
        core.handle(PeerUp(incarnation, registered), 0.0)
    return core


@pytest.mark.parametrize("text", ["", "system prompt"])
def test_failover_keeps_pool_room(text: str) -> None:
    """A busy pool has about as much room after a failover as before."""
    world = busy(text)
    before = world.cluster.core.cluster.pools[MODEL].decode[FIRST_DECODE]
    held = world.decode.table.held()
    assert len(held) > 5 and before.free_blocks < 0.1 * KV_BLOCKS
    after = successor(world, held).cluster.pools[MODEL].decode[FIRST_DECODE]
    check_room(after.admission)
    assert before.free_blocks <= after.free_blocks < 0.2 * KV_BLOCKS
    assert all_covered(after.admission) >= all_covered(before.admission) and bool(text) == (
        all_covered(after.admission) > 0
    )
    only_blocks = tuple(Held(one.request_id, one.attempt, one.kv_blocks, one.seqs) for one in held)
    assert successor(world, only_blocks).cluster.workers[FIRST_DECODE].free_blocks == 0


def test_adopted_streams_count_their_rest() -> None:
    """Adopted streams are counted by the tokens that are left of them."""
    h = Harness.make(1, 0)
    hello = worker_hello(Role.DECODE, 22, kv_blocks=13)
    held = (
        Held("a", 1, 6, 1, 0, 8, 16, 112, 100),  # at step 112 of 116
        Held("b", 1, 6, 1, 0, 8, 16, 112),
    )
    h.post(PeerUp(22, msgspec.structs.replace(hello, held=held)))
    room = h.core.cluster.pools[MODEL].decode[22].admission
    assert room.steps == 112
    h.receive(1, submit("c", 8, max_tokens=17))
    assert [m.request_id for m in h.take(Reserve) if isinstance(m, Reserve)] == ["c"], "6 + 3 + 3 blocks, not 6 + 6 + 6"
    h.receive(22, DecodeProgress(115, 2, 0, (Joined("b", 1, 112),)))
    assert h.core.cluster.workers[22].forwarded(("b", 1)) == 2, "it is known to run"


def test_oversized_stream_keeps_reservation() -> None:
    """An adopted stream whose rest does not fit its reservation counts with the reservation."""
    h = Harness.make(1, 0)
    hello = worker_hello(Role.DECODE, 22, kv_blocks=13)
    h.post(PeerUp(22, msgspec.structs.replace(hello, held=(Held("a", 1, 6, 1, 0, 400, 16, 112, 100),))))
    assert not h.protocol_violation and h.core.cluster.workers[22].free_blocks == 7
    h.post(
        PeerUp(
            23,
            msgspec.structs.replace(
                hello, incarnation=23, held=(Held("b", 1, 6, 1, 0, 8, 16, 1, 0, (PrefixPart(1, 3),)),)
            ),
        )
    )
    assert h.protocol_violation, "three blocks are shared of a prompt that has two"


def test_adopted_streams_under_overcommit() -> None:
    """Adopted streams count as expected under overcommit, and are no victims if they leave already."""
    h = Harness.make(limits=Limits(kv_overcommit=4.0), decode=0, kv_blocks=78)
    h.core.cluster.queues["m"].lengths.of(()).long_tokens = 128.0
    hello = worker_hello(Role.DECODE, 20, kv_blocks=1600)
    held = tuple(Held(name, 1, 1002, 1, 0, 8, 4000, 5, 0) for name in ("x",))
    h.post(PeerUp(20, msgspec.structs.replace(hello, held=held)))
    assert h.core.cluster.workers[20].free_blocks == 1600 - (8 + 1024 - 1 + 3) // 4
    h.receive(1, submit("a", 8, max_tokens=300))
    assert h.take(Reserve)
    h.receive(20, DecodeProgress(6, 1, 2))
    assert [m.request_id for m in h.take(Interrupted) if isinstance(m, Interrupted)] == ["a"], "x does not leave"
