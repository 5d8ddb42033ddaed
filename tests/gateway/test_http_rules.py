"""HTTP as RFC 9110 and 9112 have it: methods, targets, HTTP/1.0, clients that send no more, offers of other protocols."""

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable

import pytest
import uvloop

from gateway.app import ROUTES
from proto.errors import CancelReason
from runtime.metrics.server import Reply
from tests.gateway.fakes import ANSWER, MODEL, Site, make_site, served
from tests.helpers import until

CHAT = "/v1/chat/completions"
GETS = sorted(
    route.path.replace("{model_id:path}", MODEL)
    for route in ROUTES
    if "GET" in (route.methods or ()) and "response_id" not in route.path
)


def on_port(test: Callable[[Site, int], Awaitable[None]]) -> None:
    async def body() -> None:
        site = make_site(client_timeout_s=20.0)
        async with served(site) as url:
            await test(site, int(url.rsplit(":", 1)[1]))
            await until(lambda: site.gateway.intake.idle)

    uvloop.run(body())  # as the process does


def post(*headers: str, version: str = "1.1", stream: bool = False) -> bytes:
    body = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "stream": stream})
    lines = [f"POST {CHAT} HTTP/{version}", "Host: x", "Content-Type: application/json", f"Content-Length: {len(body)}"]
    return "\r\n".join([*lines, *headers, "", body]).encode()


async def said(port: int, request: bytes, *, ends: bool = False) -> tuple[bytes, bytes]:
    """(head, body) of all that comes until the server ends the connection. `ends`: no more is sent, and that is said."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    if ends:
        writer.write_eof()
    head, _, body = (await asyncio.wait_for(reader.read(), 20)).partition(b"\r\n\r\n")
    writer.close()
    return head.lower(), body


def get(target: str, *headers: str, method: str = "GET", version: str = "1.1") -> bytes:
    lines = [f"{method} {target} HTTP/{version}", *(headers or ("Host: x",)), "Connection: close", "", ""]
    return "\r\n".join(lines).encode()


def test_get_routes_answer_head_without_body() -> None:
    """Every GET route answers HEAD with the same status and length, and no body."""

    async def test(site: Site, port: int) -> None:
        site.gateway.metrics_page = lambda: Reply(200, b"up 1\n", "text/plain")
        assert len(GETS) >= 5
        for path in [*GETS, "/openapi.json"]:
            whole, body = await said(port, get(path))
            head, nothing = await said(port, get(path, method="HEAD"))
            without_store = path.startswith(("/v1/files", "/v1/batches"))
            status = b"404 not found" if without_store else b"200 ok"
            assert (head.split(b"\r\n")[0], nothing) == (b"http/1.1 " + status, b""), path
            length = b"content-length: %d" % len(body)
            assert length in head and length in whole, path
        assert (await said(port, get("/v1/models/none", method="HEAD")))[0].startswith(b"http/1.1 404")

    on_port(test)


@pytest.mark.parametrize(
    ("method", "path", "status", "allow"),
    [
        ("HEAD", CHAT, 405, b"OPTIONS, POST"),
        ("PUT", "/v1/responses/x", 405, b"DELETE, GET, HEAD, OPTIONS"),
        ("TRACE", "/health", 405, b"GET, HEAD, OPTIONS"),
        ("OPTIONS", CHAT, 204, b"OPTIONS, POST"),
        ("OPTIONS", "/v1/models", 204, b"GET, HEAD, OPTIONS"),
        ("OPTIONS", "/nothing", 404, b""),
    ],
)
def test_wrong_method_names_allowed_ones(method: str, path: str, status: int, allow: bytes) -> None:
    """Each method gets its status on each path, with an Allow header if it is refused."""

    async def test(_site: Site, port: int) -> None:
        head, _ = await said(port, get(path, method=method))
        assert head.startswith(b"http/1.1 %d " % status), head
        found = [line.partition(b": ")[2] for line in head.split(b"\r\n") if line.startswith(b"allow: ")]
        assert found == ([allow.lower()] if allow else [])

    on_port(test)


@pytest.mark.parametrize(
    ("request_head", "status"),
    [
        (get("http://other.example/health?a=b"), 200),
        (get("HTTP://other.example:80/health"), 200),
        (get("http://[::1/health"), 400),
        (get("other.example:80", method="CONNECT"), 400),
        (get("/health", "X: y"), 400),
        (get("/health", "Host: a", "Host: b"), 400),
        (get("/health", "X: y", version="1.0"), 200),
    ],
)
def test_request_target_and_host_are_checked(request_head: bytes, status: int) -> None:
    """A request is served or refused by its target and its Host header."""

    async def test(_site: Site, port: int) -> None:
        head, body = await said(port, request_head)
        assert head.startswith(b"http/1.1 %d " % status), head
        assert (
            body == b'{"status":"ok"}'
            if status == 200
            else json.loads(body)["error"]["code"] in ("invalid_http", "invalid_host")
        )

    on_port(test)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("how", ["closes", "resets", "sends no more"])
def test_disconnected_client_is_noticed(stream: bool, how: str) -> None:
    """The request of a client that closes or resets its connection, or only its sending side, is cancelled."""

    async def test(site: Site, port: int) -> None:
        site.cluster.hold = True
        client = socket.create_connection(("127.0.0.1", port))
        client.sendall(post(stream=stream))
        await until(lambda: bool(site.cluster.submits))
        if how == "resets":
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        client.shutdown(socket.SHUT_WR) if how == "sends no more" else client.close()
        await until(lambda: bool(site.cluster.cancels))
        assert site.cluster.cancels[0].reason is CancelReason.DISCONNECTED
        client.close()

    on_port(test)


def test_half_a_request_is_dropped() -> None:
    """The connection ends without an answer if its client stops sending within a request."""

    async def test(site: Site, port: int) -> None:
        assert await said(port, post()[:-4], ends=True) == (b"", b"")
        assert not site.cluster.submits

    on_port(test)


@pytest.mark.parametrize("cut", [1, 40, 10_000])
def test_protocol_upgrade_is_declined(cut: int) -> None:
    """Java's client offers HTTP/2 with its first request."""

    async def test(_site: Site, port: int) -> None:
        request = post("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMA")
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for at in range(0, len(request), cut):
            writer.write(request[at : at + cut])
            await asyncio.sleep(0)
        head, _, body = (await asyncio.wait_for(reader.read(), 20)).partition(b"\r\n\r\n")
        writer.close()
        assert head.startswith(b"HTTP/1.1 200") and b"connection: close" in head
        assert json.loads(body)["choices"][0]["message"]["content"] == ANSWER

    on_port(test)


def test_expect_100_continue_is_answered() -> None:
    """A client that expects 100 Continue gets it before it sends its body."""

    async def test(_site: Site, port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head, _, body = post("Expect: 100-continue", "Connection: close").partition(b"\r\n\r\n")
        writer.write(head + b"\r\n\r\n")
        assert await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20) == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(body)
        assert (await asyncio.wait_for(reader.read(), 20)).startswith(b"HTTP/1.1 200")
        writer.close()

    on_port(test)
