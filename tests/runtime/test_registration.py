"""A worker's standing link: what is said while it is being set up is not lost, nor told twice."""

import asyncio

import uvloop

from proto.limits import PROTOCOL_VERSION
from proto.messages import Capacity, Hello, Message, Released, Role, Welcome
from runtime import log
from runtime.link import LinkServer, LinkSettings, Peer
from runtime.registration import Registration
from runtime.settings import WorkerSettings

HELLO = Hello(PROTOCOL_VERSION, Role.DECODE, 5, "decode-0", "m", "f", "tcp://h:1", Capacity(10, 16, 4, 100))


def test_what_is_said_between_hello_and_welcome_is_told_after_it() -> None:
    async def body() -> None:
        told: asyncio.Queue[Message] = asyncio.Queue()

        def ignore(*_: object) -> None:
            pass

        server = LinkServer(
            bind="tcp://127.0.0.1:*",
            hello=Hello(PROTOCOL_VERSION, Role.COORDINATOR, 7, "coordinator"),
            accept=lambda _: None,
            on_up=ignore,
            on_message=lambda _p, message, _b: told.put_nowait(message),
            on_down=ignore,
            settings=LinkSettings(heartbeat_ms=50),
        )
        settings = WorkerSettings(role="decode", model="m", coordinator=await server.start(), heartbeat_ms=50)
        registration = Registration(
            settings=settings, hello=HELLO, held=lambda: (), on_message=ignore, on_lost=ignore, log=log.get("crossdock")
        )
        registration.send(Released("before-hello", 1))
        hello = registration._hello_now()
        assert hello.held == ()
        registration.send(Released("after-hello", 1))

        def send(_peer: Peer, frames: list[bytes]) -> bool:
            return bool(sent.append(frames)) or True

        sent: list[list[bytes]] = []
        registration._up(Peer(7, hello, send), Welcome(7, 50))
        assert len(sent) == 1 and b"after-hello" in sent[0][0]
        await server.close()

    uvloop.run(body())
