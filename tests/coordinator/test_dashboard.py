"""The dashboard: what its snapshot has, how its stream is bounded, and who may give orders."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import uvloop
from setuptools.dist import Distribution  # type: ignore[import-untyped]

from coordinator.accounting.billing import Closed
from coordinator.dashboard import site
from coordinator.dashboard.site import AdminKey, DashboardSite
from coordinator.dashboard.snapshot import EVENTS_KEPT, TENANTS_SHOWN, WORKERS_SHOWN, RecentEvents, snapshot
from coordinator.events import PeerUp, StateChanged
from coordinator.main import Coordinator
from coordinator.reporting.recent import RecentTimes
from proto.drain import DrainRequest
from proto.messages import Message, Role
from proto.policy import PolicyAction, PolicyRequest
from runtime.metrics import http as metrics_http
from runtime.metrics.registry import MetricsRegistry
from runtime.metrics.server import MetricsServer
from runtime.process import log
from runtime.process.exits import ConfigError
from runtime.settings.roles import CoordinatorSettings
from scheduler.lifecycle import RequestState
from scheduler.waiting.rates import Rate
from tests.coordinator.world import MODEL, Harness, gateway_hello, submit, worker_hello
from tests.helpers import until
from tests.test_tidy import ROOT

KEY = "correct-horse-battery"
PAGE = "coordinator.dashboard"
AUTHORIZED = {"authorization": f"Bearer {KEY}"}


def shown(harness: Harness, recent: RecentTimes | None = None, events: RecentEvents | None = None) -> dict[str, Any]:
    """The snapshot as it reaches a page."""
    made = snapshot(harness.core.state, recent or RecentTimes(), (events or RecentEvents()).events, harness.now)
    return dict(msgspec.json.decode(msgspec.json.encode(made)))


# --- the snapshot -----------------------------------------------------------------------------------------------------


def test_snapshot_shows_workers_and_queues() -> None:
    """A snapshot shows workers with their load and health, and the requests that wait."""
    harness = Harness.make(kv_blocks=8)
    for name in ("one", "two", "three"):
        harness.receive(1, submit(name, tokens=20))
    harness.post(PeerUp(30, msgspec.structs.replace(gateway_hello(30), role=Role.OBSERVER, address="")))
    harness.receive(30, DrainRequest("decode-20", False, 5000.0))
    harness.now += 7.0
    found = shown(harness)
    prefill, decode = found["pools"]
    assert (prefill["role"], decode["role"]) == ("prefill", "decode") and prefill["kv_used"] == 5
    assert [(one["name"], one["health"]) for one in decode["shown"]] == [("decode-20", "draining")]
    assert (found["queued"], found["running"], found["gateways"]) == (2, 1, 1)
    assert [one["id"] for one in found["waiting"]] == ["two", "three"] and found["waiting"][0]["waited_s"] == 7.0
    [tenant] = found["tenants"]
    assert tenant["tenant"] == "default" and tenant["waiting"] == 2 and tenant["share"] == 1.0
    assert found["class_sums"][tenant["class"]] == [1.0, 2]
    assert found["models"][0]["waiting_tokens"] == 40


def test_snapshot_of_large_cluster_is_small() -> None:
    """A snapshot of 512 workers, 10,000 tenants and many events has as many rows as a page can show."""
    harness = Harness()
    harness.core.handle(PeerUp(1, gateway_hello(1)), 0.0)
    for index in range(256):
        harness.core.handle(PeerUp(1000 + index, worker_hello(Role.PREFILL, 1000 + index)), 0.0)
        harness.core.handle(PeerUp(2000 + index, worker_hello(Role.DECODE, 2000 + index)), 0.0)
    queue = harness.core.cluster.queues[MODEL]
    for index in range(10_000):
        served = queue.served[("standard", f"tenant-{index}", "")] = Rate(0.0)
        served.add(10.0 + index, 0.0)
    events = RecentEvents()
    for index in range(1000):
        events.on_state_changed(StateChanged(f"r{index}", 1, RequestState.FAILED, f"why {index}"), 0.0)
    found = shown(harness, events=events)
    assert [len(pool["shown"]) for pool in found["pools"]] == [WORKERS_SHOWN, WORKERS_SHOWN]
    assert [pool["workers"] for pool in found["pools"]] == [256, 256]
    assert len(found["tenants"]) == TENANTS_SHOWN and found["tenants_active"] == 10_000
    assert found["tenants"][0]["tenant"] == "tenant-9999" and found["class_sums"]["standard"][0] == pytest.approx(1.0)
    assert len(found["events"]) == EVENTS_KEPT and len(json.dumps(found)) < 64 << 10


def test_alike_events_are_counted_once() -> None:
    """Requests that end for the same reason are one event with a count, and those that run through are none."""
    events = RecentEvents()
    for index in range(500):
        events.on_state_changed(
            StateChanged(f"r{index}", 1, RequestState.INTERRUPTED, "decode-0 was lost"), float(index)
        )
    events.on_state_changed(StateChanged("fine", 1, RequestState.FINISHED, ""), 600.0)
    [one] = events.events
    assert (one.kind, one.last, one.times, one.last_at) == ("request interrupted", "r499", 500, 499.0)


def test_snapshot_shows_ended_requests() -> None:
    """Requests that have ended are shown latest first, and times are of those that finished lately."""
    harness, recent = Harness.make(), RecentTimes()
    for index, (outcome, at) in enumerate((("finished", 0.0), ("finished", 90.0), ("failed", 95.0))):
        closed = Closed(f"r{index}", outcome, 1, 1, 0, 11, 10.0 * index, 5.0, 20.0, 80.0)
        recent.add(closed, ("acme/ann", MODEL, "standard"), at)
    harness.now = 100.0
    found = shown(harness, recent)
    assert [(one["request_id"], one["age_s"]) for one in found["requests"]] == [
        ("r2", 5.0),
        ("r1", 10.0),
        ("r0", 100.0),
    ]
    assert found["requests"][0]["tenant"] == "acme/ann" and found["requests"][0]["priority_class"] == "standard"
    assert (
        found["times"]["requests"] == 1
        and found["times"]["ttft_p50_ms"] == 15.0
        and found["times"]["tpot_p99_ms"] == 10.0
    )


def test_wheel_has_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wheel has every file that the site serves, and the licence of the charts."""
    monkeypatch.chdir(ROOT)
    distribution = Distribution()
    distribution.parse_config_files()
    build = distribution.get_command_obj("build_py")
    build.ensure_finalized()
    build.manifest_files = {}  # of sdist, which would be written here
    folder = Path("coordinator/dashboard")
    found = {Path(name).relative_to(folder / "static").as_posix() for name in build.find_data_files(PAGE, str(folder))}
    assert {name for name, _ in site.FILES.values()} | {"uplot.LICENSE"} == found and PAGE in build.packages


