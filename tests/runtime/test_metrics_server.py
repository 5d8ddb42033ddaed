"""The metrics port: what it answers, and that it is never in the way."""

import asyncio
import json
import random
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import pytest
import uvloop
from prometheus_client.parser import text_string_to_metric_families
from pydantic import TypeAdapter, ValidationError

from runtime.metrics import http as metrics_http
from runtime.metrics import server as metrics_server
from runtime.metrics.combined import CombinedPage
from runtime.metrics.http import CONNECTIONS_MAX
from runtime.metrics.registry import MetricsRegistry
from runtime.metrics.server import MetricsServer, PortTaken
from runtime.process import notify
from runtime.settings.addresses import MetricsAddress, advertised_metrics

ROOT = Path(__file__).parents[2]
BIG = 40_000_000  # bytes: more than the kernel's buffers hold


def served(test: Callable[[MetricsServer, str, int], Awaitable[None]]) -> None:
    async def scene() -> None:
        server = MetricsServer("127.0.0.1:0")
        await server.start()
        try:
            host, _, port = server.address.rpartition(":")
            async with asyncio.timeout(30):
                await test(server, host, int(port))
        finally:
            await server.close()

    uvloop.run(scene())


async def ask(host: str, port: int, request: bytes = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n") -> bytes:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(request)
        return await reader.read(-1)  # until it is closed from there
    finally:
        writer.close()


def test_foreign_host_header_is_refused() -> None:
    """DNS rebinding. A port that other hosts reach is asked for by any name."""

    async def test(server: MetricsServer, host: str, port: int) -> None:
        async def status(named: str) -> bytes:
            return (await ask(host, port, f"GET /health HTTP/1.1\r\n{named}\r\n".encode())).split()[1]

        for own in ("Host: localhost:9400", "Host: 127.0.0.1", "Host: [::1]:9400", "Host: LOCALHOST."):
            assert await status(f"{own}\r\n") == b"200", own
        for other in ("Host: evil.example", "Host: localhost\r\nHost: evil.example", "Host: a b", "Host:"):
            assert await status(f"{other}\r\n") == b"403", other
        assert await status("") == b"200"
        server._loopback_only = False
        assert await status("Host: coordinator.crossdock.svc:9400\r\n") == b"200"

    served(test)


def test_roles_on_one_page_are_distinguished() -> None:
    """Metrics of two roles on one page are told apart, and the page is ready when both roles are."""

    async def test(server: MetricsServer, host: str, port: int) -> None:
        page, up = CombinedPage(server, 2), {"decode": False}
        async with httpx.AsyncClient(base_url=f"http://{host}:{port}", timeout=60) as client:
            for role in ("prefill", "decode"):
                assert (await client.get("/ready")).status_code == 503, "it is starting"
                registry = MetricsRegistry(role)
                registry.by("gauge", "crossdock_kv_blocks", "Blocks.", "state", lambda: {"free": 3.0})
                registry.histogram(f"crossdock_{role}_step_seconds", "Time.", (1.0,)).observe(0.5)
                registry.introduce(name=f"m-{role}")
                page.show(registry, lambda role=role: None if up.get(role, True) else f"{role} is not there")  # type: ignore[misc]
            assert "decode is not there" in (await client.get("/ready")).text
            up["decode"] = True
            assert (await client.get("/ready")).status_code == 200
            text = (await client.get("/metrics")).text
        families = {family.name: family for family in text_string_to_metric_families(text)}
        assert len(families) == text.count("# TYPE"), "a family is there twice"
        blocks = [(sample.labels["role"], sample.value) for sample in families["crossdock_kv_blocks"].samples]
        assert blocks == [("prefill", 3.0), ("decode", 3.0)]
        assert len(families["process_start_time_seconds"].samples) == 1
        assert {s.labels["name"] for s in families["crossdock_process_info"].samples} == {"m-prefill", "m-decode"}
        assert all(s.labels["role"] == "decode" for s in families["crossdock_decode_step_seconds"].samples)

    served(test)


def test_paths_answer_with_their_status() -> None:
    """The paths for health, readiness, metrics and targets answer with their status, others with 404."""

    async def test(server: MetricsServer, host: str, port: int) -> None:
        registry, not_ready = MetricsRegistry("gateway"), ["no worker"]
        async with httpx.AsyncClient(base_url=f"http://{host}:{port}", timeout=60) as client:
            assert (await client.get("/health")).status_code == 200
            assert (await client.get("/ready")).status_code == 503, "it is starting"
            assert (await client.get("/metrics")).status_code == 503
            server.show(registry, lambda: next(iter(not_ready), None), {"/targets": lambda: [1]})
            assert "no worker" in (await client.get("/ready")).text
            not_ready.clear()
            assert (await client.get("/ready")).status_code == 200
            assert (await client.get("/targets")).json() == [1]
            assert (await client.get("/v1/models")).status_code == 404
            assert (await client.post("/metrics", content=b"x")).status_code == 405
            answer = await client.get("/metrics")
            assert answer.status_code == 200 and answer.headers["connection"] == "close"
            assert answer.headers["content-type"].startswith("text/plain")
            assert "process_resident_memory_bytes" in answer.text

    served(test)


def test_live_fails_with_the_watchdog(monkeypatch: pytest.MonkeyPatch) -> None:
    """The path /live fails if one of the watchdog's checks does, and /health does not."""
    progress = [True, True]
    monkeypatch.setattr(notify, "_checks", [lambda: progress[0], lambda: progress[1]])

    async def test(_: MetricsServer, host: str, port: int) -> None:
        async with httpx.AsyncClient(base_url=f"http://{host}:{port}", timeout=60) as client:
            assert (await client.get("/live")).status_code == 200, "a process that starts is not ended for it"
            progress[1] = False
            assert (await client.get("/live")).status_code == 503
            assert (await client.get("/health")).status_code == 200

    served(test)


def test_slow_connections_are_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow and idle connections are cut off while others are served."""
    monkeypatch.setattr(metrics_http, "EXCHANGE_S", 1.0)

    async def test(server: MetricsServer, host: str, port: int) -> None:
        registry = MetricsRegistry("gateway")
        registry.counter("crossdock_x", "x" * BIG)
        monkeypatch.setattr(metrics_server, "FRESH_S", 1e9)
        server.show(registry, lambda: None)
        server.page()
        idle = [await asyncio.open_connection(host, port) for _ in range(3)]
        for _, writer in idle[:2]:
            writer.write(b"GET /metrics HTTP/1.1\r\nX: ")  # a head that never ends
        slow_reader, slow_writer = await asyncio.open_connection(host, port, limit=1024)
        slow_writer.write(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"200 OK" in await ask(host, port, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"), "beside them"
        for reader, _ in idle:
            assert await _all(reader) == b""
        await asyncio.sleep(1.0)
        assert len(await _all(slow_reader)) < BIG, "who does not read is not waited for"
        for _, writer in (*idle, (slow_reader, slow_writer)):
            writer.close()

    served(test)


async def _all(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.read(-1)
    except ConnectionError:
        return b""


def test_excess_connection_replaces_oldest() -> None:
    """So strangers who hold all of them cannot keep a scraper out."""

    async def test(server: MetricsServer, host: str, port: int) -> None:
        server.show(MetricsRegistry("gateway"), lambda: None)
        held = [await asyncio.open_connection(host, port) for _ in range(CONNECTIONS_MAX)]
        assert b"200 OK" in await ask(host, port)
        assert await _all(held[0][0]) == b"", "the oldest was given up"
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await held[1][0].read(1)
        for _, one in held:
            one.close()

    served(test)


def test_reader_flood_costs_few_pages() -> None:
    """Readers that come at the same time share a page."""

    async def test(server: MetricsServer, host: str, port: int) -> None:
        registry, made = MetricsRegistry("gateway"), []
        registry.before.append(lambda: made.append(1))
        server.show(registry, lambda: None)
        for _ in range(5):
            await asyncio.gather(*(ask(host, port) for _ in range(10)))
        assert 1 <= len(made) <= 10

    served(test)


def test_garbage_disturbs_no_other_reader() -> None:
    """Garbage is answered or cut off, and other readers are served."""
    generator = random.Random(7)
    odd = [
        b"",
        b"\0",
        b"GET",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /metrics HTTP/1.1\r\nContent-Length: 999999999999\r\n\r\nx",
    ]
    odd += [
        b"GET /metrics HTTP/1.1\r\nX: " + b"a" * 20_000 + b"\r\n\r\n",
        b"GET " + b"/" * 20_000 + b" HTTP/1.1\r\n\r\n",
    ]
    odd += [b"GET /metrics HTTP/1.1\r\nUpgrade: websocket\r\nConnection: upgrade\r\nExpect: 100-continue\r\n\r\n"]
    odd += [generator.randbytes(generator.randrange(300)) for _ in range(100)]

    async def test(server: MetricsServer, host: str, port: int) -> None:
        server.show(MetricsRegistry("gateway"), lambda: None)
        loose: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: loose.append(context))
        for bytes_ in odd:
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(bytes_ + b"\r\n\r\n")
            if generator.random() < 0.5:
                await asyncio.sleep(0)
                writer.transport.abort()
                continue
            writer.write_eof()
            assert b"200 OK" not in await _all(reader) or b"/metrics" in bytes_
            writer.close()
        assert b"200 OK" in await ask(host, port)
        assert not loose, "in a process of ours that would be its end"

    served(test)


def test_connection_serves_one_bounded_request() -> None:
    """A connection gets one answer, and a request that is too large is refused before it is complete."""
    get = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"

    async def test(_: MetricsServer, host: str, port: int) -> None:
        assert (await ask(host, port, get * 50)).count(b"HTTP/1.1 200") == 1
        assert (await ask(host, port, get + b"\0")).startswith(b"HTTP/1.1 200")
        large = await ask(host, port, b"GET /health HTTP/1.1\r\nX: " + b"a" * 20_000)
        assert large.startswith(b"HTTP/1.1 400"), "before it is all there"

    served(test)


def test_metrics_address_is_checked() -> None:
    """Addresses for metrics default to loopback, wrong ones are refused, and a reachable one is advertised."""
    check = TypeAdapter(MetricsAddress).validate_python
    assert check("9400") == "127.0.0.1:9400", "beyond loopback only where that is written out"
    assert check("0.0.0.0:9400") == "0.0.0.0:9400" and check("[::1]:0") == "[::1]:0" and check("off") == "off"
    for wrong in ("", "on", "*:9400", "127.0.0.1", "127.0.0.1:99999", "70000", "tcp://127.0.0.1:1", "h:1/x"):
        with pytest.raises(ValidationError):
            check(wrong)
    assert advertised_metrics("127.0.0.1", 7, "tcp://10.0.0.5:9", "here") == "127.0.0.1:7"
    assert advertised_metrics("0.0.0.0", 7, "tcp://10.0.0.5:9", "here") == "10.0.0.5:7"
    assert advertised_metrics("::", 7, "10.0.0.5", "here") == "10.0.0.5:7"
    assert advertised_metrics("::", 7, "", "here") == "here:7"
    assert advertised_metrics("::1", 7, "", "here") == "[::1]:7"


def test_taken_metrics_port_is_named() -> None:
    """The metrics server does not listen if it is off, and names a port that is taken."""

    async def scene() -> None:
        server = MetricsServer("off")
        await server.start()
        assert server.address == ""
        await server.close()
        first = MetricsServer("127.0.0.1:0")
        await first.start()
        with pytest.raises(PortTaken, match=r"--metrics: cannot listen on 127\.0\.0\.1"):
            await MetricsServer(first.address).start()
        await first.close()

    asyncio.run(scene())


def test_targets_are_json() -> None:
    """The path /targets answers with JSON."""

    async def test(server: MetricsServer, host: str, port: int) -> None:
        server.show(
            MetricsRegistry("coordinator"), lambda: None, {"/targets": lambda: [{"targets": ["h:1"], "labels": {}}]}
        )
        head, _, body = (await ask(host, port, b"GET /targets HTTP/1.1\r\nHost: localhost\r\n\r\n")).partition(
            b"\r\n\r\n"
        )
        assert b"application/json" in head and json.loads(body)[0]["targets"] == ["h:1"]

    served(test)


def test_early_connection_waits_for_server() -> None:
    """A connection made before the server serves waits and is answered then."""

    async def scene() -> None:
        server = MetricsServer("127.0.0.1:0")
        await server.listen()
        host, _, port = server.address.rpartition(":")
        asking = asyncio.create_task(ask(host, int(port), b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"))
        await asyncio.sleep(0.05)
        assert not asking.done()
        await server.serve()
        async with asyncio.timeout(30):
            assert (await asking).startswith(b"HTTP/1.1 200")
        await server.close()
        unserved = MetricsServer("127.0.0.1:0")
        await unserved.listen()
        await unserved.close()

    uvloop.run(scene())


def test_coordinator_imports_no_http_library() -> None:
    """Peers are not to wait for the import of the HTTP library."""
    found = "import sys, coordinator.serve; sys.exit('uvicorn' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", found], cwd=ROOT, timeout=120, check=False).returncode == 0
