"""Peers that send what does not end, or nothing at all."""

import asyncio
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop
import zmq

from proto.codec import encode
from proto.errors import CheckFailed
from proto.limits import MAX_FRAMES, PROTOCOL_VERSION
from proto.messages import Bye, Hello, Message, Ping, Role, StatusRequest, Submit
from proto.sampling import Sampling
from runtime.link import connections, keys, server
from runtime.link import peer as peer_module
from runtime.link.client import LinkClient
from runtime.link.keys import Keys
from runtime.link.server import LinkServer, LinkSettings, Peer
from runtime.process import loop_socket
from runtime.process.loop_socket import LoopContext
from runtime.process.zmq_sockets import close_sockets
from tests.helpers import until

FRAMES = 50_000


@pytest.fixture
def context() -> Iterator[LoopContext]:
    made = LoopContext()
    yield made
    made.destroy(0)


def a_server(settings: LinkSettings | None = None, **options: Any) -> LinkServer:
    hello = Hello(PROTOCOL_VERSION, Role.COORDINATOR, 5, "c")
    given: dict[str, Any] = {
        "accept": lambda hello: None,
        "on_up": lambda peer: None,
        "on_message": lambda *_: None,
        "on_down": lambda *_: None,
    }
    return LinkServer(bind="tcp://127.0.0.1:*", hello=hello, settings=settings or LinkSettings(), **(given | options))


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


def connect(port: int) -> socket.socket:
    """As a DEALER without keys, the handshake of ZMTP done."""
    raw = socket.create_connection(("127.0.0.1", port))
    raw.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + b"\0" + bytes(31))
    _exactly(raw, 64)
    ready = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER\x08Identity" + struct.pack(">I", 0)
    raw.sendall(b"\x04" + bytes([len(ready)]) + ready)
    _exactly(raw, _exactly(raw, 2)[1])
    return raw


def _exactly(raw: socket.socket, count: int) -> bytes:
    got = b""
    while len(got) < count:
        more = raw.recv(count - len(got))
        assert more, "closed amid the handshake"
        got += more
    return got


async def is_closed(raw: socket.socket) -> None:
    """Until the other end has closed it."""
    raw.setblocking(False)
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(20):
        try:
            while await loop.sock_recv(raw, 1 << 16):
                pass
        except ConnectionError:
            return


@pytest.mark.parametrize("kind", [zmq.ROUTER, zmq.DEALER, zmq.PAIR])
def test_excess_frames_are_dropped(context: LoopContext, kind: int) -> None:
    """Whatever kind of socket reads it, the loop has its turns, and the next message waits for microseconds a frame."""

    async def body() -> None:
        reader = context.socket(kind)
        writer = context.socket(zmq.PAIR if kind == zmq.PAIR else zmq.DEALER)
        port = reader.bind_to_random_port("tcp://127.0.0.1")
        writer.connect(f"tcp://127.0.0.1:{port}")
        writer.send_multipart([b"x"] * FRAMES)
        writer.send_multipart([b"next"])
        turns, reading, began_s = 0, asyncio.ensure_future(reader.receive()), time.thread_time()
        while not reading.done():
            await asyncio.sleep(0)
            turns += 1
        assert len(reading.result()) == reader.frames_max > MAX_FRAMES
        assert turns >= FRAMES // loop_socket.TURN_FRAMES
        assert (await reader.receive())[-1] == b"next", "the rest of the long one is not taken for a message"
        assert time.thread_time() - began_s < 20e-6 * FRAMES, "the streams of this port wait for so long"

    uvloop.run(body())


def test_cancelled_reader_leaves_no_rest(context: LoopContext) -> None:
    """A reader cancelled amid a long message does not leave its rest to the next reader."""

    async def body() -> None:
        reader, writer = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
        port = reader.bind_to_random_port("tcp://127.0.0.1")
        writer.connect(f"tcp://127.0.0.1:{port}")
        writer.send_multipart([b"x"] * FRAMES)
        writer.send_multipart([b"next"])
        reading = asyncio.ensure_future(reader.receive())
        async with asyncio.timeout(20):
            while not reader._amid:  # noqa: ASYNC110 -- nothing tells of it
                await asyncio.sleep(0)
        assert not reading.done()
        reading.cancel()
        await asyncio.wait({reading})
        assert await asyncio.wait_for(reader.receive(), 20) == [b"next"]

    uvloop.run(body())


