"""Two ends over real sockets on loopback."""

import asyncio
import contextlib
import os
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import uvloop
import zmq
import zmq.asyncio

from proto.codec import encode
from proto.errors import CancelReason, RemoteProtocolError
from proto.limits import PROTOCOL_VERSION
from proto.messages import Bye, Cancel, Hello, Message, Ping, Role, StatusRequest, Welcome
from runtime.link.client import LinkClient
from runtime.link.server import LinkServer, LinkSettings, Peer, is_orderly
from runtime.process import zmq_sockets
from runtime.process.zmq_sockets import close_sockets
from tests.helpers import until

FAST = LinkSettings(heartbeat_ms=50, reconnect_ms=10, reconnect_ms_max=50, handshake_timeout_ms=2_000)
CANCEL = Cancel("r", 1, CancelReason.DISCONNECTED)


def hello(name: str, incarnation: int = 1, version: int = PROTOCOL_VERSION) -> Hello:
    return Hello(version, Role.GATEWAY, incarnation, name)


class End:
    """Records what one end of a link sees."""

    def __init__(self) -> None:
        self.events: asyncio.Queue[tuple[str, Any]] = asyncio.Queue()
        self.peer: Peer | None = None
        self.refusal: str | None = None

    def server(self, **kwargs: Any) -> LinkServer:
        options: dict[str, Any] = {
            "bind": "tcp://127.0.0.1:*",
            "hello": hello("server", 7),
            "accept": lambda _: self.refusal,
            "on_up": self.up,
            "on_message": self.message,
            "on_down": self.down,
            "settings": FAST,
        }
        return LinkServer(**(options | kwargs))

    def client(self, address: str, **kwargs: Any) -> LinkClient:
        options: dict[str, Any] = {
            "address": address,
            "hello": hello("client", 9),
            "on_up": self.up,
            "on_message": self.message,
            "on_down": self.down,
            "settings": FAST,
        }
        return LinkClient(**(options | kwargs))

    def up(self, peer: Peer, welcome: Welcome | None = None) -> None:
        self.peer = peer
        self.events.put_nowait(("up", peer.incarnation))

    def message(self, peer: Peer, message: Message, blob: bytes) -> None:
        if isinstance(message, StatusRequest):
            raise RemoteProtocolError("not here")
        self.events.put_nowait(("message", message))

    def down(self, peer: Peer, reason: str) -> None:
        self.peer = None
        self.events.put_nowait(("down", reason))

    async def next(self) -> tuple[str, Any]:
        return await asyncio.wait_for(self.events.get(), 30)


def run(body: Callable[[], Awaitable[None]]) -> None:
    async def scene() -> None:
        try:
            await asyncio.wait_for(body(), 60)
        finally:
            close_sockets()  # what a failure leaves open would hold up the end of the tests

    uvloop.run(scene())


def test_link_carries_messages_and_goodbye() -> None:
    """A link comes up, carries messages both ways and ends with a goodbye."""

    async def body() -> None:
        a, b = End(), End()
        server = a.server()
        client = b.client(await server.start())
        await client.start()
        assert await a.next() == ("up", 9)
        assert await b.next() == ("up", 7)
        assert b.peer is not None and a.peer is not None
        assert b.peer.send(CANCEL) and a.peer.send(CANCEL)
        assert await a.next() == ("message", CANCEL)
        assert await b.next() == ("message", CANCEL)
        await client.close()
        kind, reason = await a.next()
        assert kind == "down" and "goodbye" in reason
        assert (await b.next())[0] == "down"
        await server.close()

    run(body)


def test_client_follows_to_the_next_address() -> None:
    """Of several addresses, a client finds the one where somebody listens, also where one answers nothing."""

    async def body() -> None:
        a, b = End(), End()
        with socket.socket() as closed, socket.socket() as silent:
            closed.bind(("127.0.0.1", 0))
            silent.bind(("127.0.0.1", 0))
            silent.listen()
            first, second = (f"tcp://127.0.0.1:{one.getsockname()[1]}" for one in (closed, silent))
            server = a.server()
            address = await server.start()
            client = b.client(f"{first},{second},{address}", settings=LinkSettings(heartbeat_ms=FAST.heartbeat_ms))
            began = time.monotonic()
            await client.start()
            assert await b.next() == ("up", 7) and client.address == address
            assert time.monotonic() - began < 3.0
            await server.close()
            assert (await b.next())[0] == "down"
            again = a.server(bind=second.replace("127.0.0.1", "127.0.0.2"))
            client._addresses[1] = await again.start()
            assert await b.next() == ("up", 7) and client.address != address
            await client.close()
            await again.close()

    run(body)


