"""The scheduler as any owner calls it, without the coordinator."""

import ast

import msgspec
import pytest

from scheduler.limits import SchedulerLimits
from scheduler.workers.worker import Worker
from tests.coordinator.world import submit
from tests.scheduler.virtual import VirtualWorkers
from tests.test_tidy import EVERYTHING, ROOT, parsed


def _submit(
    virtual: VirtualWorkers, tenant: str, number: int, at: float, tokens: int = 500, max_tokens: int = 20
) -> None:
    request = submit(f"{tenant}-{number}", tokens, max_tokens=max_tokens)
    virtual.submit(msgspec.structs.replace(request, tenant=tenant), at)


def _held(virtual: VirtualWorkers) -> list[Worker]:
    return [worker for worker in virtual.scheduler.cluster.workers.values() if worker.allocations or worker.steps]


def test_scheduler_serves_without_coordinator() -> None:
    """All requests finish, and the workers hold nothing in the end."""
    virtual = VirtualWorkers(prefill=2, decode=2)
    for number in range(200):
        _submit(virtual, "a", number, 0.05 * number)
    virtual.run(60.0)
    assert len(virtual.finished) == 200 and not virtual.scheduler.cluster.requests and not _held(virtual)


def test_overload_is_shared_by_weights() -> None:
    """Two tenants that ask for more than there is are served as their weights say."""
    limits = SchedulerLimits(weights={"standard/a": 3.0, "standard/b": 1.0})
    virtual = VirtualWorkers(1, 1, limits, kv_blocks=100_000, max_seqs=4096)
    for number in range(1000):
        for tenant in ("a", "b"):
            _submit(virtual, tenant, number, 0.0)
    virtual.run(20.0)
    assert virtual.served["a"] / virtual.served["b"] == pytest.approx(3.0, rel=0.1)


def test_lost_worker_loses_no_request() -> None:
    """Requests on a lost decode worker go on elsewhere and finish."""
    virtual = VirtualWorkers(prefill=1, decode=2)
    for number in range(40):
        _submit(virtual, "a", number, 0.0, max_tokens=100)
    virtual.run(1.0)
    virtual.lose(100)
    virtual.run(60.0)
    assert len(virtual.finished) == 40 and not _held(virtual)
    assert any(request.attempt > 1 for request in virtual.finished)


def test_scheduler_imports_no_process() -> None:
    """The scheduler imports the wire's plain types and the priority classes, and nothing else of the product."""
    found = set()
    for path in (ROOT / "scheduler").rglob("*.py"):
        for node in ast.walk(parsed(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                found.add(node.module)
    own = {name for name in found if name.split(".")[0] in EVERYTHING - {"proto", "scheduler"}}
    assert own == {"runtime.tenancy.priority_classes"}
