"""The port on which one process is observed: `/metrics`, `/health`, `/live`, `/ready`, and whatever else its role adds.
`/live` is for a supervisor that restarts the process: it fails if a check of the watchdog fails (`runtime.process.notify`).

It must never slow the process down. Connections are bounded (`runtime.metrics.http`), and the page is generated at most every
`FRESH_S` seconds.
"""

import asyncio
import ipaddress
import socket
from collections.abc import Callable
from email.utils import formatdate
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.types import ASGIApp, Receive, Scope, Send

from proto.errors import CrossdockError
from runtime.link.tls import Tls
from runtime.metrics.registry import MetricsRegistry
from runtime.process import clock, log, notify
from runtime.settings import machine
from runtime.settings.addresses import METRICS_OFF, advertised_metrics, is_local_name, split_authority, split_metrics

if TYPE_CHECKING:
    from runtime.metrics.http import MetricsHttpServer

FRESH_S: Final = 0.25
PROBES: Final = ("/health", "/live", "/ready")  # a supervisor has no certificate
_JSON: Final = "application/json"
_BACKLOG: Final = 2_048  # as uvicorn has


class Reply(NamedTuple):
    status: int
    body: bytes = b""
    content_type: str = "text/plain; charset=utf-8"


class PortTaken(CrossdockError):
    """Another process listens on the port, perhaps the predecessor of this one. A later start may succeed."""


class MetricsPage(Protocol):
    """Where a role shows its metrics: a `MetricsServer`, or a part of one (`combined`)."""

    @property
    def address(self) -> str: ...
    def show(self, registry: MetricsRegistry, not_ready: Callable[[], str | None]) -> None: ...


class MetricsServer:
    """The port, and the ASGI app on it. `asked` is the option's value, `advertise` what others are told of this process, if
    anything. With `tls` and an authority of clients, those without a certificate learn only how the process fares."""

    def __init__(self, asked: str, advertise: str = "", tls: Tls | None = None) -> None:
        self.address = ""  # HOST:PORT for others, once it listens
        self._asked, self._advertise, self._tls = asked, advertise, tls
        self._registry: CollectorRegistry | None = None
        self._not_ready: Callable[[], str | None] = lambda: "it is starting"
        self._more: dict[str, Callable[[], Any]] = {}
        self._site: tuple[str, ASGIApp] | None = None
        self._listening: list[socket.socket] = []
        self._loopback_only = False
        self._serving: MetricsHttpServer | None = None
        self._made: tuple[float, bytes] = (-FRESH_S, b"")

    async def start(self) -> None:
        """Raises `ConfigError` where it cannot listen, and `PortTaken` where it may do so later."""
        await self.listen()
        await self.serve()

    async def listen(self) -> None:
        """Clients that connect wait for `serve`. Raises as `start` does."""
        if self._asked == METRICS_OFF:
            return
        host, port = split_metrics(self._asked)
        try:
            self._listening = await _listen(host, port)
        except OSError as error:
            machine.check_listening(f"--metrics: cannot listen on {self._asked}", error)
            raise PortTaken(f"--metrics: cannot listen on {self._asked}: {error.strerror or error}") from None
        bound = self._listening[0].getsockname()
        self._loopback_only = ipaddress.ip_address(bound[0]).is_loopback
        self.address = advertised_metrics(bound[0], bound[1], self._advertise, socket.gethostname())
        log.get("crossdock.metrics").info("metrics", address=self.address)

    async def serve(self) -> None:
        """Start the HTTP server. The HTTP library is imported on a thread, so that the event loop can serve a coordinator's
        peers first."""
        if self._listening:
            server = (await asyncio.to_thread(load))(self, self._tls)
            await server.startup(self._listening)
            self._serving = server

    def show(
        self,
        registry: CollectorRegistry,
        not_ready: Callable[[], str | None],
        more: dict[str, Callable[[], Any]] | None = None,
        site: tuple[str, ASGIApp] | None = None,
    ) -> None:
        """Show this from here on. `not_ready`: why this process cannot serve now, or None; `more`: what is answered at other
        paths, as JSON; `site`: a path, and an app for it and all below."""
        self._registry, self._not_ready, self._more, self._site = registry, not_ready, more or {}, site

    async def close(self) -> None:
        if self._serving is not None:
            await self._serving.close()
        else:
            _close(self._listening)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        allowed = (not self._loopback_only or _asks_for_this_host(scope)) and self._shows(scope)
        if allowed and self._site is not None and f"{scope['path']}/".startswith(f"{self._site[0]}/"):
            await self._site[1](scope, receive, send)
            return
        status, body, content_type = self._answer(scope["method"], scope["path"]) if allowed else Reply(403)
        headers = {"content-type": content_type, "content-length": str(len(body)), "connection": "close"}
        headers["date"] = formatdate(clock.unix_time(), usegmt=True)  # by which crossdock doctor compares clocks
        if status == 405:
            headers["allow"] = "GET, HEAD"
        encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": status, "headers": encoded})
        await send({"type": "http.response.body", "body": body})

    def _shows(self, scope: Scope) -> bool:
        if self._tls is None or not self._tls.client_ca:
            return True
        return scope["path"] in PROBES or bool(scope["client_certificate"])

    def _answer(self, method: str, path: str) -> Reply:
        if method not in ("GET", "HEAD"):
            return Reply(405)
        if path == "/metrics":
            return self.page()
        if path == "/health":
            return Reply(200, b'{"status": "ok"}', _JSON)
        if path == "/live":
            alive = notify.is_alive()
            return Reply(
                200 if alive else 503, msgspec.json.encode({"status": "ok" if alive else "no progress"}), _JSON
            )
        if path == "/ready":
            why = self._not_ready()
            return Reply(503 if why else 200, msgspec.json.encode({"status": why or "ready"}), _JSON)
        if path in self._more:
            return Reply(200, msgspec.json.encode(self._more[path]()), _JSON)
        return Reply(404)

    def page(self) -> Reply:
        """The answer to `/metrics`, whether or not the port is open."""
        if self._registry is None:
            return Reply(503)
        made_at, text = self._made
        if clock.now() - made_at >= FRESH_S:
            text = generate_latest(self._registry)
            self._made = (clock.now(), text)
        return Reply(200, text, CONTENT_TYPE_LATEST)


def _asks_for_this_host(scope: Scope) -> bool:
    """False for a web page that reaches a port on loopback by a name of its own, pointed at this machine (DNS rebinding)."""
    hosts = [split_authority(value.decode("latin-1")) for name, value in scope["headers"] if name == b"host"]
    return all(host is not None and is_local_name(host[0]) for host in hosts)


def load() -> "type[MetricsHttpServer]":
    """Imports uvicorn; who has time does so before it is needed."""
    from runtime.metrics.http import MetricsHttpServer

    return MetricsHttpServer


async def _listen(host: str, port: int) -> list[socket.socket]:
    """Listen on each address of the host. Raises `OSError`."""
    loop, listening = asyncio.get_running_loop(), []
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    try:
        for family, address in dict.fromkeys((one[0], one[4][:2]) for one in found):
            listening.append(socket.create_server(address, family=family, backlog=_BACKLOG))
            listening[-1].setblocking(False)
    except OSError:
        _close(listening)
        raise
    return listening


def _close(sockets: list[socket.socket]) -> None:
    for one in sockets:
        one.close()
