"""TLS on the HTTP and metrics ports, with real certificates and a real client, on the event loop of production."""

import asyncio
import contextlib
import datetime
import http.client
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any, cast

import pytest
import uvloop
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from prometheus_client import CollectorRegistry
from pydantic import ValidationError

from gateway.http.server import make_server
from runtime.link import tls
from runtime.metrics.server import MetricsServer
from runtime.process.exits import ConfigError
from runtime.settings.common import CommonSettings


def write_certificate(folder: Path, name: str, issuer: str = "") -> None:
    """Writes NAME.crt and NAME.key; without `issuer`, it is an authority of its own."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    signer, parent = key, subject
    if issuer:
        signer = serialization.load_pem_private_key((folder / f"{issuer}.key").read_bytes(), None)  # type: ignore[assignment]
        parent = x509.load_pem_x509_certificate((folder / f"{issuer}.crt").read_bytes()).subject
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(parent)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=not issuer, path_length=None), critical=True)
        .sign(signer, hashes.SHA256())
    )
    (folder / f"{name}.crt").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    encodings = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    (folder / f"{name}.key").write_bytes(key.private_bytes(*encodings))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tls, "LOOK_S", 0.0)
    for name, issuer in (("authority", ""), ("server", "authority"), ("client", "authority"), ("stranger", "")):
        write_certificate(tmp_path, name, issuer)
    return tmp_path


def options(folder: Path, client_ca: bool = False) -> CommonSettings:
    authority: dict[str, Any] = {"tls_client_ca": str(folder / "authority.crt")} if client_ca else {}
    return CommonSettings(tls_certificate=str(folder / "server.crt"), tls_key=str(folder / "server.key"), **authority)


def ask(folder: Path, port: int, path: str = "/", own: str = "") -> tuple[int, bytes, bytes | None]:
    """Returns status and body of an answer, and the server's certificate."""
    context = ssl.create_default_context(cafile=str(folder / "authority.crt"))
    if own:
        context.load_cert_chain(str(folder / f"{own}.crt"), str(folder / f"{own}.key"))
    connection = http.client.HTTPSConnection("localhost", port, context=context, timeout=10)
    with contextlib.closing(connection):
        connection.request("GET", path)
        answer = connection.getresponse()
        encrypted = cast(ssl.SSLSocket | None, connection.sock)
        return answer.status, answer.read(), encrypted.getpeercert(binary_form=True) if encrypted else None


async def say_scheme(scope: Any, _receive: Any, send: Any) -> None:
    body = scope["scheme"].encode()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


@contextlib.asynccontextmanager
async def serving(settings: CommonSettings) -> AsyncIterator[int]:
    """A gateway's HTTP server; yields its port."""
    server = make_server(say_scheme, 5.0, 1)
    server.tls = tls.tls_of(settings, clients_need_certificate=True)
    listening = asyncio.Event()
    server.on_listening = listening.set
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        task = asyncio.get_running_loop().create_task(server.serve(sockets=[listener]))
        await listening.wait()
        yield listener.getsockname()[1]
        server.should_exit = True
        await task


def run(body: Callable[[], Coroutine[Any, Any, None]], loop: str = "uvloop") -> None:
    asyncio.run(body()) if loop == "asyncio" else uvloop.run(body())


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_http_is_served_over_tls(folder: Path, loop: str) -> None:
    """A client that trusts the authority gets an answer, whenever its request arrives; plain HTTP gets none."""

    async def body() -> None:
        async with serving(options(folder)) as port:
            for _ in range(20):
                status, text, _ = await asyncio.to_thread(ask, folder, port)
                assert (status, text) == (200, b"https")
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            with contextlib.suppress(ConnectionError):
                assert b"HTTP" not in await reader.read()
            writer.close()

    run(body, loop)


def test_changed_certificate_is_served(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """New connections get a renewed certificate without a restart; a broken file is logged and changes nothing."""

    async def body() -> None:
        async with serving(options(folder)) as port:
            before = (await asyncio.to_thread(ask, folder, port))[2]
            write_certificate(folder, "server", "authority")
            after = (await asyncio.to_thread(ask, folder, port))[2]
            assert before != after == ssl.PEM_cert_to_DER_cert((folder / "server.crt").read_text())
            (folder / "server.key").write_text("nonsense")
            with caplog.at_level(logging.ERROR):
                assert (await asyncio.to_thread(ask, folder, port))[2] == after
            assert "nonsense" not in caplog.text

    run(body)


def test_client_without_certificate_is_refused(folder: Path) -> None:
    """With an authority of clients, the HTTP port answers only those who have a certificate of it."""

    async def body() -> None:
        async with serving(options(folder, client_ca=True)) as port:
            assert (await asyncio.to_thread(ask, folder, port, "/", "client"))[0] == 200
            for own in ("", "stranger"):
                with pytest.raises(OSError):
                    await asyncio.to_thread(ask, folder, port, "/", own)

    run(body)


def test_metrics_need_a_certificate(folder: Path) -> None:
    """With an authority of clients, those without a certificate learn from the metrics port only how the process fares."""

    async def body() -> None:
        server = MetricsServer("127.0.0.1:0", tls=tls.tls_of(options(folder, client_ca=True)))
        await server.start()
        server.show(CollectorRegistry(), lambda: None, {"/targets": list})
        port = int(server.address.rpartition(":")[2])
        for path, without in (("/metrics", 403), ("/targets", 403), ("/live", 200), ("/ready", 200)):
            assert (await asyncio.to_thread(ask, folder, port, path))[0] == without
            assert (await asyncio.to_thread(ask, folder, port, path, "client"))[0] == 200
        await server.close()

    run(body)


def test_silent_strangers_keep_nobody_out(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections that never begin TLS are bounded, the oldest ends first, and a client is served beside them."""
    monkeypatch.setattr(tls, "HANDSHAKES_MAX", 4)

    async def body() -> None:
        async with serving(options(folder)) as port:
            silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(8)]
            async with asyncio.timeout(5):
                for reader, _ in silent[:4]:
                    with contextlib.suppress(ConnectionError):
                        assert await reader.read(1) == b""
            assert (await asyncio.to_thread(ask, folder, port))[0] == 200
            for _, writer in silent:
                writer.close()

    run(body)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"tls_certificate": "absent.crt"}, "--tls-certificate, --tls-key: absent.crt"),
        ({"tls_key": "client.key"}, "key values mismatch"),
        ({"tls_client_ca": "server.key"}, "--tls-client-ca: "),
    ],
)
def test_unusable_tls_file_ends_the_start(
    folder: Path, monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], words: str
) -> None:
    """A file that cannot be used is named with its option at the start."""
    monkeypatch.chdir(folder)
    given: dict[str, Any] = {"tls_certificate": "server.crt", "tls_key": "server.key"} | changed
    with pytest.raises(ConfigError, match=words):
        tls.tls_of(CommonSettings(**given))


def test_key_without_certificate_is_refused() -> None:
    """A key or an authority alone would leave the port open without TLS."""
    for option in ("tls_key", "tls_client_ca"):
        with pytest.raises(ValidationError, match="need --tls-certificate"):
            CommonSettings(**cast("dict[str, Any]", {option: "x.pem"}))
