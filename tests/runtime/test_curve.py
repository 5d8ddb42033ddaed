"""Keys between roles: who is let in, as what, and what becomes of the others."""

import asyncio
import os
import signal
import tomllib
from pathlib import Path

import pytest
import zmq
from zmq.utils import z85

from proto.codec import encode
from proto.limits import PROTOCOL_VERSION
from proto.messages import Hello, Role
from runtime.link import curve
from runtime.link.curve import _Handler
from runtime.link.keys import ROLES, Keys, KeysError, is_loopback, keys_for, make
from runtime.link.server import LinkSettings
from runtime.process import hangup
from runtime.process.exits import ConfigError
from runtime.process.loop_socket import LoopContext, LoopSocket
from runtime.process.zmq_sockets import open_socket
from runtime.settings.roles import CoordinatorSettings
from tests.helpers import until
from tests.runtime.test_link import CANCEL, End, run

SILENT_S = 0.3


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make(tmp_path / "keys", list(ROLES))
    return tmp_path / "keys"


def links(folder: Path, role: Role, heartbeat_ms: int = 50) -> LinkSettings:
    return LinkSettings(
        heartbeat_ms=heartbeat_ms,
        reconnect_ms=10,
        reconnect_ms_max=50,
        handshake_timeout_ms=2_000,
        keys=Keys(folder, role),
    )


def hello(role: Role, name: str = "x", incarnation: int = 9) -> Hello:
    return Hello(PROTOCOL_VERSION, role, incarnation, name)


def test_keys_allow_messages_both_ways(folder: Path) -> None:
    """Messages go both ways over a link with keys, and no connection is turned away."""

    async def body() -> None:
        a, b = End(), End()
        server = a.server(settings=links(folder, Role.COORDINATOR))
        client = b.client(await server.start(), hello=hello(Role.DECODE), settings=links(folder, Role.DECODE))
        await client.start()
        assert await a.next() == ("up", 9) and await b.next() == ("up", 7)
        assert a.peer is not None and b.peer is not None and a.peer.send(CANCEL) and b.peer.send(CANCEL)
        assert await a.next() == ("message", CANCEL) and await b.next() == ("message", CANCEL)
        assert set(server.counters.turned_away().values()) == {0} and not server.counters.protocol_errors
        await client.close()
        await server.close()

    run(body)


def test_keyed_servers_come_and_go(folder: Path) -> None:
    """One handler serves all of them, and is there for the next one too."""

    async def body() -> None:
        for _ in range(5):
            a, b = End(), End()
            servers = [one.server(settings=links(folder, Role.COORDINATOR)) for one in (a, End())]
            address, _ = [await server.start() for server in servers]
            client = b.client(address, hello=hello(Role.DECODE), settings=links(folder, Role.DECODE))
            await client.start()
            assert await a.next() == ("up", 9)
            await client.close()
            for server in servers:
                await server.close()

    run(body)


def test_refused_connections_are_counted(folder: Path, tmp_path: Path) -> None:
    """Connections with unknown or missing keys are counted as turned away while others are served."""
    make(tmp_path / "foreign", list(ROLES))
    for public in folder.glob("*.key"):  # knows whom to ask, but is not known there
        (tmp_path / "foreign" / public.name).write_bytes(public.read_bytes())

    async def body() -> None:
        a, good = End(), End()
        server = a.server(settings=links(folder, Role.COORDINATOR))
        address = await server.start()
        served = good.client(address, hello=hello(Role.PREFILL), settings=links(folder, Role.PREFILL))
        await served.start()
        assert await a.next() == ("up", 9)
        unknown = End().client(address, hello=hello(Role.DECODE), settings=links(tmp_path / "foreign", Role.DECODE))
        plain = End().client(address, hello=hello(Role.DECODE))
        posing = End().client(address, hello=hello(Role.GATEWAY), settings=links(folder, Role.DECODE))
        for client, why in ((unknown, "does not let this key in"), (plain, "keys"), (posing, "key is decode")):
            await client.start()
            await until(lambda client=client, why=why: why in client.last_error)  # type: ignore[misc]
            await client.close()
        counters = server.counters
        assert counters.unknown_keys and counters.plain and counters.impostors, counters
        assert a.events.empty() and len(server.peers) == 1
        assert good.peer is not None and good.peer.send(CANCEL)
        assert await a.next() == ("message", CANCEL)
        await served.close()
        await server.close()

    run(body)


