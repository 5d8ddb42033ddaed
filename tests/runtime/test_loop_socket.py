"""A link's socket: no message stays unread because a send took libzmq's signal back, and closing lets go of the loop."""

import asyncio
import time
from collections.abc import Iterator

import pytest
import uvloop
import zmq

from runtime.process.loop_socket import LoopContext, LoopSocket

WAIT_S = 20


@pytest.fixture
def context() -> Iterator[LoopContext]:
    made = LoopContext()
    yield made
    made.destroy(0)  # or what a failed test leaves unsent would hold up whoever collects it


def pair(context: LoopContext) -> tuple[LoopSocket, LoopSocket]:
    one, other = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    port = one.bind_to_random_port("tcp://127.0.0.1")
    other.connect(f"tcp://127.0.0.1:{port}")
    return one, other


@pytest.mark.parametrize("run", [uvloop.run, asyncio.run])
def test_message_beside_send_is_read(run, context):
    """A message that arrives just before a send is read by the waiting reader."""

    async def body() -> None:
        one, other = pair(context)
        other.try_send([b"connected"])
        assert await asyncio.wait_for(one.receive(), WAIT_S) == [b"connected"]
        for number in range(20):
            reading = asyncio.ensure_future(one.receive())
            await asyncio.sleep(0)  # it waits now
            assert other.try_send([b"%d" % number, b"b"]) is None
            time.sleep(0.005)  # noqa: ASYNC251 -- the message is there, and the loop has not looked
            assert one.try_send([b"from this end"]) is None
            assert await asyncio.wait_for(reading, WAIT_S) == [b"%d" % number, b"b"]
            assert await asyncio.wait_for(other.receive(), WAIT_S) == [b"from this end"]
        one.close(0)
        other.close(0)

    run(body())


@pytest.mark.parametrize("run", [uvloop.run, asyncio.run])
def test_message_beside_failed_send_is_read(run, context):
    """To a peer that is gone, as links do to find out."""

    async def body() -> None:
        server, client = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
        server.setsockopt(zmq.ROUTER_MANDATORY, 1)
        port = server.bind_to_random_port("tcp://127.0.0.1")
        client.connect(f"tcp://127.0.0.1:{port}")
        for number in range(20):
            reading = asyncio.ensure_future(server.receive())
            await asyncio.sleep(0)
            assert client.try_send([b"%d" % number]) is None
            time.sleep(0.005)  # noqa: ASYNC251 -- as above
            assert "send failed" in (server.try_send([b"nobody", b"x"]) or "")
            assert (await asyncio.wait_for(reading, WAIT_S))[1] == b"%d" % number
        server.close(0)
        client.close(0)

    run(body())


@pytest.mark.parametrize("run", [uvloop.run, asyncio.run])
def test_pending_messages_need_no_loop_turn(run, context):
    """Messages that are there already are read without a turn of the event loop."""

    async def body() -> None:
        one, other = pair(context)
        other.try_send([b"first"])
        assert await asyncio.wait_for(one.receive(), WAIT_S) == [b"first"]
        for number in range(50):
            other.try_send([b"%d" % number])
        other.try_send([b"last"])
        await asyncio.sleep(0.2)
        turns: list[int] = []
        asyncio.get_running_loop().call_soon(turns.append, 1)
        assert [await one.receive() for _ in range(51)][-1] == [b"last"]
        assert not turns
        waiting = asyncio.ensure_future(one.receive())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait({waiting})
        other.try_send([b"after a reader that left"])
        assert await asyncio.wait_for(one.receive(), WAIT_S) == [b"after a reader that left"]
        one.close(0)
        other.close(0)
        assert "send failed" in (other.try_send([b"x"]) or "")

    run(body())
