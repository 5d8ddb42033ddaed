"""HTTP for the metrics port, apart from it, since what this imports is 15 % of what a coordinator takes to start."""

import asyncio
import socket
from collections import OrderedDict
from collections.abc import Callable
from typing import Final, cast

from aiohttp import web

from runtime.metrics.reply import BACKLOG, CONNECTIONS_MAX, Reply

EXCHANGE_S: Final = 10.0
_HEAD_BYTES_MAX: Final = 4096
_CLOSE_S: Final = 1.0


class _Exchange(web.RequestHandler):
    """One connection. One that takes too long is cut off; so is the oldest where there are too many."""

    def __init__(
        self, server: web.Server, loop: asyncio.AbstractEventLoop, open_: "OrderedDict[_Exchange, asyncio.Transport]"
    ) -> None:
        super().__init__(
            server,
            loop=loop,
            access_log=None,  # type: ignore[arg-type] # none is kept
            lingering_time=0.0,
            max_line_size=_HEAD_BYTES_MAX,
            max_field_size=_HEAD_BYTES_MAX,
        )
        self._open = open_
        self._cut: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        transport = cast(asyncio.Transport, transport)  # uvloop's is none by name
        self._open[self] = transport
        if len(self._open) > CONNECTIONS_MAX:
            self._open.popitem(last=False)[1].abort()
        self._cut = asyncio.get_running_loop().call_later(EXCHANGE_S, transport.abort)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._open.pop(self, None)
        if self._cut is not None:
            self._cut.cancel()
        super().connection_lost(exc)


class Serving:
    """Answers on sockets that listen, and owns them. `answer` gets a method and a path."""

    def __init__(self, answer: Callable[[str, str], Reply]) -> None:
        self._server = web.Server(self._handle)
        self._answer = answer
        self._open: OrderedDict[_Exchange, asyncio.Transport] = OrderedDict()
        self._listeners: list[asyncio.Server] = []

    async def start(self, listening: list[socket.socket]) -> None:
        server, loop, open_ = self._server, asyncio.get_running_loop(), self._open
        for one in listening:
            self._listeners.append(
                await loop.create_server(lambda: _Exchange(server, loop, open_), sock=one, backlog=BACKLOG)
            )

    async def close(self) -> None:
        for listener in self._listeners:
            listener.close()
        await self._server.shutdown(_CLOSE_S)
        for listener in self._listeners:
            await listener.wait_closed()

    async def _handle(self, request: web.BaseRequest) -> web.Response:
        status, body, content_type = self._answer(request.method, request.path)
        headers = {"Content-Type": content_type} | ({"Allow": "GET, HEAD"} if status == 405 else {})
        response = web.Response(status=status, body=body, headers=headers)
        response.force_close()
        return response