def test_excessive_sender_is_cut_off() -> None:
    """A sender of too many frames is counted as a protocol error and cut off."""

    async def body() -> None:
        one = a_server()
        raw = await asyncio.to_thread(connect, port_of(await one.start()))
        raw.sendall(b"\x01\x01x" * 1_000 + b"\x00\x01x")
        await is_closed(raw)
        assert one.counters.protocol_errors == 1
        await one.close()
        close_sockets()

    uvloop.run(body())


def test_long_message_loses_no_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a message of very many frames is dropped, which takes many heartbeats, the links of other peers stay up."""
    monkeypatch.setattr(loop_socket, "TURN_FRAMES", 1)
    settings = LinkSettings(heartbeat_ms=50)

    async def body() -> None:
        ups: list[str] = []
        downs: list[str] = []
        one = a_server(settings, on_down=lambda peer, reason: downs.append(reason))
        address = await one.start()
        other = LinkClient(
            address=address,
            hello=Hello(PROTOCOL_VERSION, Role.OBSERVER, 9, "other"),
            on_up=lambda peer, welcome: ups.append(""),
            on_message=lambda *_: None,
            on_down=lambda peer, reason: downs.append(reason),
            settings=settings,
        )
        await other.start()
        await until(lambda: bool(ups and one.peers))
        raw = await asyncio.to_thread(connect, port_of(address))
        await asyncio.to_thread(raw.sendall, b"\x01\x01x" * (6 * FRAMES) + b"\x00\x01x")
        await until(lambda: one._socket.is_draining)
        began = asyncio.get_running_loop().time()
        await until(lambda: not one._socket.is_draining)
        assert asyncio.get_running_loop().time() - began > 0.4, "shorter than a silence that counts"
        await is_closed(raw)
        assert not downs and len(ups) == 1
        await other.close()
        await one.close()
        close_sockets()

    uvloop.run(body())


def test_endless_message_is_cut_off() -> None:
    """A message that does not end is cut off, before a link and on one."""
    frame = b"\x03" + struct.pack(">Q", 1 << 20) + bytes(1 << 20)

    async def body(says_hello: bool) -> None:
        lost: list[str] = []
        one = a_server(on_down=lambda peer, reason: lost.append(reason))
        raw = await asyncio.to_thread(connect, port_of(await one.start()))
        if says_hello:
            hello = encode(Hello(PROTOCOL_VERSION, Role.OBSERVER, 9, "x"))
            raw.sendall(bytes([0, len(hello)]) + hello)
            await until(lambda: bool(one.peers))
        raw.settimeout(20)

        def send() -> int:
            sent = 0
            try:
                while sent < 100 * connections.UNENDED_BYTES_MAX:
                    raw.sendall(frame)
                    sent += len(frame)
            except ConnectionError:
                return sent
            return -1

        sent = await asyncio.get_running_loop().run_in_executor(None, send)
        await until(lambda: one.counters.protocol_errors == 1)
        assert sent > 0, "it was never cut off"
        assert not one.peers
        assert len(lost) == says_hello and all("no end of a message" in reason for reason in lost)
        await one.close()
        close_sockets()

    for says_hello in (False, True):
        uvloop.run(body(says_hello))


def test_many_whole_messages_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many whole messages are not taken for one that does not end."""
    monkeypatch.setattr(connections, "UNENDED_BYTES_MAX", 1 << 20)

    async def body() -> None:
        got: list[Message] = []
        one = a_server(on_message=lambda peer, message, blob: got.append(message))
        address = await one.start()
        with zmq.Context() as other, other.socket(zmq.DEALER) as dealer:
            dealer.linger = 0
            dealer.connect(address)
            dealer.send(encode(Hello(PROTOCOL_VERSION, Role.OBSERVER, 9, "x")))
            for number in range(600):
                dealer.send_multipart([encode(Submit(f"r{number}", 1, "m", 4096, Sampling(1))), bytes(4 * 4096)])
                if number % 20 == 0:
                    await asyncio.sleep(0.02)
            await until(lambda: len(got) == 600)
            assert len(one.peers) == 1
            dealer.send(encode(Bye("done")))
        await one.close()
        close_sockets()

    uvloop.run(body())