def test_server_with_wrong_key_is_refused(folder: Path, tmp_path: Path) -> None:
    """It has a listed key, but of another role; and one that has none hears nothing at all."""

    async def body() -> None:
        a = End()
        false = a.server(settings=links(folder, Role.GATEWAY))
        client = End().client(await false.start(), hello=hello(Role.DECODE), settings=links(folder, Role.DECODE))
        await client.start()
        await until(lambda: bool(client.last_error))
        assert a.events.empty()
        await client.close()
        await false.close()
        bare = End().server()
        client = End().client(await bare.start(), hello=hello(Role.DECODE), settings=links(folder, Role.DECODE))
        await client.start()
        await until(lambda: "--keys" in client.last_error)
        await client.close()
        await bare.close()

    run(body)


def test_routing_id_is_no_identity(folder: Path) -> None:
    """A worker takes the id of another one that has just left: its frames are not taken for the other's."""

    async def body() -> None:
        a = End()
        server = a.server(settings=links(folder, Role.COORDINATOR, heartbeat_ms=60_000))
        address = await server.start()

        async def connect(role: Role) -> LoopSocket:
            socket, keys = open_socket(zmq.DEALER, LinkSettings().queue_messages_max), Keys(folder, role)
            socket.routing_id = b"first"
            socket.curve_publickey, socket.curve_secretkey = keys.public, keys.secret
            socket.curve_serverkey = keys.of(Role.COORDINATOR)[0]
            socket.connect(address)
            return socket

        first = await connect(Role.PREFILL)
        first.try_send([encode(hello(Role.PREFILL))])
        assert await a.next() == ("up", 9)
        server._probe_all = lambda: None  # type: ignore[method-assign]  # as slow as the intruder could wish
        first.close(0)
        await asyncio.sleep(SILENT_S)
        second = await connect(Role.DECODE)
        second.try_send([encode(CANCEL)])
        assert await a.next() == ("down", "another key speaks in its place")
        assert server.counters.impostors == 1
        second.close(0)
        await server.close()

    run(body)


def test_incarnation_is_no_identity(folder: Path) -> None:
    """Incarnations are told to others. A peer with another process's does not put that out; the process may come again."""
    make(folder, ["decode-b"])
    other = folder.parent / "other"
    other.mkdir(mode=0o700)
    for path in folder.iterdir():
        if path.name not in ("decode.key", "decode.key_secret"):
            (other / path.name).write_bytes(path.read_bytes())
            (other / path.name).chmod(0o600)

    async def body() -> None:
        a = End()
        server = a.server(settings=links(folder, Role.COORDINATOR))
        address = await server.start()
        served = End().client(address, hello=hello(Role.DECODE), settings=links(folder, Role.DECODE))
        await served.start()
        assert await a.next() == ("up", 9)
        observer = End().client(address, hello=hello(Role.OBSERVER), settings=links(folder, Role.OBSERVER))
        same_role = End().client(address, hello=hello(Role.DECODE), settings=links(other, Role.DECODE))
        for client in (observer, same_role):
            await client.start()
            await until(lambda client=client: "another process" in client.last_error)  # type: ignore[misc]
            await client.close()
        assert a.events.empty() and len(server.peers) == 1 and server.counters.impostors >= 2
        again = End().client(address, hello=hello(Role.DECODE), settings=links(folder, Role.DECODE))
        await again.start()
        assert await a.next() == ("up", 9), "its owner decides what becomes of the earlier link"
        for client in (again, served):
            await client.close()
        await server.close()

    run(body)


def test_keys_are_rotated_on_sighup(folder: Path) -> None:
    """A new key is let in once the public file is there, and its links end once it is gone; a mistake changes nothing."""
    make(folder, ["decode-b"])
    public, secret = (folder / f"decode-b{end}" for end in (".key", ".key_secret"))
    later = public.read_bytes()
    public.unlink()
    (folder / "decode.key_secret").rename(folder / "was")

    async def body() -> None:
        hangup.listen()
        a, b = End(), End()
        server = a.server(settings=links(folder, Role.COORDINATOR))
        address = await server.start()
        client = b.client(address, hello=hello(Role.DECODE), settings=links(folder, Role.DECODE))
        assert client._settings.keys is not None and client._settings.keys.name == "decode-b"
        await client.start()
        await until(lambda: server.counters.unknown_keys > 0)
        public.write_bytes(later)
        os.kill(os.getpid(), signal.SIGHUP)
        assert await a.next() == ("up", 9)
        public.write_text("nothing")
        os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.sleep(SILENT_S)
        assert a.events.empty() and len(server.peers) == 1
        public.unlink()
        os.kill(os.getpid(), signal.SIGHUP)
        assert await a.next() == ("down", "its key was removed")
        await client.close()
        await server.close()

    run(body)
    assert secret.exists()


