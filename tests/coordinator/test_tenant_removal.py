"""Tenants that the file does not have any more are forgotten, at a cost that grows with their number and no faster."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import msgspec

from coordinator.events import Configured
from proto.errors import CancelReason
from proto.messages import Cancel
from runtime.tenancy.tenants import Tenants, parse
from scheduler.waiting.rates import Rate
from tests.coordinator.world import MODEL, Harness, submit


def tenants_file(organisations: int) -> Tenants:
    lines = []
    for number in range(organisations):
        lines += [f"[tenants.o{number}]", f"[tenants.o{number}.users.u]"]
    return parse("\n".join(lines))


def world(organisations: int, **capacity: int) -> Harness:
    """One in which each tenant is known everywhere, and none has anything waiting."""
    h = Harness.make(**capacity)  # type: ignore[arg-type]
    h.post(Configured(tenants_file(organisations), 0.0))
    queue = h.core.cluster.queues[MODEL]
    for number in range(organisations):
        path = ("standard", f"o{number}", "u")
        queue.emitted(path, 1)
        queue.served[path] = Rate(0.0)
        h.core.accounts.billing.quotas.rates(f"o{number}/u", 0.0)
    return h


def opcodes(work: Callable[[], Any]) -> int:
    """Bytecode instructions that it executes."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def removal_cost(organisations: int) -> int:
    h = world(organisations)
    event = Configured(tenants_file(organisations // 2), 0.0)
    cost = opcodes(lambda: h.core.handle(event, 0.0))
    queue = h.core.cluster.queues[MODEL]
    known = [f"o{number}" for number in range(organisations // 2)]
    assert [path[1] for path in queue.fair._leaves] == known
    assert [path[1] for path in queue.served] == known
    return cost


def test_removal_cost_per_tenant_is_flat() -> None:
    """Removing half of all tenants costs no more for each where there are more of them."""
    few, many = removal_cost(50), removal_cost(400)
    assert many <= 1.5 * 8 * few, (few, many)


def test_removed_tenant_is_kept_while_it_runs() -> None:
    """A removed tenant is kept while it has a request, and forgotten at the next change of the file."""
    h = world(4, max_seqs=1)
    for number in (0, 3):  # the first one runs, and the other waits
        h.receive(1, msgspec.structs.replace(submit(f"r{number}"), tenant=f"o{number}/u"))
    quotas, fair = h.core.accounts.billing.quotas, h.core.cluster.queues[MODEL].fair
    h.post(Configured(tenants_file(1), 0.0))
    assert "o3/u" in quotas.accounts and ("standard", "o3", "u") in fair._leaves
    h.receive(1, Cancel("r3", 1, CancelReason.DISCONNECTED))
    h.post(Configured(tenants_file(1), 0.0))
    assert "o3/u" not in quotas.accounts and ("standard", "o3", "u") not in fair._leaves


def test_tenant_with_waiting_request_is_kept() -> None:
    """A removed tenant is kept while its request waits under another tenant's bill."""
    h = world(4, max_seqs=1)
    h.receive(1, msgspec.structs.replace(submit("r"), tenant="o1/u"))
    h.receive(1, Cancel("r", 1, CancelReason.DISCONNECTED))
    h.receive(1, msgspec.structs.replace(submit("r", attempt=2), tenant="o3/u"))
    assert h.core.cluster.requests["r"].waits, "its worker has not let go of the first attempt"
    h.post(Configured(tenants_file(1), 0.0))
    h.receive(1, Cancel("r", 2, CancelReason.DISCONNECTED))
    assert "r" not in h.core.cluster.requests