def test_connection_without_link_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection without a Hello, or with an ended link, is closed and counted as silent."""

    async def body() -> None:
        one = a_server()
        one._connections._hello_s = 0.5
        port = port_of(await one.start())
        silent, refused = await asyncio.gather(*(asyncio.to_thread(connect, port) for _ in range(2)))
        refused.sendall(b"\x00\x01x")
        await asyncio.gather(is_closed(silent), is_closed(refused))
        assert one.counters.silent == {"": 2}
        await one.close()
        close_sockets()

    uvloop.run(body())


@pytest.mark.parametrize("late_s", [0.0, 0.3])
def test_early_hello_keeps_its_link(late_s: float) -> None:
    """A link stays if its Hello comes before the monitor reports the connection."""

    async def body() -> None:
        one = a_server()
        one._connections._hello_s = 0.5
        opened = one._opened
        one._opened = lambda descriptor: asyncio.get_running_loop().call_later(late_s, opened, descriptor)  # type: ignore[assignment,method-assign]
        with zmq.Context() as theirs, theirs.socket(zmq.DEALER) as dealer:
            dealer.linger = 0
            dealer.connect(await one.start())
            dealer.send(encode(Hello(PROTOCOL_VERSION, Role.OBSERVER, 10, "x")))
            for _ in range(15):
                await asyncio.sleep(0.1)
                dealer.send(encode(Ping()))
            assert [peer.incarnation for peer in one.peers.values()] == [10]
        await one.close()
        close_sockets()

    uvloop.run(body())


def test_silent_connections_count_by_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Silent connections are counted by their key and count towards its limit."""
    folder = tmp_path / "keys"
    keys.make(folder, list(keys.ROLES))
    monkeypatch.setattr(server, "HELLO_S", 1.0)

    async def body() -> None:
        one = a_server(LinkSettings(keys=Keys(folder, Role.COORDINATOR), peers_max=3))
        one._connections._hello_s = 1.0
        address = await one.start()
        own = Keys(folder, Role.OBSERVER)
        with zmq.Context() as other:
            sockets = [other.socket(zmq.DEALER) for _ in range(5)]
            for dealer in sockets:
                dealer.linger = 0
                dealer.reconnect_ivl = -1
                dealer.curve_publickey, dealer.curve_secretkey = own.public, own.secret
                dealer.curve_serverkey = own.of(Role.COORDINATOR)[0]
                dealer.connect(address)
            await until(lambda: one.counters.too_many >= 2)
            await until(lambda: one.counters.silent["client"] >= 3)
            assert one.counters.turned_away()["too_many"] == 2 and not one._gate._let_in
            other.destroy(0)
        await one.close()
        close_sockets()

    uvloop.run(body())


@pytest.mark.parametrize("where", ["read", "accept", "owner"])
def test_early_bug_ends_one_link(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug met before anything changed ends one link only."""

    async def body() -> None:
        bad = 11

        def accept(hello: Hello) -> str | None:
            assert not (where == "accept" and hello.incarnation == bad), "planted"
            return None

        def message(peer: Peer, *_: object) -> None:
            if where == "owner" and peer.incarnation == bad:
                raise CheckFailed("planted")

        if where == "read":

            def fails(frames: list[bytes], version: int) -> Any:
                raise ZeroDivisionError("planted")

            monkeypatch.setattr(peer_module, "read", fails)
        lost: list[int] = []
        one = a_server(accept=accept, on_message=message, on_down=lambda peer, reason: lost.append(peer.incarnation))
        address = await one.start()
        with zmq.Context() as other, other.socket(zmq.DEALER) as good, other.socket(zmq.DEALER) as other_one:
            for dealer, incarnation in ((good, 10), (other_one, bad)):
                dealer.linger = 0
                dealer.connect(address)
                dealer.send(encode(Hello(PROTOCOL_VERSION, Role.OBSERVER, incarnation, "x")))
            await until(lambda: len(one.peers) + one.counters.failed_checks == 2)
            other_one.send(encode(StatusRequest()))
            await until(lambda: one.counters.failed_checks == 1)
            assert lost == ([] if where == "accept" else [bad])
            assert [peer.incarnation for peer in one.peers.values()] == [10]
        await one.close()
        close_sockets()

    uvloop.run(body())


def test_unended_messages_share_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unended messages of all connections share one limit, and the largest are dropped first."""
    received = dict.fromkeys(range(10), 0)
    dropped: list[int] = []
    monkeypatch.setattr(connections, "received_bytes", received.__getitem__)
    watched = connections.Connections(lambda descriptor, why: dropped.append(descriptor), lambda _: None, hello_s=None)
    now = 1.0
    for number in received:
        watched.opened(number)
    watched.look(now)
    for number in received:
        received[number] = connections.UNENDED_BYTES_MAX // 2 + number
    watched.look(now + connections.LOOK_S)
    assert dropped == [9, 8, 7], "the largest, until the others are few enough"
