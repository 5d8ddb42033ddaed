"""Clients that come when they were told, and capacity that was borrowed: who gets the room in a full queue."""

from copy import copy
from dataclasses import replace

import msgspec

from coordinator.events import Limits
from proto.errors import Reject
from proto.messages import Accepted, Rejected, Submit
from runtime.tenancy.priority_classes import PriorityClass
from tests.coordinator.world import Harness, submit

CLASSES = {"interactive": PriorityClass(8.0), "standard": PriorityClass(2.0), "batch": PriorityClass(1.0)}
LOWEST_FIRST = ["batch", "standard", "interactive"]


def ask(request_id: str, prompt: int) -> Submit:
    """Requests with the same number of prompt tokens are one request that comes again."""
    return msgspec.structs.replace(submit(request_id, prompt), tenant="acme")


def full_queue() -> tuple[Harness, dict[int, float]]:
    """A tenant with as many waiting requests as it may have, and after how many seconds each of ten rejected ones was told to
    come again, by its prompt."""
    limits = Limits(tenant_queue_max=4, priority_classes={"standard": PriorityClass()})
    h = Harness.make(limits=limits, max_seqs=1)
    for n in range(6):
        h.receive(1, ask(f"first{n}", 10))
    h.take(Rejected)
    told = {}
    for prompt in range(20, 30):
        h.receive(1, ask(f"told{prompt}", prompt))
        [refused] = h.take(Rejected)
        assert isinstance(refused, Rejected) and refused.reason is Reject.QUEUE_FULL
        told[prompt] = refused.retry_after_s
    return h, told


def come_again(h: Harness, prompts: list[int], name: str) -> int:
    """Returns how many are admitted."""
    h.take(Accepted)
    for prompt in prompts:
        h.receive(1, ask(f"{name}{prompt}", prompt))
    return len(h.take(Accepted))


def test_obeying_clients_go_first() -> None:
    """In a full queue of one tenant, who comes when it was told is admitted, and who hammers is not."""
    h, told = full_queue()
    for tries in range(5):
        h.now = min(told.values()) * tries / 10
        assert come_again(h, [20, 21, 22, 23, 24], f"hammers{tries}-") == 0
    h.now = max(told.values()) + 0.1
    hammering = come_again(h, [20, 21, 22, 23, 24], "again")
    assert come_again(h, [25, 26, 27, 28, 29], "obeys") >= max(hammering, 3)


def wait(h: Harness, name: str, priority_class: str) -> None:
    """Two requests of a tenant wait: one within its rates, one beyond them."""
    [queue] = h.core.cluster.queues.values()
    queue.line.limits = replace(queue.line.limits, queue_requests_max=100)
    for kind in ("own", "borrowed"):
        h.receive(1, msgspec.structs.replace(submit(f"{name}-{kind}"), tenant=name, priority_class=priority_class))
        request = h.core.cluster.requests[f"{name}-{kind}"]
        queue.line.remove(request)
        request.borrowed = kind == "borrowed"
        queue.line.add(request)


def gives_way(h: Harness, priority_class: str) -> list[str] | None:
    """The requests that would be shed from the full queue for a new one of this class."""
    [queue] = h.core.cluster.queues.values()
    queue.line.limits = replace(queue.line.limits, queue_requests_max=len(queue))
    newcomer = copy(h.core.cluster.requests["running"])
    newcomer.path = (priority_class, "new", "")
    victims = queue.line.make_room(newcomer, LOWEST_FIRST)
    return None if victims is None else [victim.id for victim in victims]


def test_borrowed_capacity_goes_by_class() -> None:
    """A borrowed request gives way to its class and higher ones, and keeps its place beside a lower class."""
    h = Harness.make(limits=Limits(priority_classes=CLASSES), max_seqs=1)
    for name in ("running", "placed"):
        h.receive(1, submit(name))
    wait(h, "chat", "interactive")
    assert gives_way(h, "interactive") == ["chat-borrowed"]
    assert gives_way(h, "batch") is None, "a batch request does not push an interactive one out"
    wait(h, "nightly", "batch")
    assert gives_way(h, "interactive") == gives_way(h, "batch") == ["nightly-borrowed"]