@pytest.mark.parametrize("to", [Role.DECODE, Role.GATEWAY, Role.COORDINATOR])
def test_removed_server_key_ends_its_links(folder: Path, to: Role) -> None:
    """Whose secret was stolen serves nobody any more, and is not connected to again. Keys that stay end no link."""
    name = next(name for name, role in ROLES.items() if role is to)
    make(folder, [f"{name}-b", "client-b"])

    async def body() -> None:
        a, b = End(), End()
        server = a.server(settings=links(folder, to))
        client = b.client(await server.start(), hello=hello(Role.PREFILL), settings=links(folder, Role.PREFILL), to=to)
        keys = client._settings.keys
        assert keys is not None
        await client.start()
        assert await b.next() == ("up", 7) and await a.next() == ("up", 9)
        (folder / "client-b.key").unlink()
        keys.read_again()
        await asyncio.sleep(SILENT_S)
        assert b.events.empty() and len(server.peers) == 1
        (folder / f"{name}.key").unlink()
        keys.read_again()
        assert await b.next() == ("down", "its key was removed")
        await asyncio.sleep(SILENT_S)
        assert b.events.empty()
        await client.close()
        assert client._keys_changed not in keys._on_change
        await server.close()

    run(body)


def test_server_key_is_found_by_trying(folder: Path) -> None:
    """As with two gateways of one key each: which of them is at an address, nobody was told."""
    make(folder, ["gateway-b"])
    other = folder.parent / "other"
    make(other, ["coordinator", "gateway-b"])
    for name in ("gateway-b.key", "gateway-b.key_secret"):
        (folder / name).write_bytes((other / name).read_bytes())

    async def body() -> None:
        a = End()
        server = a.server(settings=links(other, Role.GATEWAY))
        gate = links(folder, Role.GATEWAY).keys
        assert gate is not None and gate.name == "gateway"
        (other / "decode.key").write_bytes((folder / "decode.key").read_bytes())
        assert server._settings.keys is not None
        server._settings.keys.read_again()
        client = End().client(
            await server.start(), hello=hello(Role.DECODE), settings=links(folder, Role.DECODE), to=Role.GATEWAY
        )
        await client.start()
        assert await a.next() == ("up", 9)
        await client.close()
        await server.close()

    run(body)


# --- files and options ------------------------------------------------------------------------------------------------


def test_key_files_are_private_and_kept(folder: Path) -> None:
    """Key files are readable by their owner only and never overwritten."""
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(KeysError, match="not overwritten"):
        make(folder, ["decode-b", "decode"])
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    with pytest.raises(KeysError, match="'router' is not a role"):
        make(folder, ["router"])
    folder.chmod(0o755)
    with pytest.raises(KeysError, match="chmod 700"):
        make(folder, ["decode-b"])


