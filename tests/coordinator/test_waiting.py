"""Those who wait: what nobody can hold any more, what is cached before a deadline, and who goes in an overload."""

import msgspec

from coordinator.events import Limits, PeerDown, PeerUp, Tick
from lab.cluster.surroundings import Timing
from proto.errors import Reject
from proto.messages import Prefill, Rejected, Role
from tests.coordinator.test_seams import one_of, run_prefill
from tests.coordinator.world import MODEL, Harness, submit, worker_hello
from tests.uniform_cluster import FIRST_PREFILL, UniformCluster


def test_unplaceable_requests_take_no_turns() -> None:
    """Requests that no worker can hold any more do not stop smaller ones behind them."""
    world = Harness.make(kv_blocks=8)
    world.post(PeerUp(21, worker_hello(Role.DECODE, 21, kv_blocks=40)))
    world.receive(1, one_of("fills", "f", 4, 150))
    run_prefill(world)
    for number in range(9):
        deadline_ms = 5000.0 if number == 0 else 0.0
        large = msgspec.structs.replace(one_of(f"big{number}", f"b{number}", 4, 97), deadline_ms=deadline_ms)
        world.receive(1, large)
    assert world.core.cluster.requests["fills"].decode_incarnation == 21
    world.post(PeerDown(21, "killed"))
    world.take(Prefill)
    world.receive(1, one_of("small", "s", 4, 3))
    assert world.take(Prefill), "nine that nobody can hold stood before it"
    run_prefill(world)
    world.now = 6.0
    world.post(Tick())
    assert world.ended["big0"] == ["expired"] and len(world.core.cluster.queues[MODEL]) == 8
    world.post(PeerUp(22, worker_hello(Role.DECODE, 22, kv_blocks=400)))
    assert len(world.take(Prefill)) == 8, "all are placed once a worker comes that can hold them"


def test_refused_newcomer_sheds_no_request() -> None:
    """No request is shed for a newcomer that is refused all the same."""
    world = Harness.make(limits=Limits(queue_tokens_max=1000, queue_requests_max=100), decode=1, max_seqs=1)
    world.receive(1, one_of("runs", "r", 10, 4))
    for number in range(3):
        world.receive(1, one_of(f"a{number}", "a", 300, 4))
    world.receive(1, one_of("huge", "h", 700, 4))
    assert [(m.request_id, m.reason) for m in world.take(Rejected)] == [("huge", Reject.QUEUE_FULL)]  # type: ignore[attr-defined]
    world.receive(1, one_of("small", "h", 200, 4))
    assert [(m.request_id, m.reason) for m in world.take(Rejected)] == [("a2", Reject.SHED)]  # type: ignore[attr-defined]


def test_deadline_check_ignores_cached_tokens() -> None:
    """A deadline is checked against the prompt tokens that are not cached."""
    for cached in (False, True):
        world = UniformCluster(timing=Timing(prefill_tokens_per_s=1000.0))
        world.submit("measured", "o", 1000)
        world.run(5.0)
        size = next(iter(world.core.cluster.workers.values())).capacity.block_size
        names = b"".join(bytes([n]) * 16 for n in range(1000 // size))
        if cached:
            world.core.cluster.pools[MODEL].locality.learn(FIRST_PREFILL, names, b"")
        wanted = msgspec.structs.replace(submit("r", 1000), deadline_ms=500.0, block_hashes=names, hash_block_size=size)
        harness = Harness(world.core, world.now)
        harness.receive(1, wanted)
        assert bool(harness.take(Rejected)) != cached


def test_tenant_requests_follow_priority() -> None:
    """A tenant's requests are served in the order of their priority and deadline."""
    world = Harness.make(limits=Limits(queue_requests_max=100), decode=1, max_seqs=1)
    world.receive(1, one_of("runs", "r", 10, 4))
    world.take(Prefill)
    asked = {"late": 5, "plain": 0, "soon": 0, "first": -7}
    for name, priority in asked.items():
        deadline_ms = 60_000.0 if name == "soon" else 80_000.0
        wanted = one_of(name, "a", 10, 4)
        world.receive(1, msgspec.structs.replace(wanted, priority=priority, deadline_ms=deadline_ms))
    entries = {name: world.core.cluster.requests[name].entry for name in asked}
    order = sorted(asked, key=lambda name: entries[name].due)
    assert order == ["first", "soon", "plain", "late"]
