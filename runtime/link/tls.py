"""TLS for the ports that speak HTTP. Certificate, key and clients' authority are read again when a file changes. Links between
crossdock's own processes have CURVE keys instead (`runtime.link.keys`).
"""

import asyncio
import contextlib
import socket
import ssl
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from proto.errors import CrossdockError
from runtime.process import clock, log
from runtime.process.exits import ConfigError
from runtime.settings.common import CommonSettings

if TYPE_CHECKING:
    import uvicorn

HANDSHAKE_S: Final = 10.0
HANDSHAKES_MAX: Final = (
    256  # one more ends the oldest: strangers that connect and say nothing must not keep clients out
)
LOOK_S: Final = 2.0  # between looks at the files
_BACKLOG: Final = 2_048  # as uvicorn has
_FULL_S: Final = 1.0  # without accepting, while no descriptor is free
_log = log.get("crossdock.tls")


class TlsError(CrossdockError):
    """A certificate, a key or an authority that cannot be used."""


class Tls:
    """`clients_need_certificate`: a client without a certificate of `--tls-client-ca` is refused, rather than left to the
    application."""

    def __init__(self, settings: CommonSettings, clients_need_certificate: bool) -> None:
        """Raises `ConfigError`."""
        self.certificate, self.key, self.client_ca = settings.tls_certificate, settings.tls_key, settings.tls_client_ca
        self._verify = ssl.CERT_REQUIRED if clients_need_certificate else ssl.CERT_OPTIONAL
        self._seen = self._stamps()
        try:
            self._context = self._read()
        except TlsError as error:
            raise ConfigError(str(error)) from None
        self._look_at = clock.now() + LOOK_S
        self._handshakes: OrderedDict[asyncio.Task[None], None] = OrderedDict()

    async def serve(self, server: "uvicorn.Server", sockets: list[socket.socket]) -> None:
        """Do what uvicorn's own `startup` does for sockets, behind TLS."""
        protocol: Any = server.config.http_protocol_class
        make = partial(protocol, server.config, server.server_state, {})
        server.servers = [_Listener(one, partial(self._begin, make)) for one in sockets]  # type: ignore[misc]
        server.started = True

    def _begin(self, make: Callable[[], asyncio.Protocol], connection: socket.socket) -> None:
        task = asyncio.get_running_loop().create_task(self._agree(make, connection))
        self._handshakes[task] = None
        task.add_done_callback(lambda done: self._handshakes.pop(done, None))
        if len(self._handshakes) > HANDSHAKES_MAX:
            self._handshakes.popitem(last=False)[0].cancel()

    async def _agree(self, make: Callable[[], asyncio.Protocol], connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        try:
            context = await self._newest()
            await loop.connect_accepted_socket(make, connection, ssl=context, ssl_handshake_timeout=HANDSHAKE_S)
        except OSError:  # what a client sends is no news
            connection.close()
        except asyncio.CancelledError:
            connection.close()
            raise

    async def _newest(self) -> ssl.SSLContext:
        if clock.now() >= self._look_at:
            self._look_at = clock.now() + LOOK_S
            await asyncio.to_thread(self._look)  # a file system may be slow
        return self._context

    def _look(self) -> None:
        stamps = self._stamps()
        if stamps == self._seen:
            return
        self._seen = stamps
        try:
            self._context = self._read()
        except TlsError as error:
            _log.error("certificate not taken, the earlier one stays", error=str(error))
        else:
            _log.info("certificate taken", path=self.certificate)

    def _stamps(self) -> list[tuple[int, int, int]]:
        found = []
        for name in (self.certificate, self.key, self.client_ca):
            with contextlib.suppress(OSError):
                status = Path(name or ".").stat() if name else None
                found.append((status.st_mtime_ns, status.st_size, status.st_ino) if status else (0, 0, 0))
        return found

    def _read(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.set_alpn_protocols(["http/1.1"])
        try:
            context.load_cert_chain(self.certificate, self.key or None, password="")  # asks nobody
        except (OSError, ValueError) as error:
            which = f"{self.certificate}, {self.key}" if self.key else self.certificate
            raise TlsError(f"--tls-certificate, --tls-key: {which}: {_reason(error)}") from None
        if self.client_ca:
            try:
                context.load_verify_locations(self.client_ca)
            except (OSError, ValueError) as error:
                raise TlsError(f"--tls-client-ca: {self.client_ca}: {_reason(error)}") from None
            context.verify_mode = self._verify
        return context


class _Listener:
    """Stands where uvicorn has a server of the event loop, which would not bound the number of handshakes."""

    def __init__(self, listener: socket.socket, begin: Callable[[socket.socket], None]) -> None:
        self._listener, self._begin = listener, begin
        self._later: asyncio.TimerHandle | None = None
        listener.listen(_BACKLOG)
        self._watch()

    def close(self) -> None:
        if self._later is not None:
            self._later.cancel()
        if self._listener.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()

    async def wait_closed(self) -> None:
        """The owner of the socket closes it."""

    def _watch(self) -> None:
        asyncio.get_running_loop().add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionError):
            return
        except OSError:  # no descriptor is free
            asyncio.get_running_loop().remove_reader(self._listener)
            self._later = asyncio.get_running_loop().call_later(_FULL_S, self._watch)
            return
        connection.setblocking(False)
        self._begin(connection)


def tls_of(settings: CommonSettings, clients_need_certificate: bool = False) -> Tls | None:
    """Raises `ConfigError`."""
    return Tls(settings, clients_need_certificate) if settings.tls_certificate else None


def _reason(error: Exception) -> str:
    """Returns what is wrong with a file, never a part of it."""
    if isinstance(error, ssl.SSLError):
        return (error.reason or "no PEM file").replace("_", " ").lower()
    return error.strerror or "cannot be read" if isinstance(error, OSError) else "cannot be read"
