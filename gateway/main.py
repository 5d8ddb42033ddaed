"""The gateway process: links, stream keeper and HTTP server on one event loop."""

import asyncio
import os
import socket
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from gateway.app import create_app
from gateway.backend import Backend
from gateway.batches.runner import BatchRunner
from gateway.batches.sqlite_store import SqliteBatchStore
from gateway.batches.store import DAY_S, FILE_BYTES_MAX, BatchService, BatchStore
from gateway.http.body import Intake
from gateway.http.server import make_server
from gateway.metrics import BatchMetrics, GatewayMetrics
from gateway.openai.context import Gateway, ServedModel
from gateway.openai.prepare import ModelRules
from gateway.response_store import ResponseStore
from gateway.streams.types import StreamLimits
from gateway.tenancy import KeyRing
from gateway.text.model_files import ModelFilesError, load
from gateway.tracing.tracer import Tracer
from proto import limits
from proto.messages import Hello, Role, Welcome
from runtime.link.client import LinkClient
from runtime.link.keys import is_loopback, keys_for
from runtime.link.server import CannotBind, LinkServer, LinkSettings, Peer, is_orderly
from runtime.link.tls import tls_of
from runtime.link.waiting import WaitNotice
from runtime.metrics.common import link_counters
from runtime.metrics.server import MetricsServer
from runtime.process import clock, garbage_collector, log, notify
from runtime.process.driver import Stop, cancelled, run_process, unless_stopped, watched
from runtime.process.exits import ConfigError
from runtime.settings import machine
from runtime.settings.addresses import advertised, host_of, in_url
from runtime.settings.roles import GatewaySettings
from runtime.storage.errors import StorageError
from runtime.tenancy.file import TenantsFile
from runtime.tenancy.tenants import TenantsError, open_tenants

if TYPE_CHECKING:
    from gateway.jwt_tenants import JwtTenants
    from gateway.response_table import ResponseTable
    from gateway.tracing.export import SpanExport

T = TypeVar("T")
_CLOSE_TIMEOUT_S = 5
_SWITCH_S = 0.0005
"""How long a thread that tokenizes or parses may keep the event loop waiting. With the interpreter's default of 5 ms, the loop
would wait so long at each read of each connection."""


