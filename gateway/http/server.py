"""The HTTP server: uvicorn, with limits on what a client may send before it is authenticated, and on how slow a client may be.

    connection ── headers ──▶ request ── body ──▶ answer ──▶ idle ──▶ …
      bytes, count, time        bytes, time         time       time

`body.Intake` bounds the cost of a request once its headers are there.
"""

import asyncio
import contextlib
import logging
import socket
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from http import HTTPStatus
from typing import Any, ClassVar, Final

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from gateway.http.errors import ApiError
from gateway.http.request_log import REQUEST_ID_HEADER, RequestInfo
from runtime.link.tls import Tls
from runtime.process.descriptors import raise_descriptor_limit

HEADER_BYTES_MAX: Final = 64 << 10  # Bytes of the request line and all headers together
HEADERS_MAX: Final = 200
QUERY_BYTES_MAX: Final = 4 << 10  # Routes that list something parse the query, which would take 15 ms for 64 KiB
CONNECTIONS_MAX: Final = 8_192  # a further one replaces that without a request for longest, or is closed unread
QUEUED_MAX: Final = 64  # requests of one packet that wait for an earlier answer; one more closes the connection
KEEP_ALIVE_S: Final = 30
SEND_BUFFER_BYTES: Final = 256 << 10  # the most that a client that reads nothing can make the kernel hold
_FILES_OF_OUR_OWN: Final = 256


class HttpServer(uvicorn.Server):
    """uvicorn without signal handlers of its own: the process has them. `on_listening` is called once it listens."""

    on_listening: Callable[[], None]
    tls: Tls | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        if self.tls is None or sockets is None:
            await super().startup(sockets)
        else:
            await self.tls.serve(self, sockets)
        self.on_listening()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def make_server(app: Any, client_timeout_s: float, close_timeout_s: int) -> HttpServer:
    """`client_timeout_s`: how long headers, a body, or the reading of an answer may take or stand still."""
    # uvicorn warns of each connection that sends garbage. Those lines are of no use, and any stranger could fill the log with
    # them.
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    files_max = raise_descriptor_limit()

    class Connection(_Connection):
        timeout_s = client_timeout_s
        without_request: ClassVar[OrderedDict[_Connection, None]] = OrderedDict()
        connections_max = min(CONNECTIONS_MAX, max(16, files_max - _FILES_OF_OUR_OWN))

    server = HttpServer(
        uvicorn.Config(
            app,
            http=Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,  # `reach` reads them, from those of --trusted-proxies
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=close_timeout_s,
        )
    )
    server.on_listening = lambda: None
    return server


class _Connection(HttpToolsProtocol):
    """A connection that is closed if its client makes no progress: with its headers, with its body, or with reading the
    answer."""

    timeout_s: float
    connections_max: int
    without_request: ClassVar["OrderedDict[_Connection, None]"]  # in headers; the longest wait first

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._in_headers = True
        self._header_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
        self._running: RequestResponseCycle | None = None
        self._body_follows = False  # behind headers that offer another protocol, where the parser expects none
        self._body_at: int | None = None  # The offset of that body in the data being read, if known
        self.without_request[self] = None
        if len(self.connections) > self.connections_max:
            given_up, _ = self.without_request.popitem(last=False)
            given_up.transport.abort()
            if given_up is self:
                return
        # The kernel closes a connection whose other end acknowledges no data for this long.
        ours = transport.get_extra_info("socket")
        ours.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(self.timeout_s * 1000))
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self.without_request.pop(self, None)
        self._stop_timer()
        self.resume_writing()
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True  # uvicorn tells only the latest request of the connection
            self._running.message_event.set()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._look_again()

    def resume_writing(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None
        super().resume_writing()

    def _look_again(self) -> None:
        self._unread = self.loop.call_later(self.timeout_s, self._not_read, self.transport.get_write_buffer_size())

    def _not_read(self, bytes_before: int) -> None:
        """Check that fewer bytes wait to be sent than `timeout_s` ago, and abort the connection if not."""
        if self.transport.get_write_buffer_size() >= bytes_before:
            self.transport.abort()
        else:
            self._look_again()

    def data_received(self, data: bytes) -> None:
        if self._in_headers:
            self._header_bytes += len(data)
            if self._timer is None:
                self._start_timer()
        super().data_received(data)
        if self._body_at is not None:
            rest, self._body_at = data[self._body_at :], None
            self.parser = httptools.HttpRequestParser(_BodyOnly(self))
            framing = (b"content-length", b"transfer-encoding")
            lines = [b"%b: %b\r\n" % header for header in self.headers if header[0] in framing]
            super().data_received(b"".join([b"POST / HTTP/1.1\r\n", *lines, b"\r\n", rest]))
        if self._in_headers and self._header_bytes > HEADER_BYTES_MAX:
            self._turn_away(431, "The headers are too large.", "headers_too_large")

    def on_headers_complete(self) -> None:
        self._in_headers = False
        self.without_request.pop(self, None)
        self._start_timer()
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if size > HEADER_BYTES_MAX or len(self.headers) > HEADERS_MAX:
            self._turn_away(431, "The headers are too large.", "headers_too_large")
        elif len(self.url.partition(b"?")[2]) > QUERY_BYTES_MAX:
            self._turn_away(414, "The query is too long.", "query_too_long")
        elif not self.transport.is_closing():
            super().on_headers_complete()
            if self.parser.should_upgrade():
                self.cycle.keep_alive = False
                names = {name for name, value in self.headers if value != b"0"}
                self._body_follows = bool(names & {b"content-length", b"transfer-encoding"})
            if len(self.pipeline) > QUEUED_MAX:
                self.transport.abort()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.pipeline and not self.transport.is_closing():
            self.without_request[self] = None

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def send_400_response(self, msg: str) -> None:
        """uvicorn calls this for bytes that are not HTTP."""
        self._turn_away(400, msg, "invalid_http")

    def on_body(self, body: bytes) -> None:
        if self.cycle is not None:
            super().on_body(body)

    def _unsupported_upgrade_warning(self) -> None:
        """Decline another protocol (RFC 9110, 7.8), and note where the body begins. uvicorn calls this when the headers offer
        one, as those of Java's client do."""
        error = sys.exc_info()[1]
        if self._body_follows and error is not None:
            self._body_follows, self._body_at = False, error.args[0]

    def on_message_complete(self) -> None:
        if self._body_follows:
            return
        self._in_headers = True
        self._header_bytes = 0
        self._stop_timer()
        if self.cycle is not None:
            super().on_message_complete()

    def _start_timer(self) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(self.timeout_s, self._too_slow)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_slow(self) -> None:
        self._timer = None
        if self.cycle is None or self.cycle.response_complete:
            self._turn_away(408, "The request took too long to arrive.", "request_timeout")
        elif self._in_headers or self.pipeline:
            # An answer is being sent. Neither a stray byte of the next request nor a queued request that waits for its body
            # may end it.
            self._start_timer()
        else:
            # The body is late. The route has waited for it just as long and answers with an error itself.
            self._timer = self.loop.call_later(self.timeout_s, self.transport.abort)

    def _turn_away(self, status: int, message: str, code: str) -> None:
        if self.transport.is_closing():
            return
        request_id = RequestInfo().request_id
        body = ApiError(status, message, code=code).encoded(request_id)
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n{REQUEST_ID_HEADER.lower()}: {request_id}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()


class _BodyOnly:
    """Callbacks for a parser that reads only a request's body, after another parser has read the headers."""

    def __init__(self, connection: _Connection) -> None:
        self.on_body = connection.on_body
        self.on_message_complete = connection.on_message_complete