# --- the site ---------------------------------------------------------------------------------------------------------

Test = Callable[["Served"], Awaitable[None]]


class Served:
    """The dashboard on a metrics port, with a count of the snapshots made, and the orders that came."""

    def __init__(self, address: str, key: AdminKey) -> None:
        host, _, port = address.rpartition(":")
        self.address = host, int(port)
        self.client = httpx.AsyncClient(base_url=f"http://{address}", timeout=30)
        self.app = DashboardSite(self.snapshot, self.carry_out, key, ())
        self.made = 0
        self.text = ""  # of each snapshot
        self.orders: list[Message] = []
        self.refusal = ""

    def snapshot(self) -> dict[str, Any]:
        self.made += 1
        return {"made": self.made, "text": self.text}

    async def carry_out(self, order: Message) -> str:
        self.orders.append(order)
        return self.refusal


async def numbers(stream: httpx.Response) -> AsyncIterator[int]:
    """The number of each snapshot that a viewer gets."""
    async for line in stream.aiter_lines():
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))["made"]


def served(test: Test, key_file: Path | None = None) -> None:
    async def scene() -> None:
        server = MetricsServer("127.0.0.1:0")
        await server.start()
        up = Served(server.address, AdminKey(str(key_file) if key_file else ""))
        server.show(MetricsRegistry("coordinator"), lambda: None, None, (site.PATH, up.app))
        try:
            async with asyncio.timeout(60):
                await test(up)
        finally:
            await up.client.aclose()
            await server.close()

    uvloop.run(scene())


