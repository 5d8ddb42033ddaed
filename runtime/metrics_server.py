"""The port on which one process is observed: `/metrics`, `/health`, `/ready`, and whatever else its role adds.

It must never be in the way: each connection is for one request and cut off after `EXCHANGE_S`, there are `CONNECTIONS_MAX` of
them at most, and the page is made at most every `FRESH_S` seconds, however often it is asked for.
"""

import asyncio
import socket
from collections.abc import Callable
from typing import Any, Final, cast

import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from proto.errors import CrossdockError
from runtime import clock, log, machine
from runtime.addresses import METRICS_OFF, advertised_metrics, split_metrics
from runtime.metrics import Page

CONNECTIONS_MAX: Final = 16
EXCHANGE_S: Final = 10.0
FRESH_S: Final = 0.25
_HEAD_BYTES_MAX: Final = 4096


class PortTaken(CrossdockError):
    """Somebody else listens there, perhaps this process's predecessor: another start may do better."""


class _Exchange(web.RequestHandler):
    """One connection. What is too many, or takes too long, is cut off without a word."""

    def __init__(self, server: web.Server, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(
            server,
            loop=loop,
            access_log=None,  # type: ignore[arg-type] # none is kept
            lingering_time=0.0,
            max_line_size=_HEAD_BYTES_MAX,
            max_field_size=_HEAD_BYTES_MAX,
        )
        self._server = server
        self._cut: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        transport = cast(asyncio.Transport, transport)  # uvloop's is none by name
        if len(self._server.connections) > CONNECTIONS_MAX:
            transport.abort()
            return
        self._cut = asyncio.get_running_loop().call_later(EXCHANGE_S, transport.abort)

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._cut is not None:
            self._cut.cancel()
        super().connection_lost(exc)


class MetricsServer:
    """`asked` is the option's value, `advertise` what others are told of this process, if anything."""

    def __init__(self, asked: str, advertise: str = "") -> None:
        self.address = ""
        """HOST:PORT for others, once it listens; empty where it does not."""
        self._asked, self._advertise = asked, advertise
        self._page: Page | None = None
        self._not_ready: Callable[[], str | None] = lambda: "it is starting"
        self._more: dict[str, Callable[[], Any]] = {}
        self._server: web.Server | None = None
        self._listener: asyncio.Server | None = None
        self._made: tuple[float, bytes] = (-FRESH_S, b"")

    async def start(self) -> None:
        """Raises `ConfigError` where it cannot listen, and `PortTaken` where it may do so later."""
        if self._asked == METRICS_OFF:
            return
        host, port = split_metrics(self._asked)
        loop = asyncio.get_running_loop()
        server = self._server = web.Server(self._answer)
        try:
            self._listener = await loop.create_server(
                lambda: _Exchange(server, loop), host, port, backlog=CONNECTIONS_MAX
            )
        except OSError as error:
            machine.check_listening(f"--metrics: cannot listen on {self._asked}", error)
            raise PortTaken(f"--metrics: cannot listen on {self._asked}: {error.strerror or error}") from None
        bound = self._listener.sockets[0].getsockname()
        self.address = advertised_metrics(bound[0], bound[1], self._advertise, socket.gethostname())
        log.get("crossdock.metrics").info("metrics", address=self.address)

    def show(
        self, page: Page, not_ready: Callable[[], str | None], more: dict[str, Callable[[], Any]] | None = None
    ) -> None:
        """From now on there is something to see. `not_ready`: why this process cannot serve now, or None; `more`: what is
        answered at other paths, as JSON."""
        self._page, self._not_ready, self._more = page, not_ready, more or {}

    async def close(self) -> None:
        if self._listener is not None and self._server is not None:
            self._listener.close()
            await self._server.shutdown(1.0)
            await self._listener.wait_closed()

    async def _answer(self, request: web.BaseRequest) -> web.Response:
        response = self._response(request)
        response.force_close()
        return response

    def _response(self, request: web.BaseRequest) -> web.Response:
        if request.method not in ("GET", "HEAD"):
            return web.Response(status=405, headers={"Allow": "GET, HEAD"})
        path = request.path
        if path == "/metrics" and self._page is not None:
            return web.Response(body=self._text(self._page), headers={"Content-Type": CONTENT_TYPE_LATEST})
        if path == "/health":
            return web.json_response({"status": "ok"})
        if path == "/ready":
            why = self._not_ready()
            return web.json_response({"status": why or "ready"}, status=503 if why else 200)
        if path in self._more:
            return web.Response(body=msgspec.json.encode(self._more[path]()), content_type="application/json")
        return web.Response(status=503 if path == "/metrics" else 404)

    def _text(self, page: Page) -> bytes:
        made_at, text = self._made
        now = clock.now()
        if now - made_at >= FRESH_S:
            text = page.render()
            self._made = (clock.now(), text)
        return text