class GatewayProcess:
    def __init__(self, settings: GatewaySettings) -> None:
        self.settings = settings
        name = settings.name or f"gateway-{os.getpid()}"
        self.log = log.configure(level=settings.log_level, fmt=settings.log_format, process=name)
        self.missing = {"listening", "connected"}  # what must be so before this process first reports that it is ready
        self.observed = MetricsServer(settings.metrics, settings.advertise, tls_of(settings))
        self.tls = tls_of(settings, clients_need_certificate=True)
        stream_limits = StreamLimits(idle_s=settings.stream_idle_ms / 1000)
        model = settings.served_model_id
        self.metrics = GatewayMetrics(model)
        self.metrics.registry.introduce(name=name, model=model)
        more = [name for name, _ in settings.other_models]
        self.backend = Backend(model=model, limits=stream_limits, metrics=self.metrics, more_models=more)
        self.traces = _open_traces(settings, name)
        if self.traces is not None:
            self.backend.tracer = Tracer(settings.trace_sample, self.traces.emit)
        self.hello = Hello(
            limits.PROTOCOL_VERSION,
            Role.GATEWAY,
            clock.new_incarnation(),
            name,
            model=model,
            host=socket.gethostname(),
            pid=os.getpid(),
        )
        keys = keys_for(settings, Role.GATEWAY, {"--tokens-bind": settings.tokens_bind})
        self.link_settings = LinkSettings(heartbeat_ms=settings.heartbeat_ms, keys=keys)
        self.tokens = LinkServer(
            bind=settings.tokens_bind,
            hello=self.hello,
            accept=self.backend.refusal,
            on_up=self._worker_up,
            on_message=self.backend.worker_message,
            on_down=self._worker_down,
            settings=self.link_settings,
        )

    def _worker_up(self, peer: Peer) -> None:
        self.log.info("worker connected", peer=peer.hello.name)
        self.backend.worker_up(peer)

    def _worker_down(self, peer: Peer, reason: str) -> None:
        self.log.info("worker disconnected", peer=peer.hello.name, reason=reason)
        self.backend.worker_down(peer)

    def _is(self, what: str) -> None:
        if self.missing:
            self.missing.discard(what)
            if not self.missing:
                notify.ready("serving")

    async def run(self, stop: Stop) -> int:
        settings = self.settings
        try:
            listener = _listen(settings.host, settings.port)
        except OSError as error:
            return self._cannot_listen(error)
        with listener:
            await self.observed.start()
            try:
                address = await self.tokens.start()
            except CannotBind as error:
                machine.check_listening("--tokens-bind", error)
                self.log.error("cannot start", error=f"--tokens-bind: {error.strerror}")
                return 1
            try:
                models = await self._load(stop)
                if models is not None:
                    status = await self._run(models, advertised(settings.advertise, address), listener, stop)
                    if status:
                        return status
            finally:
                await self.tokens.close()
                await self.observed.close()
                self.backend.close()
                if self.traces is not None and self.backend.tracer is not None:
                    self.backend.tracer.flush()
                    self.traces.close()
        self.log.info("stopped")
        return 0

    def _cannot_listen(self, error: OSError) -> int:
        """Log that the port cannot be opened, and return the exit status. Raises `ConfigError` if another start would not
        help."""
        settings = self.settings
        machine.check_listening(f"--host, --port: cannot listen on {settings.host}:{settings.port}", error)
        self.log.error("cannot start", error=f"--port: {settings.port} on {settings.host}: {error.strerror}")
        return 1

    async def _run(self, models: list[ServedModel], address: str, listener: socket.socket, stop: Stop) -> int:
        """`address`: where workers deliver tokens. Returns the exit status; raises `ConfigError`."""
        try:
            tenants = TenantsFile(self.settings.tenants) if self.settings.tenants else None
        except TenantsError as error:
            raise ConfigError(f"--tenants: {error}") from error
        in_force, with_tokens = tenants.tenants if tenants else open_tenants(), bool(self.settings.jwt_issuer)
        keys = KeyRing(in_force, self.settings.api_keys, needed=with_tokens)
        token_tenants = await _read_token_keys(self.settings, self.metrics) if with_tokens else None
        batches = await self._open_batches()
        coordinator, waiting = self._coordinator(address)
        gateway = Gateway(
            models=models,
            backend=self.backend,
            metrics=self.metrics,
            intake=Intake(
                body_bytes_max=self.settings.body_bytes_max, client_timeout_s=self.settings.client_timeout_ms / 1000
            ),
            keys=keys,
            token_tenants=token_tenants,
            access_log=self.settings.access_log,
            cors_origins=self.settings.cors_origins,
            allowed_hosts=_own_names(self.settings),
            trusted_proxies=self.settings.trusted_proxies,
            metrics_page=self.observed.page if self.settings.api_metrics else None,
            responses=ResponseStore(keep_s=self.settings.responses_keep_s),
            response_table=_open_response_table(self.settings),
        )
        waiting.begin()
        await coordinator.start()
        self.metrics.slo_of = keys.slo_of
        ends = {"tokens": self.tokens.counters, "coordinator": coordinator.counters}
        link_counters(self.metrics.registry, ends, lambda: self.backend.coordinator_is_up)
        self.observed.show(self.metrics.registry, lambda: self.backend.not_ready)
        watching = [watched(garbage_collector.collect_seldom(self.backend.load, clock.now))]
        watching.append(watched(_say_warnings(models, self.log)))
        if tenants:
            watching.append(watched(tenants.watch(keys.replace)))
        if token_tenants:
            watching.append(watched(token_tenants.watch()))
        if gateway.response_table:
            watching.append(watched(gateway.response_table.run()))
        if batches:
            of_batches = BatchMetrics(self.metrics.registry)
            watching.append(watched(BatchRunner(gateway, batches, of_batches, self.settings.batch_lines_max).run()))
        try:
            return await self._serve(gateway, batches, listener, stop)
        finally:
            await cancelled(*watching)
            if batches:
                await batches.store.close()
            await coordinator.close()
            waiting.end()
            await gateway.close()

    async def _open_batches(self) -> BatchService | None:
        """Raises `ConfigError`."""
        settings = self.settings
        if settings.batch_db == "off" or not (settings.batch_db or settings.database):
            return None
        store: BatchStore
        if settings.database:
            store = _in_database(lambda: _postgres_store(settings.database, self.hello))
        else:
            store = SqliteBatchStore(settings.batch_db)
        try:
            await store.open()
        except StorageError as error:
            raise ConfigError(f"--batch-db: {error}") from error
        return BatchService(store, FILE_BYTES_MAX, settings.batch_tenant_mib << 20, settings.batch_keep_days * DAY_S)

    async def _load(self, stop: asyncio.Event) -> list[ServedModel] | None:
        """Load the models' tokenizers. Returns None if told to stop before they are loaded. Raises `ConfigError`."""
        loader = ThreadPoolExecutor(1, "loader")
        try:
            with garbage_collector.at_rest():
                return await unless_stopped(stop, loader, partial(_load_models, self.settings))
        finally:
            loader.shutdown(wait=False)

    def _coordinator(self, address: str) -> tuple[LinkClient, WaitNotice]:
        def up(peer: Peer, welcome: Welcome) -> None:
            waiting.end()
            self.log.info("coordinator connected", address=self.settings.coordinator)
            self.backend.coordinator_up(peer, welcome.incarnation)
            self._is("connected")

        def down(peer: Peer, reason: str) -> None:
            waiting.begin()
            if is_orderly(reason):
                self.log.info("coordinator left", reason=reason)
            else:
                self.log.warning("coordinator lost", reason=reason)
            self.backend.coordinator_down(peer, reason)

        hello = msgspec.structs.replace(self.hello, address=address, metrics=self.observed.address)
        client = LinkClient(
            address=self.settings.coordinator,
            hello=lambda: msgspec.structs.replace(hello, hash_key=self.backend.hash_key),
            on_up=up,
            on_message=self.backend.coordinator_message,
            on_down=down,
            settings=self.link_settings,
        )
        waiting = WaitNotice(self.log, self.settings.coordinator, lambda: client.last_error)
        return client, waiting

    async def _serve(self, gateway: Gateway, batches: BatchService | None, listener: socket.socket, stop: Stop) -> int:
        """Serve HTTP until told to stop. Then wait a limited time for streams to end, and end the rest with an error event."""
        server = make_server(create_app(gateway, batches), self.settings.client_timeout_ms / 1000, _CLOSE_TIMEOUT_S)
        server.on_listening = lambda: self._is("listening")
        server.tls = self.tls
        serving = asyncio.get_running_loop().create_task(server.serve(sockets=[listener]))
        stopping = asyncio.get_running_loop().create_task(_wait(stop))
        say_where(self.log, listener.getsockname(), gateway, "https" if self.tls else "http")
        await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        self.backend.drain()
        streams = len(self.backend.keeper.streams)
        if streams and not serving.done():
            self.log.info("draining", streams=streams, within_s=self.settings.drain_timeout_s)
            await stop.unless_at_once(self.backend.emptied(), self.settings.drain_timeout_s)
        self.log.info("stopping", streams=len(self.backend.keeper.streams))
        self.backend.shut_down()
        server.should_exit = True
        await cancelled(stopping)
        try:
            await serving
        except OSError as error:
            # Binding does not reserve the port: another process bound it too, and listened first.
            return self._cannot_listen(error)
        return 0