def test_failed_attempts_leak_no_descriptors() -> None:
    """A client that tries in vain to connect leaves no file descriptor open."""

    async def body() -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))  # and nobody listens
            settings = LinkSettings(reconnect_ms=1, reconnect_ms_max=1)
            client = End().client(f"tcp://127.0.0.1:{taken.getsockname()[1]}", hello=tried, settings=settings)
            await client.start()
            await until(lambda: len(tries) > 5)
            before = len(os.listdir("/proc/self/fd"))
            await until(lambda: len(tries) > 45)
            await client.close()
        # Sockets that linger are closed a moment later.
        await until(lambda: len(os.listdir("/proc/self/fd")) <= before)

    tries: list[int] = []

    def tried() -> Hello:
        tries.append(1)
        return hello("client", 9)

    run(body)


def test_orderly_server_exit_is_no_loss() -> None:
    """Its last words and the end of its connection come together, and the words count."""

    async def body() -> None:
        for _ in range(5):
            a, b = End(), End()
            server = a.server()
            client = b.client(await server.start())
            await client.start()
            assert await b.next() == ("up", 7)
            await server.close()
            threading.Event().wait(0.03)  # a busy process reads late
            kind, reason = await b.next()
            assert kind == "down" and is_orderly(reason), reason
            await client.close()

    run(body)


@pytest.mark.parametrize("turns", range(6))
def test_client_closes_during_a_loss(turns: int) -> None:
    """As when a whole cluster stops: the coordinator's goodbye and our own end come together."""

    async def body() -> None:
        a, b = End(), End()
        server = a.server()
        client = b.client(await server.start())
        await client.start()
        assert await b.next() == ("up", 7)
        client._give_up("gone")
        for _ in range(turns):
            await asyncio.sleep(0)
        await client.close()
        await server.close()

    run(body)


@pytest.mark.parametrize("cause", ["role", "version"])
def test_refusal_reaches_both_ends(cause: str) -> None:
    """A refused client learns the reason, and the server counts the refusal."""

    async def body() -> None:
        a, b = End(), End()
        a.refusal = "wrong fingerprint" if cause == "role" else None
        server = a.server()
        client = b.client(
            await server.start(), hello=hello("client", 9, version=PROTOCOL_VERSION if cause == "role" else 99)
        )
        await client.start()
        await until(lambda: bool(client.last_error))
        assert ("wrong fingerprint" if cause == "role" else "version 99") in client.last_error
        assert server.counters.refused >= 1 and a.events.empty() and b.events.empty()
        await client.close()
        await server.close()

    run(body)


def test_refused_connection_is_noticed_at_once() -> None:
    """A refused connection is noticed without waiting for the handshake timeout."""

    async def body() -> None:
        client = End().client("tcp://127.0.0.1:1", settings=LinkSettings(handshake_timeout_ms=600_000))
        await client.start()
        await until(lambda: bool(client.last_error))
        assert "127.0.0.1:1" in client.last_error
        await client.close()

    run(body)


def test_protocol_error_ends_one_link_only() -> None:
    """A protocol error ends the link of one peer only, and that peer comes back."""

    async def body() -> None:
        a, b, c = End(), End(), End()
        server = a.server()
        address = await server.start()
        good, bad = b.client(address), c.client(address, hello=hello("bad", 11))
        await good.start()
        assert (await b.next()) == ("up", 7)
        await bad.start()
        assert (await c.next()) == ("up", 7)
        assert c.peer is not None and c.peer.send(StatusRequest())
        kind, reason = await c.next()
        assert kind == "down" and "not here" in reason
        assert await c.next() == ("up", 7)
        assert b.peer is not None and server.counters.protocol_errors == 1
        await good.close()
        await bad.close()
        await server.close()

    run(body)


def test_silent_peer_is_lost() -> None:
    """A silent peer is lost, and is told to start over if it speaks again."""

    async def body() -> None:
        a = End()
        server = a.server()
        address = await server.start()
        context = zmq.asyncio.Context()
        socket = context.socket(zmq.DEALER)
        socket.connect(address)
        await socket.send(encode(hello("mute", 5)))
        assert await a.next() == ("up", 5)
        kind, reason = await a.next()
        assert kind == "down" and "no heartbeat" in reason
        await socket.send(encode(Ping()))
        answers = [await asyncio.wait_for(socket.recv(), 30) for _ in range(3)]
        assert b"Hello first" in answers[-1]
        socket.close(0)
        context.term()
        await server.close()

    run(body)


def test_client_follows_shorter_heartbeat() -> None:
    """A client with a longer heartbeat than its server's is heard often enough."""

    async def body() -> None:
        end, far = End(), End()
        server = far.server()
        client = end.client(await server.start(), settings=replace(FAST, heartbeat_ms=5_000))
        await client.start()
        assert (await end.next())[0] == "up"
        heard = server.counters.messages_in
        await until(lambda: server.counters.messages_in > heard + 20)
        assert server.counters.lost == 0
        await client.close()
        await server.close()

    run(body)


