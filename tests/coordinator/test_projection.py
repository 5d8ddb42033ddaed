"""Clients that are turned away come back when they were told to, and find room then, whichever side binds."""

import random
import statistics

import pytest

from coordinator.events import Limits, PeerDown, PeerUp
from lab.cluster.surroundings import ClientRequest, Timing
from proto.messages import Finished, Rejected, Role
from scheduler.request import Request
from scheduler.waiting.line import WaitingLine
from scheduler.waiting.projection import Projection, Speed
from scheduler.waiting.tenant_work import IN_LINE
from tests.coordinator.test_draining import decoding
from tests.coordinator.world import Harness, submit, worker_hello
from tests.helpers import first
from tests.uniform_cluster import UniformCluster

CAPACITY_PER_S = 3.2


def cluster(side: str) -> UniformCluster:
    limits = Limits(queue_requests_max=64, kv_overcommit=1.0)
    if side == "prefill":
        return UniformCluster(limits, Timing(prefill_tokens_per_s=800.0, decode_step_s=0.001), prefill=2, decode=2)
    timing, seqs = Timing(prefill_tokens_per_s=65536.0, decode_step_s=0.05), side == "sequences"
    return UniformCluster(
        limits, timing, prefill=2, decode=2, max_seqs=16 if seqs else 64, decode_blocks=1 << 14 if seqs else 16 * 45,
        progress=True,
    )  # fmt: skip


class Clients:
    """Twice as many as can be served, for 100 s."""

    def __init__(self, side: str, tenants: int, seed: int) -> None:
        self.cluster, source, at_s = cluster(side), random.Random(seed), 0.0
        self.rejections: dict[str, int] = {}
        self.told: dict[str, tuple[float, float]] = {}
        """When a client was first turned away, and the wait that it was told."""
        self.admitted: dict[str, float] = {}
        self.cluster.on_end = self.ended
        while (at_s := at_s + source.expovariate(2 * CAPACITY_PER_S)) < 100.0:
            name = f"r{len(self.rejections)}"
            self.rejections[name] = 0
            self.cluster.at(at_s, self.submit, name, f"o{source.randrange(tenants)}")
        self.cluster.run(1500.0)

    def submit(self, name: str, tenant: str) -> None:
        """Each client has a prompt of its own."""
        number = int(name.partition("+")[0][1:])
        self.cluster.submit(name, tenant, 500, 200, prompt=number.to_bytes(4, "little") * 500)

    def ended(self, request: ClientRequest) -> None:
        submit, rejected = request.submit, request.rejected
        name = submit.request_id.split("+")[0]
        if rejected is None:
            self.admitted[name] = request.submitted_s
            return
        self.rejections[name] += 1
        assert rejected.retry_after_s
        now, again = self.cluster.now, f"{name}+{self.rejections[name]}"
        self.told.setdefault(name, (now, rejected.retry_after_s))
        self.cluster.at(now + rejected.retry_after_s, self.submit, again, submit.tenant)

    def waited_of_told(self) -> list[float]:
        return [(self.admitted[name] - now) / told_s for name, (now, told_s) in self.told.items()]


@pytest.mark.parametrize("seed", first(1, range(1, 6)))
@pytest.mark.parametrize("tenants", [1, 10, 1000])
@pytest.mark.parametrize("side", ["prefill", "sequences", "blocks"])
def test_told_wait_matches_real_wait(side: str, tenants: int, seed: int) -> None:
    """Clients at twice the load are told a retry time within a factor of 1.5 of their real wait, in the median."""
    clients = Clients(side, tenants, seed)
    assert len(clients.admitted) == len(clients.rejections), "everybody is served in the end"
    assert sum(clients.rejections.values()) <= 2 * len(clients.rejections)
    assert max(clients.rejections.values()) <= 8
    assert 1 / 1.5 <= statistics.median(clients.waited_of_told()) <= 1.5


def test_early_client_keeps_no_place() -> None:
    """A client that comes before its time lengthens no other's wait, and its own place comes back once it obeys."""
    line = WaitingLine(Limits(), {})
    projection, path, speed = Projection(line), ("standard", "o", "u"), Speed(1000.0, decode_is_full=False)
    waits = Request("a", 1, submit("a", 4000), b"", 0.0, 0.0, path, waits=True, work=4000)
    line.add(waits)
    told_s = projection.retry_after_s(path, 2000, 1, speed, 0.0)
    for number in range(50):
        projection.retry_after_s(path, 2000, 2, speed, 0.05 * number)  # it hammers
    assert line.work.total(IN_LINE) == 4000 + 2000, "of those that were told, only the one that did not come early"
    assert projection.retry_after_s(path, 2000, 3, speed, 2.5) < told_s + 3.0
    assert not projection.obeys(path, 2, 3.0) and projection.obeys(path, 1, told_s)


@pytest.mark.parametrize("lost", [10, 20], ids=["prefill", "decode"])
def test_wait_for_lost_worker_is_no_queue(lost: int) -> None:
    """While a role's last worker starts again, what still runs ends and nothing is placed: no wait is projected from it."""
    h = Harness.make(prefill=1, decode=1)
    for number in range(6):
        h.now = 4.0 * number
        decoding(h, submit(f"done-{number}"))
        h.now += 4.0
        h.receive(20, Finished(f"done-{number}", 1, 40, 40))
    decoding(h, submit("runs", max_tokens=2))
    h.now += 0.1
    h.post(PeerDown(lost, "connection closed"))
    for number in range(30):
        h.now += 0.5
        h.receive(1, submit(f"waits-{number}"))
    assert not h.take(Rejected)
    role = Role.PREFILL if lost == 10 else Role.DECODE
    h.post(PeerUp(50, worker_hello(role, 50)))
    h.now += 0.1
    h.receive(1, submit("then"))
    assert not h.take(Rejected)
