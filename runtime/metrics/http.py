"""uvicorn for the metrics port, which must never slow the process down. Each connection carries one request and is cut off
after `EXCHANGE_S` seconds. No more than `CONNECTIONS_MAX` are open. An app that streams, and bounds its streams, has the time
of a connection begin anew with `scope["extensions"]["crossdock.keep"]`.

It is a separate module from `server`, since its imports would delay the start of a coordinator.
"""

import asyncio
import logging
import socket
from collections import OrderedDict
from typing import ClassVar, Final

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from runtime.link.tls import Tls

CONNECTIONS_MAX: Final = 64  # one more takes the place of the oldest: idle strangers must not keep a scraper out
EXCHANGE_S: Final = 10.0
_REQUEST_BYTES_MAX: Final = 16_384


class MetricsHttpServer(uvicorn.Server):
    """Answers on the sockets that `startup` gets, which listen, and owns them."""

    def __init__(self, app: ASGIApp, tls: Tls | None = None) -> None:
        # uvicorn warns of each connection that sends garbage. Nobody can use those lines, and strangers could fill the log
        # with them.
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)

        class Connection(_Connection):
            oldest_first: ClassVar[OrderedDict[_Connection, None]] = OrderedDict()

        config = uvicorn.Config(
            app,
            http=Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
        )
        super().__init__(config)
        config.load()
        self.lifespan = config.lifespan_class(config)
        self._tls = tls

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        if self._tls is None or sockets is None:
            await super().startup(sockets)
        else:
            await self._tls.serve(self, sockets)

    async def close(self) -> None:
        """Close at once, where uvicorn's own `shutdown` waits for connections and looks every 100 ms."""
        for listener in self.servers:
            listener.close()
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        for listener in self.servers:
            await listener.wait_closed()


class _Connection(HttpToolsProtocol):
    """One request. A connection that takes too long is cut off; so is the oldest where there are too many."""

    oldest_first: ClassVar["OrderedDict[_Connection, None]"]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._received_bytes = 0
        self._cut = self.loop.call_later(EXCHANGE_S, transport.abort)
        self.oldest_first[self] = None
        if len(self.oldest_first) > CONNECTIONS_MAX:
            oldest, _ = self.oldest_first.popitem(last=False)
            oldest.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.oldest_first.pop(self, None)
        self._cut.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._received_bytes += len(data)
        if self._received_bytes > _REQUEST_BYTES_MAX:
            self.send_400_response("The request is too large.")
        else:
            super().data_received(data)

    def on_headers_complete(self) -> None:
        if self.cycle is None:
            self.scope["client_certificate"] = bool(self.transport.get_extra_info("peercert"))
            super().on_headers_complete()
            self.scope["extensions"] = {"crossdock.keep": self._keep}

    def _keep(self, more_s: float) -> None:
        """Cut this connection off `more_s` seconds later than one that has just begun, and do not count it among others."""
        self.oldest_first.pop(self, None)
        self._cut.cancel()
        if not self.transport.is_closing():
            self._cut = self.loop.call_later(EXCHANGE_S + more_s, self.transport.abort)

    def send_400_response(self, msg: str) -> None:
        """Requests after the first do not matter: its answer closes the connection."""
        if self.cycle is None:
            super().send_400_response(msg)
