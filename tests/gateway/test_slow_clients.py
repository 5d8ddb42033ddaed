"""Clients that are slow on purpose, or say too much, over real sockets: they are cut off while others are served."""

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import Awaitable, Callable

import httpx
import pytest
import uvloop

from gateway.http import server as http_server
from tests.gateway.fakes import ANSWER, MODEL, Site, make_site, served
from tests.helpers import until

TIMEOUT_S = 0.4
Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def body_of(**fields: object) -> bytes:
    return json.dumps({"model": MODEL, "prompt": "a", "max_tokens": 99, **fields}).encode()


async def is_served(client: httpx.AsyncClient) -> None:
    answer = await client.post("/v1/completions", content=body_of(), headers={"Content-Type": "application/json"})
    assert answer.json()["choices"][0]["text"] == ANSWER


def head(length: int, *more: str) -> bytes:
    lines = ["POST /v1/completions HTTP/1.1", "Host: x", "Content-Type: application/json", f"Content-Length: {length}"]
    return "\r\n".join([*lines, *more, "", ""]).encode()


def on_port(test: Callable[[Site, str, int], Awaitable[None]], client_timeout_s: float = TIMEOUT_S) -> None:
    async def body() -> None:
        site = make_site(client_timeout_s=client_timeout_s)
        async with served(site) as url:
            await test(site, url, int(url.rsplit(":", 1)[1]))
            await until(lambda: site.gateway.intake.idle)

    uvloop.run(body())  # as the process does


async def drip(writer: asyncio.StreamWriter, data: bytes) -> None:
    """A byte at a time, until the other end has had enough."""
    try:
        for at in range(len(data)):
            writer.write(data[at : at + 1])
            await writer.drain()
            await asyncio.sleep(0.02)
    except OSError:
        pass


