"""Links between processes of different protocol versions, over real sockets: the other end is played message by message."""

import asyncio

import msgpack
import pytest
import zmq
import zmq.asyncio

from proto.codec import encode
from proto.limits import PROTOCOL_VERSION
from proto.messages import Hello, Ping
from tests.helpers import until
from tests.runtime.test_link import CANCEL, End, run

NEXT, TOO_NEW = PROTOCOL_VERSION + 1, PROTOCOL_VERSION + 2


def of_version(version: int) -> bytes:
    """A Hello with fields that this version does not know."""
    plain = msgpack.unpackb(encode(Hello(version=version, role="gateway", incarnation=5, name="other")))  # type: ignore[arg-type]
    packed: bytes = msgpack.packb([*plain, *[{"new": 1}] * 20])
    return packed


LONG_CANCEL: bytes = msgpack.packb([*msgpack.unpackb(encode(CANCEL)), "new", ["fields"]])
NOVEL: bytes = msgpack.packb(["Novel", 1, 2])


def test_server_accepts_next_version_client() -> None:
    """A server accepts a client of the next version and ignores messages and fields it does not know."""

    async def body() -> None:
        end = End()
        server = end.server()
        address = await server.start()
        with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.linger = 0
            socket.connect(address)
            await socket.send(of_version(NEXT))
            assert await end.next() == ("up", 5)
            assert msgpack.unpackb(await socket.recv()) == ["Welcome", 7, 50, PROTOCOL_VERSION]
            assert end.peer is not None and end.peer.version == NEXT
            for frame in (NOVEL, LONG_CANCEL, encode(Ping())):
                await socket.send(frame)
            assert await end.next() == ("message", CANCEL)
            assert msgpack.unpackb(await socket.recv()) == ["Pong"]
            assert server.counters.unknown_messages == 1 and server.counters.protocol_errors == 0
        await server.close()

    run(body)


def test_same_version_client_sends_no_unknowns() -> None:
    """An unknown message of a client of the same version is a protocol error."""

    async def body() -> None:
        end = End()
        server = end.server()
        address = await server.start()
        with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.linger = 0
            socket.connect(address)
            await socket.send(msgpack.packb(["Hello", PROTOCOL_VERSION, "gateway", 5, "other"]))
            assert await end.next() == ("up", 5)
            await socket.send(NOVEL)
            kind, reason = await end.next()
            assert kind == "down" and "protocol error" in reason
        assert server.counters.unknown_messages == 0 and server.counters.protocol_errors == 1
        await server.close()

    run(body)


@pytest.mark.parametrize("version", [0, TOO_NEW, 99])
def test_other_versions_are_refused(version: int) -> None:
    """A server refuses a Hello of any other version and names both versions."""

    async def body() -> None:
        end = End()
        server = end.server()
        address = await server.start()
        with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.linger = 0
            socket.connect(address)
            await socket.send(of_version(version))
            name, reason = msgpack.unpackb(await socket.recv())
            assert name == "Refused" and f"version {version};" in reason and f"speaks {PROTOCOL_VERSION}" in reason
        assert server.counters.refused == 1 and server.counters.protocol_errors == 0 and end.events.empty()
        await server.close()

    run(body)


def test_client_accepts_next_version_server() -> None:
    """A client works with a server of the next version and ignores what it does not know."""

    async def body() -> None:
        end = End()
        with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as socket:
            socket.linger = 0
            port = socket.bind_to_random_port("tcp://127.0.0.1")
            client = end.client(f"tcp://127.0.0.1:{port}")
            await client.start()
            who, hello = await socket.recv_multipart()
            assert msgpack.unpackb(hello)[:2] == ["Hello", PROTOCOL_VERSION]
            for frame in (msgpack.packb(["Welcome", 7, 50, NEXT, "new"]), NOVEL, LONG_CANCEL):
                await socket.send_multipart([who, frame])
            assert await end.next() == ("up", 7)
            assert end.peer is not None and end.peer.version == NEXT
            assert await end.next() == ("message", CANCEL)
            assert client.counters.unknown_messages == 1 and client.counters.protocol_errors == 0
            await client.close()

    run(body)


@pytest.mark.parametrize("version", [8, TOO_NEW])
def test_client_leaves_other_version_server(version: int) -> None:
    """A server may work with more versions than its client."""

    async def body() -> None:
        end = End()
        with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as socket:
            socket.linger = 0
            port = socket.bind_to_random_port("tcp://127.0.0.1")
            client = end.client(f"tcp://127.0.0.1:{port}")
            await client.start()
            who, _ = await socket.recv_multipart()
            await socket.send_multipart([who, msgpack.packb(["Welcome", 7, 50, version, "new"])])
            name, reason = msgpack.unpackb((await socket.recv_multipart())[1])
            assert name == "Bye" and f"version {version};" in reason and f"speaks {PROTOCOL_VERSION}" in reason
            await until(lambda: client.last_error == reason)
            assert end.events.empty() and client.counters.refused >= 1
            async with asyncio.timeout(30):
                again = await socket.recv_multipart()  # it tries again: the server may be upgraded meanwhile
            assert msgpack.unpackb(again[1])[0] == "Hello"
            await client.close()

    run(body)