def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "admin.key"
    path.write_text(KEY + "\n")
    return path


def test_pages_allow_no_foreign_content() -> None:
    """Every answer forbids scripts, frames and content of other origins, and the page has no script in its text."""

    async def test(up: Served) -> None:
        for path in ("", *filter(None, site.FILES), "/nothing"):
            answer = await up.client.get(f"/dashboard{path}")
            policy = dict(one.strip().split(" ", 1) for one in answer.headers["content-security-policy"].split(";"))
            assert answer.status_code == (404 if path == "/nothing" else 200)
            assert policy["default-src"] == policy["frame-ancestors"] == "'none'"
            assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
            assert answer.headers["x-content-type-options"] == "nosniff"
        page = (await up.client.get("/dashboard")).text
        assert "://" not in page and "<script>" not in page and " style=" not in page
        script = (await up.client.get("/dashboard/page.js")).text
        assert not [
            word for word in ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval(") if word in script
        ]
        assert (await up.client.get("/dashboardx")).status_code == 404
        assert (await up.client.put("/dashboard")).status_code == 405

    served(test)


def test_viewers_share_each_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    """One snapshot is made for all viewers, and none without a viewer."""
    monkeypatch.setattr(site, "EVERY_S", 0.2)

    async def test(up: Served) -> None:
        await asyncio.sleep(0.3)
        assert up.made == 0
        async with (
            up.client.stream("GET", "/dashboard/events") as one,
            up.client.stream("GET", "/dashboard/events") as two,
        ):
            assert one.headers["content-type"] == "text/event-stream"
            seen = await asyncio.gather(*(_first(6, numbers(stream)) for stream in (one, two)))
        assert len(set(seen[0]) & set(seen[1])) >= 2, seen
        await until(lambda: not up.app._viewers)
        made = up.made
        await asyncio.sleep(0.5)
        assert up.made == made, "the viewers have left"

    served(test)


async def _first(most: int, found: AsyncIterator[int]) -> list[int]:
    return [await anext(found) for _ in range(most)]


def test_viewers_are_bounded() -> None:
    """One viewer too many is turned away, and gets in when another has left."""

    async def test(up: Served) -> None:
        streams = [up.client.stream("GET", "/dashboard/events") for _ in range(site.VIEWERS_MAX)]
        viewers = [numbers(await one.__aenter__()) for one in streams]
        assert all([await anext(viewer) for viewer in viewers])
        refused = await up.client.get("/dashboard/events")
        assert refused.status_code == 503 and str(site.VIEWERS_MAX) in refused.text
        assert (await up.client.get("/dashboard")).status_code == 200
        for one in streams:
            await one.__aexit__(None, None, None)
        await until(lambda: not up.app._viewers)
        async with up.client.stream("GET", "/dashboard/events") as again:
            assert again.status_code == 200

    served(test)


def test_stalled_viewer_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """A viewer that does not read loses its connection, while one that reads keeps it beyond the usual time."""
    monkeypatch.setattr(site, "EVERY_S", 0.02)
    monkeypatch.setattr(site, "REST_FACTOR", 0.0)
    monkeypatch.setattr(metrics_http, "EXCHANGE_S", 1.0)

    async def test(up: Served) -> None:
        up.text = "x" * 1_000_000
        _, stalled = await asyncio.open_connection(*up.address, limit=1024)
        stalled.write(b"GET /dashboard/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await until(lambda: up.app._viewers == 1)
        async with up.client.stream("GET", "/dashboard/events") as reading:
            began, chunks = asyncio.get_running_loop().time(), reading.aiter_raw()
            while up.app._viewers > 1 or asyncio.get_running_loop().time() < began + 2.0:
                await anext(chunks)
            assert up.app._viewers == 1
        stalled.close()

    served(test)


def test_orders_need_the_admin_key(tmp_path: Path) -> None:
    """Orders without the key, or with another, are refused before they are read, also where no key was set."""
    order = b'["DrainRequest", "decode-0", false, 1000]'

    async def closed(up: Served) -> None:
        for path in ("orders", "explain"):
            assert (await up.client.post(f"/dashboard/{path}", content=order, headers=AUTHORIZED)).status_code == 403
        assert not up.orders

    async def test(up: Served) -> None:
        for wrong in ({}, {"authorization": KEY}, {"authorization": f"Bearer {KEY}x"}, {"authorization": "Bearer"}):
            for path in ("orders", "explain"):
                assert (await up.client.post(f"/dashboard/{path}", content=b"{", headers=wrong)).status_code == 401
        assert (await up.client.get("/dashboard/orders", headers=AUTHORIZED)).status_code == 405
        assert not up.orders
        assert (await up.client.post("/dashboard/orders", content=order, headers=AUTHORIZED)).status_code == 200
        assert up.orders == [DrainRequest("decode-0", False, 1000.0)]
        (tmp_path / "admin.key").write_text("another-key-of-enough-characters")
        assert (await up.client.post("/dashboard/orders", content=order, headers=AUTHORIZED)).status_code == 401

    served(closed)
    served(test, key_file(tmp_path))


def test_orders_are_checked(tmp_path: Path) -> None:
    """Orders must be messages of an operator, a policy's tenants file loses its secrets, and refusals reach the page."""

    async def test(up: Served) -> None:
        async def post(order: object) -> httpx.Response:
            return await up.client.post("/dashboard/orders", content=json.dumps(order), headers=AUTHORIZED)

        for wrong in ({}, ["StatusRequest"], ["DrainRequest", 1, False, 0], ["PolicyRequest", "try", 0, "[x", 0.1]):
            assert (await post(wrong)).status_code == 400, wrong
        tenants = '[tenants.acme]\nweight = 2.0\nkeys = ["secret"]\n'
        assert (await post(["PolicyRequest", "try", 0, tenants, 0.25])).status_code == 200
        assert up.orders == [PolicyRequest(PolicyAction.TRY, 0, '{"tenants":{"acme":{"weight":2.0}}}', 0.25)]
        up.refusal = "no worker is called x"
        answer = await post(["FlipRequest", "x", "decode", 0])
        assert answer.status_code == 409 and answer.json() == {"error": up.refusal}
        answer = await up.client.post("/dashboard/explain", content=b"cmpl-1", headers=AUTHORIZED)
        assert answer.status_code == 404 and "--event-log" in answer.json()["error"]

    served(test, key_file(tmp_path))


def test_short_admin_key_is_refused(tmp_path: Path) -> None:
    """A coordinator does not start with an admin key that is missing or easily guessed."""
    (tmp_path / "short").write_text("hunter2")
    for name in ("short", "missing"):
        with pytest.raises(ConfigError, match="--admin-key-file"):
            AdminKey(str(tmp_path / name))


def test_coordinator_carries_out_orders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A coordinator takes the dashboard's orders as those of an operator's tool, and shows its own state."""
    monkeypatch.setattr(log, "configure", lambda **_how: log.get("crossdock"))  # that of this process stays as it is

    async def scene() -> None:
        settings = CoordinatorSettings(
            bind="tcp://127.0.0.1:0", heartbeat_ms=60_000, admin_key_file=str(key_file(tmp_path))
        )
        coordinator, stop = Coordinator(settings), asyncio.Event()
        running = asyncio.create_task(coordinator.run(stop))
        await until(lambda: coordinator.observed._serving is not None)
        async with httpx.AsyncClient(base_url=f"http://{coordinator.observed.address}", timeout=30) as client:
            order = ["DrainRequest", "decode-9", False, 0]
            answer = await client.post("/dashboard/orders", json=order, headers=AUTHORIZED)
            assert answer.status_code == 409 and "decode-9" in answer.json()["error"]
            answer = await client.post("/dashboard/orders", json=["PolicyRequest", "promote"], headers=AUTHORIZED)
            assert answer.status_code == 409 and "trial" in answer.json()["error"]
            async with client.stream("GET", "/dashboard/events") as stream:
                line = await anext(stream.aiter_lines())
            found = json.loads(line.removeprefix("data: "))
            assert found["can_act"] and not found["can_explain"] and found["pools"] == []
        assert not coordinator.peers and not coordinator.core.members.peers
        stop.set()
        assert await running == 0

    uvloop.run(scene())