def test_client_reconnects_to_new_server(tmp_path: Path) -> None:
    """A client notices that its server is gone and connects to the next one at the same address."""
    address = f"ipc://{tmp_path}/port"  # nobody else can take it in between

    async def body() -> None:
        a, b = End(), End()
        server = a.server(bind=address)
        await server.start()
        client = b.client(address)
        await client.start()
        assert await b.next() == ("up", 7)
        await server.close()
        assert (await b.next())[0] == "down"
        again = End().server(bind=address, hello=hello("server", 8))
        await again.start()
        assert await b.next() == ("up", 8)
        await client.close()
        await again.close()

    run(body)


def test_message_flood_leaves_loop_turns() -> None:
    """A flood of messages leaves turns of the event loop to other tasks."""

    async def body() -> None:
        a, b = End(), End()
        server = a.server()
        client = b.client(await server.start())
        await client.start()
        assert await b.next() == ("up", 7)
        turns = 0

        async def turn() -> None:
            nonlocal turns
            while True:
                await asyncio.sleep(0)
                turns += 1

        turning = asyncio.create_task(turn())
        assert b.peer is not None
        for _ in range(5_000):
            b.peer.send(CANCEL)
        await until(lambda: server.counters.messages_in >= 5_000)
        turning.cancel()
        assert turns >= 50
        await client.close()
        await server.close()

    run(body)


def test_peers_on_one_connection_end_once() -> None:
    """The second comes over the connection of the first, before the loss of that one could be told."""

    async def body() -> None:
        ups: list[Peer] = []
        downs: list[Peer] = []

        def fill(peer: Peer, _message: Message, _blob: bytes) -> None:
            while peer.send(CANCEL):
                pass
            time.sleep(0.1)  # what else it said is there now

        server = End().server(
            on_up=ups.append,
            on_message=fill,
            on_down=lambda peer, _: downs.append(peer),
            settings=replace(FAST, queue_messages_max=2),
        )
        context = zmq.asyncio.Context()
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.RCVHWM, 1)
        socket.connect(await server.start())
        for message in (hello("first", 5), CANCEL, Bye("leaving"), hello("second", 6)):
            await socket.send(encode(message))
        await until(lambda: len(downs) == 2)
        assert downs == ups and not server.peers
        socket.close(0)
        context.term()
        await server.close()

    run(body)


def test_closed_connection_is_noticed_at_once() -> None:
    """A closed connection is noticed without waiting for a heartbeat."""

    async def body() -> None:
        a = End()
        server = a.server(settings=LinkSettings(heartbeat_ms=60_000))
        address = await server.start()
        context = zmq.asyncio.Context()
        socket = context.socket(zmq.DEALER)
        socket.connect(address)
        await socket.send(encode(hello("short-lived", 5)))
        assert await a.next() == ("up", 5)
        socket.close(0)
        kind, reason = await a.next()
        assert kind == "down" and "unreachable" in reason.lower()
        context.term()
        await server.close()

    run(body)


@pytest.mark.parametrize("opening", [b"", b"\xff" + 8 * b"\0" + b"\x7f\x03"], ids=["silent", "half a greeting"])
def test_stalled_handshake_is_closed(opening: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """libzmq would keep it for 30 s, and with many of them the process would have no descriptor left."""
    monkeypatch.setattr(zmq_sockets, "HANDSHAKE_MS", 200)

    async def body() -> None:
        server = End().server()
        port = int((await server.start()).rsplit(":", 1)[1])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(opening)
        async with asyncio.timeout(10):
            with contextlib.suppress(ConnectionError):
                await reader.read(-1)
        writer.close()
        await server.close()

    run(body)


def test_garbage_is_counted() -> None:
    """Garbage on a connection is counted and disturbs no other link."""

    async def body() -> None:
        a, b = End(), End()
        server = a.server()
        address = await server.start()
        client = b.client(address)
        await client.start()
        assert await b.next() == ("up", 7)
        context = zmq.asyncio.Context()
        socket = context.socket(zmq.DEALER)
        socket.connect(address)
        for junk in (b"", b"\x91" * 50_000, b"\xff", encode(hello("x"))[:-1]):
            await socket.send(junk)
        await socket.send_multipart([b"a", b"b", b"c"])
        await until(lambda: server.counters.protocol_errors >= 5)
        assert len(server.peers) == 1 and b.events.empty()
        socket.close(0)
        context.term()
        await client.close()
        await server.close()

    run(body)