def _open_traces(settings: GatewaySettings, name: str) -> "SpanExport | None":
    """Raises `ConfigError`."""
    endpoint = settings.otlp_endpoint or os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", "")
    if not endpoint:
        return None
    try:
        # It costs memory and time to import, and comes with an extra.
        from gateway.tracing.export import SpanExport
    except ImportError as error:
        raise ConfigError(f"--otlp-endpoint: needs the extra crossdock[tracing]: {error}") from error
    return SpanExport(endpoint, name)


def _open_response_table(settings: GatewaySettings) -> "ResponseTable | None":
    """Raises `ConfigError`."""
    if not settings.database or not settings.responses_keep_s:
        return None

    def opened() -> "ResponseTable":
        from gateway.response_table import ResponseTable

        return ResponseTable(settings.database, keep_s=settings.responses_keep_s)

    return _in_database(opened)


def _postgres_store(url: str, hello: Hello) -> BatchStore:
    from gateway.batches.postgres_store import PostgresBatchStore

    return PostgresBatchStore(url, f"{hello.name}@{hello.host}")


def _in_database(opened: Callable[[], T]) -> T:
    """The result of `opened`, which imports psycopg: it comes with an extra. Raises `ConfigError`."""
    try:
        return opened()
    except ImportError as error:
        raise ConfigError(f"--database: needs psycopg 3; install crossdock[postgresql] ({error})") from None
    except StorageError as error:
        raise ConfigError(f"--database: {error}") from None