def test_only_own_secret_is_read(folder: Path) -> None:
    """A process reads only its own secret key, and does not show it."""
    for path in folder.glob("*.key_secret"):
        if path.name != "decode.key_secret":
            path.unlink()
    (folder / "api.key").write_text("another credential of the same unit")
    keys = Keys(folder, Role.DECODE)
    assert len(keys.secret) == 40 and keys.secret.decode() not in repr(keys)


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (lambda at: (at / "decode.key_secret").unlink(), "has no decode.key_secret"),
        (lambda at: (at / "decode.key_secret").chmod(0o644), "chmod 600"),
        (lambda at: (at / "decode.key_secret").write_text('public-key = "x"\n'), "has no secret key"),
        (lambda at: (at / "gateway.key").unlink(), "has no gateway.key"),
        (lambda at: (at / "gateway.key").write_text("public-key = short"), "gateway.key: has no public key"),
        (lambda at: (at / "gateway.key").write_text("rubbish"), "is not a file of a key"),
        (
            lambda at: (at / "gateway.key").write_bytes((at / "decode.key").read_bytes()),
            "is the same key as decode.key",
        ),
        (
            lambda at: make(at, ["decode-b", "decode-c"]) and (at / "decode.key_secret").unlink(),
            "a process has one key",
        ),
    ],
)
def test_faulty_key_folder_is_refused(folder: Path, harm, says: str) -> None:  # type: ignore[no-untyped-def]
    """A faulty key folder is refused with the fault named, and the error shows no key."""
    harm(folder)
    with pytest.raises(KeysError, match=says) as caught:
        Keys(folder, Role.DECODE)
    material = [
        line.split('"')[1] for path in folder.glob("*.key*") for line in path.read_text().splitlines() if '"' in line
    ]
    assert not any(len(key) == 40 and key in str(caught.value) for key in material)


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("tcp://127.0.0.1:1", True),
        ("tcp://127.8.8.8:1", True),
        ("tcp://[::1]:1", True),
        ("tcp://localhost:1", True),
        ("tcp://0.0.0.0:1", False),
        ("tcp://[::]:1", False),
        ("tcp://*:1", False),
        ("tcp://eth0:1", False),
        ("tcp://10.0.0.5:1", False),
        ("tcp://127.0.0.1.example.com:1", False),
    ],
)
def test_keyless_bind_needs_loopback(address: str, expected: bool) -> None:
    """An address beyond loopback is refused without keys, unless --insecure is given."""
    assert is_loopback(address) is expected
    settings = CoordinatorSettings(bind=address)
    if expected:
        assert keys_for(settings, Role.COORDINATOR, {"--bind": address}) is None
    else:
        with pytest.raises(ConfigError, match=r"^--keys: needed, since --bind"):
            keys_for(settings, Role.COORDINATOR, {"--bind": address})
    assert keys_for(CoordinatorSettings(bind=address, insecure=True), Role.COORDINATOR, {"--bind": address}) is None


def test_keys_exclude_insecure(tmp_path: Path) -> None:
    """The options --keys and --insecure together are refused, and so is an absent key folder."""
    with pytest.raises(ValueError, match="--insecure: says to go without keys"):
        CoordinatorSettings(insecure=True, keys=str(tmp_path))
    with pytest.raises(ConfigError, match=r"^--keys: there is no folder"):
        keys_for(CoordinatorSettings(keys=str(tmp_path / "none")), Role.COORDINATOR)


ZAP_REQUEST = [b"1.0", b"7", b"mine", b"127.0.0.1", b"id", b"CURVE", bytes(32)]
KEY = z85.encode(bytes(32)).decode()


@pytest.mark.parametrize(
    ("request_frames", "status", "user_id"),
    [
        (ZAP_REQUEST, b"200", KEY.encode()),
        ([*ZAP_REQUEST[:2], b"another", *ZAP_REQUEST[3:]], b"400", b""),
        ([*ZAP_REQUEST[:6], bytes(31) + b"\1"], b"400", b""),
        ([*ZAP_REQUEST[:6], bytes(31)], b"400", b""),
        ([*ZAP_REQUEST[:5], b"NULL"], b"400", b""),
        ([*ZAP_REQUEST[:5], b"PLAIN", b"name", b"password"], b"400", b""),
        ([b"2.0", *ZAP_REQUEST[1:]], b"400", b""),
        ([*ZAP_REQUEST, b"more"], b"400", b""),
        (ZAP_REQUEST[:2], b"400", b""),
    ],
)
def test_handler_admits_known_keys_only(request_frames: list[bytes], status: bytes, user_id: bytes) -> None:
    """As ZeroMQ's RFC 27 has it: what it does not understand stays out."""
    context = LoopContext()
    try:
        handler = _Handler(context.socket(zmq.REP))
        handler.lets_in["mine"] = lambda key: key == KEY
        version, number, code, _, said, metadata = handler.answer(request_frames)
        assert (version, number, code, said, metadata) == (b"1.0", b"7", status, user_id, b"")
        assert handler.answer([b"1.0"]) == []
    finally:
        context.destroy(0)


def test_pyzmq_internals_in_use_exist() -> None:
    """`LoopContext` names its sockets' class as pyzmq's own contexts do; nothing of `zmq.auth`'s handler is used."""
    assert "_socket_class" in vars(zmq.Context) and "_instance" in vars(zmq.Context), "pyzmq has other internals"
    context = LoopContext()
    try:
        assert isinstance(context.socket(zmq.PAIR), LoopSocket)
    finally:
        context.destroy(0)
    assert not hasattr(curve, "Authenticator")
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))
    assert "pyzmq>=26,<28" in project["project"]["dependencies"]