async def headers_drip(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await drip(writer, head(10, "X-Slow: " + "y" * 1_000))


async def line_ends_drip(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await drip(writer, b"\r\n" * 500)


def read_to_the_end(connection: socket.socket) -> None:
    """Raises `TimeoutError` where there is none. A kernel that gave up on a closed window says so only when it is spoken to, so
    a byte is sent where nothing comes."""
    connection.settimeout(5)
    with contextlib.suppress(ConnectionError):  # or a goodbye
        for _ in range(12):
            try:
                while connection.recv(1 << 20):
                    pass
                return
            except TimeoutError:
                connection.sendall(b" ")
        raise TimeoutError("the connection does not end")


async def nothing(_reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
    return


async def body_drips(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(head(1_000))
    await drip(writer, body_of(stop="y" * 900))


async def unwanted_body_drips(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """It is answered at once, and goes on sending what nobody reads."""
    writer.write(head(1_000).replace(b"/v1/completions", b"/v1/nothing"))
    await drip(writer, b"z" * 1_000)


async def second_headers_drip(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    await asyncio.sleep(0.1)
    await drip(writer, head(10, "X-Slow: " + "y" * 1_000))


@pytest.mark.parametrize(
    "talk", [nothing, headers_drip, line_ends_drip, body_drips, unwanted_body_drips, second_headers_drip]
)
def test_slow_senders_are_cut_off(talk: Talk) -> None:
    """Clients that send too slowly are cut off while others are served."""

    async def test(_site: Site, url: str, port: int) -> None:
        async def slow() -> None:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            talking = asyncio.ensure_future(talk(reader, writer))
            try:
                while await asyncio.wait_for(reader.read(65_536), 60):
                    pass
            except ConnectionError:
                pass
            finally:
                talking.cancel()
                writer.close()

        crowd = [asyncio.create_task(slow()) for _ in range(50)]
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            for _ in range(5):
                await is_served(client)
                await asyncio.sleep(TIMEOUT_S / 8)
        await asyncio.gather(*crowd)

    on_port(test)


@pytest.mark.parametrize("stream", [True, False])
def test_unread_answer_cancels_its_request(stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that does not read its answer is cut off, and its request is cancelled."""
    lost: list[int] = []
    connection_lost = http_server._Connection.connection_lost

    def note(self: http_server._Connection, error: Exception | None) -> None:
        lost.append(self.client[1])  # type: ignore[index]
        connection_lost(self, error)

    monkeypatch.setattr(http_server._Connection, "connection_lost", note)

    async def test(site: Site, url: str, port: int) -> None:
        long = list(b"abcdefgh" * 50)
        plain = site.cluster.answer
        site.cluster.answer = lambda submit, choice: long if submit.choices > 1 else plain(submit, choice)
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            await is_served(client)
        ours = socket.create_connection(("127.0.0.1", port))
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        content = body_of(stream=stream, max_tokens=400, logprobs=5, n=16)
        site.cluster.gap_s = 0.01 if stream else 0.0
        ours.sendall((head(len(content)) + content) * (1 if stream else 8))
        await until(lambda: len(site.cluster.submits) > 1)
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            await is_served(client)
        await until(lambda: bool(site.cluster.cancels) or not stream)
        await until(lambda: not site.gateway.backend.keeper.streams)
        assert len(site.cluster.submits) < 9, "it went on to the last of them"
        await until(lambda: ours.getsockname()[1] in lost)
        await asyncio.to_thread(read_to_the_end, ours)
        ours.close()

    on_port(test)


@pytest.mark.parametrize(
    ("request_head", "status"),
    [
        (b"GET / HTTP/1.1\r\nX: " + b"y" * http_server.HEADER_BYTES_MAX, 431),
        (b"GET /?" + b"a&" * http_server.QUERY_BYTES_MAX + b" HTTP/1.1\r\nHost: x\r\n\r\n", 414),
        (b"GET /" + b"y" * http_server.HEADER_BYTES_MAX, 431),
        (b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * (http_server.HEADERS_MAX + 1) + b"\r\n", 431),
        (b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"X: y\r\n" * (http_server.HEADERS_MAX - 2) + b"\r\n", 200),
        (b"GET /\xff\xfe HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n", 200),
    ],
)
def test_oversized_or_invalid_head_is_refused(request_head: bytes, status: int) -> None:
    """Too large headers and malformed HTTP are refused, and other clients are served."""

    async def test(_site: Site, url: str, port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request_head)
        line = await asyncio.wait_for(reader.readline(), 60)
        assert line.split()[1] == str(status).encode(), line
        writer.close()
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            assert (await client.get("/health")).status_code == 200

    on_port(test, client_timeout_s=300.0)


def test_hostile_cookies_cost_nothing() -> None:
    """Cookies that Python's own parser takes seconds for are not parsed on any route."""
    cookie = b'Cookie: a="' + b"\\1" * 30_000 + b'"'

    async def test(_site: Site, _url: str, port: int) -> None:
        for path in (b"/health", b"/v1/models"):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            began = time.thread_time()
            writer.write(b"GET " + path + b" HTTP/1.1\r\nHost: 127.0.0.1\r\n" + cookie + b"\r\n\r\n")
            line = await asyncio.wait_for(reader.readline(), 60)
            assert line.split()[1] == b"200" and time.thread_time() - began < 1, "10 s if it is parsed"
            writer.close()

    on_port(test, client_timeout_s=300.0)


def test_line_end_after_body_is_harmless() -> None:
    """Some old clients send one."""

    async def test(site: Site, _url: str, port: int) -> None:
        site.cluster.gap_s = 6 * TIMEOUT_S / (len(ANSWER.encode()) / 2)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        content = body_of(stream=True)
        writer.write(head(len(content)) + content)
        await reader.readuntil(b"data: ")
        writer.write(b"\r\n")
        assert await asyncio.wait_for(reader.readuntil(b"[DONE]"), 60)
        writer.close()

    on_port(test)


def test_pipelined_requests_answer_in_order() -> None:
    """Requests sent at once on one connection are answered in their order."""

    async def test(site: Site, _: str, port: int) -> None:
        site.cluster.gap_s = 0.02
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        body = body_of()
        health = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
        last = b"GET /ready HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        writer.write(head(len(body)) + body + health * 8 + last)
        said = await asyncio.wait_for(reader.read(), 30)
        places = [said.index(part) for part in (b'"text":"The capital', b'"status":"ok"', b'"status":"ready"')]
        assert places == sorted(places)
        assert said.count(b'"status":"ok"') == 8
        writer.close()

    on_port(test, client_timeout_s=300.0)


def test_too_many_pipelined_requests_disconnect() -> None:
    """Too many requests at once end the connection and cancel the running request."""

    async def test(site: Site, url: str, port: int) -> None:
        site.cluster.hold = True
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        body = body_of()
        writer.write(head(len(body)) + body)
        await until(lambda: bool(site.cluster.submits))
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" * (http_server.QUEUED_MAX + 1))
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(), 60) == b""
        await until(lambda: len(site.cluster.cancels) == 1)
        writer.close()
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            assert (await client.get("/health")).status_code == 200

    on_port(test, client_timeout_s=300.0)


def test_waiting_long_request_is_harmless() -> None:
    """Of its body no more is read than fits: that it comes no further is not the client's fault."""

    async def test(site: Site, _url: str, port: int) -> None:
        site.cluster.gap_s = 6 * TIMEOUT_S / (len(ANSWER.encode()) / 2)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        first, second = body_of(stream=True), body_of(user="y" * 6_000_000)
        writer.write(head(len(first)) + first)
        await reader.readuntil(b"data: ")
        writer.write(head(len(second)) + second)
        assert await asyncio.wait_for(reader.readuntil(b"[DONE]"), 60)
        assert await asyncio.wait_for(reader.readuntil(b"HTTP/1.1 "), 60)
        writer.close()

    on_port(test)


def test_connections_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new connection is closed if all allowed ones have begun a request."""
    monkeypatch.setattr(http_server, "CONNECTIONS_MAX", 20)

    async def test(_site: Site, _url: str, port: int) -> None:
        crowd = []
        for _ in range(20):
            crowd.append(await asyncio.open_connection("127.0.0.1", port))
            crowd[-1][1].write(head(1_000))  # each has begun a request
        await asyncio.sleep(0.05)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            async with asyncio.timeout(60):
                await reader.readexactly(1)
        for _, one in [*crowd, (reader, writer)]:
            one.close()

    on_port(test, client_timeout_s=300.0)


def test_idle_connections_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever opens all of them and says nothing must not keep clients out."""
    monkeypatch.setattr(http_server, "CONNECTIONS_MAX", 20)

    async def test(_site: Site, url: str, port: int) -> None:
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            await is_served(client)  # its connection stays open, the oldest without a request
            crowd = [await asyncio.open_connection("127.0.0.1", port) for _ in range(60)]
            crowd[-1][1].write(b"POST /v1/completions HTTP/1.1\r\n")
            for _ in range(3):
                async with httpx.AsyncClient(base_url=url, timeout=60) as other:
                    await is_served(other)
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                async with asyncio.timeout(60):
                    await crowd[0][0].readexactly(1)
            for _, one in crowd:
                one.close()

    on_port(test, client_timeout_s=300.0)