async def _read_token_keys(settings: GatewaySettings, metrics: GatewayMetrics) -> "JwtTenants":
    """Raises `ConfigError`."""
    from gateway.jwt_tenants import JwtTenants  # few gateways need it
    from gateway.jwt_tokens import TokenRules

    rules = TokenRules(settings.jwt_issuer, settings.jwt_audience, settings.jwt_tenant_claim)
    token_tenants = JwtTenants(settings.jwt_jwks, rules, lambda reason: metrics.jwt_refused.labels(reason).inc())
    await token_tenants.start()
    return token_tenants


def _load_models(settings: GatewaySettings) -> list[ServedModel]:
    """Raises `ConfigError`."""
    found: list[ServedModel] = []
    first = (settings.served_model_id, settings.model)
    for option, (name, path) in [("--model", first), *(("--more-models", one) for one in settings.other_models)]:
        try:
            tokenizer = load(path, model_sampling=settings.generation_config == "auto")
        except ModelFilesError as error:
            raise ConfigError(f"{option}: {error}") from error
        aliases = () if found else tuple(settings.served_model_name)
        found.append(ServedModel(tokenizer, ModelRules(name, settings.default_max_tokens, aliases)))
    return found


async def _say_warnings(models: Sequence[ServedModel], logger: log.Log) -> None:
    """Log what models cannot do."""
    for served in models:
        if not served.tokenizer.suits_grammars:
            await served.grammars.begin()
        for warning in served.warnings:
            logger.warning("serving with limits", because=warning)


def _own_names(settings: GatewaySettings) -> set[str]:
    """Returns the host names that clients may use for this gateway if no key is needed: those from the settings and those of
    its listening address."""
    names = {settings.host, *settings.allowed_hosts}
    if not is_loopback(f"tcp://{in_url(settings.host)}:0"):
        names |= {socket.gethostname(), host_of(settings.advertise)}
    return names


def say_where(logger: log.Log, bound: Sequence[Any], gateway: Gateway, scheme: str = "http") -> None:
    """Log the HTTP address, and warn if everyone who reaches it is let in without a key. `bound` is what `getsockname`
    returns."""
    host, port = bound[:2]
    address = f"{in_url(host)}:{port}"
    logger.info(
        "serving", url=f"{scheme}://{address}", model=", ".join(served.rules.model_id for served in gateway.models)
    )
    if not (gateway.keys.needed or is_loopback(f"tcp://{address}")):
        logger.warning(
            "no API keys: everyone who reaches this port is let in; see --tenants and --api-keys", port=address
        )


async def _wait(stop: asyncio.Event) -> None:
    await stop.wait()


def _listen(host: str, port: int) -> socket.socket:
    """Returns a bound TCP socket for the server. It is bound early, so that a port in use is reported at once. Raises
    OSError."""
    family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[
        0
    ]
    listener = socket.socket(family, kind, proto)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


def run(settings: GatewaySettings) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit code. Raises `ConfigError`."""
    sys.setswitchinterval(_SWITCH_S)
    return run_process(lambda stop: GatewayProcess(settings).run(stop))
