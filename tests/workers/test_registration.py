"""A worker's standing link: what is said while it is being set up is not lost, nor told twice."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import uvloop

from proto.codec import decode
from proto.limits import PROTOCOL_VERSION
from proto.messages import Finished, Hello, Message, Released, Role, Welcome
from proto.parts import Capacity, Held
from proto.status import KvPair, KvPairs
from runtime.link import waiting
from runtime.link.server import LinkServer, LinkSettings, Peer, is_orderly
from runtime.process import clock, log
from runtime.process.zmq_sockets import close_sockets
from runtime.settings.workers import WorkerSettings
from worker.registration import Registration
from worker.service import IN_DOUBT_S

HELLO = Hello(PROTOCOL_VERSION, Role.DECODE, 5, "decode-0", "m", "f", "tcp://h:1", Capacity(10, 16, 4, 100))


class Worker:
    """What is registered. What it is told goes nowhere unless a callback is given."""

    def __init__(self, **callbacks: Callable[..., Any]) -> None:
        self.callbacks = callbacks

    def _call(self, name: str, *arguments: object) -> Any:
        return self.callbacks[name](*arguments) if name in self.callbacks else None

    def held(self) -> tuple[Held, ...]:
        return self._call("held") or ()

    def is_idle(self) -> bool:
        return True

    is_quiet = is_idle

    def order(self, message: Message, blob: bytes) -> None:
        self._call("order", message, blob)

    def registered(self) -> None:
        self._call("registered")

    def coordinator_lost(self, reason: str) -> None:
        self._call("coordinator_lost", reason)

    def flip_ordered(self, role: Role | None) -> None:
        self._call("flip_ordered", role)

    def may_flip(self) -> None:
        self._call("may_flip")


def test_early_messages_follow_the_welcome() -> None:
    """Messages sent between Hello and Welcome reach the coordinator after the Welcome."""

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
            Worker(), settings=settings, hello=HELLO, log=log.get("crossdock"), links=LinkSettings(heartbeat_ms=50)
        )
        registration.send(Released("before-hello", 1))
        hello = registration._hello_now()
        assert hello.held == ()
        registration.send(Released("after-hello", 1))

        def send(_peer: Peer, frames: list[bytes]) -> bool:
            return bool(sent.append(frames)) or True

        sent: list[list[bytes]] = []
        registration._up(Peer(7, hello, send), Welcome(7, 50, 1))
        assert len(sent) == 1 and b"after-hello" in sent[0][0]
        await server.close()

    uvloop.run(body())


def test_finished_requests_reach_next_coordinator() -> None:
    """Its bill would be written off at an estimate otherwise."""

    def ignore(*_: object) -> None:
        pass

    settings = WorkerSettings(role="decode", model="m", coordinator="tcp://127.0.0.1:9")
    held = [Held("goes-on", 1, 5, 1)]

    async def body() -> None:
        registration = Registration(
            Worker(held=lambda: tuple(held)),
            settings=settings,
            hello=HELLO,
            log=log.get("crossdock"),
            links=LinkSettings(),
        )

        def send(_peer: Peer, frames: list[bytes]) -> bool:
            return bool(sent.append(frames)) or True

        sent: list[list[bytes]] = []
        peer = Peer(7, HELLO, send)
        registration._up(peer, Welcome(7, 50, 1))
        registration.send(Finished("before", 1, 9, 400))
        registration._down(peer, "lost")
        registration.send(Finished("meanwhile", 2, 11, 500, 30))
        registration.send(Released("goes-on", 1))  # the next registration says what is held
        for _ in range(2):  # a handshake may fail
            assert registration._hello_now().held == tuple(held)
        registration.send(Finished("in-between", 1, 3, 500))
        sent.clear()
        registration._up(peer, Welcome(8, 50, 1))
        told = [decode(frames)[0] for frames in sent]
        assert [one.request_id for one in told if isinstance(one, Finished)] == ["before", "meanwhile", "in-between"]
        assert len(told) == 3

    uvloop.run(body())


def test_finished_requests_are_forgotten_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of thousands of requests an hour, for as long as a worker lives, would be memory that grows."""
    now = [100.0]
    monkeypatch.setattr(clock, "now", lambda: now[0])
    settings = WorkerSettings(role="decode", model="m", coordinator="tcp://127.0.0.1:9")
    told: list[Message] = []

    def send(_peer: Peer, frames: list[bytes]) -> bool:
        told.append(decode(frames)[0])
        return True

    async def body() -> None:
        registration = Registration(
            Worker(), settings=settings, hello=HELLO, log=log.get("crossdock"), links=LinkSettings()
        )
        peer = Peer(7, HELLO, send)
        registration._up(peer, Welcome(7, 50, 1))
        for second in range(100):
            now[0] += 1
            registration.send(Finished(f"r{second}", 1, 1, 10))
        assert len(registration._finished) <= IN_DOUBT_S + 1
        registration._down(peer, "lost")
        for minute in range(3):
            now[0] += 60
            registration.send(Finished(f"m{minute}", 1, 1, 10))
        told.clear()
        registration._up(peer, Welcome(8, 50, 1))
        names = [one.request_id for one in told if isinstance(one, Finished)]
        assert names == [f"r{second}" for second in range(94, 100)] + ["m0", "m1", "m2"]

    uvloop.run(body())


def test_worker_facts_reach_each_coordinator() -> None:
    """What is said while it is away is dropped, since the next Hello counts it; what no Hello says needs the callback."""

    def send(_peer: Peer, frames: list[bytes]) -> bool:
        return bool(told.append(decode(frames)[0])) or True

    told: list[Message] = []
    pairs = KvPairs((KvPair(9, "shm", ""),))

    async def body() -> None:
        def again() -> None:
            registration.send(pairs)

        registration = Registration(
            Worker(registered=again),
            settings=WorkerSettings(role="prefill", model="m", coordinator="tcp://127.0.0.1:9"),
            hello=HELLO,
            log=log.get("crossdock"),
            links=LinkSettings(),
        )
        peer = Peer(7, HELLO, send)
        registration._up(peer, Welcome(7, 50, 1))
        registration._down(peer, "lost")
        registration.send(pairs)
        registration._hello_now()
        registration._up(peer, Welcome(8, 50, 1))
        assert told == [pairs, pairs]

    uvloop.run(body())


class HeardLog:
    """What was logged, as it comes."""

    def __init__(self) -> None:
        self.lines: asyncio.Queue[tuple[str, str]] = asyncio.Queue()

    def info(self, event: str, **_: object) -> None:
        self.lines.put_nowait(("info", event))

    def warning(self, event: str, **_: object) -> None:
        self.lines.put_nowait(("warning", event))

    async def next(self) -> tuple[str, str]:
        return await asyncio.wait_for(self.lines.get(), 20)


def coordinator(bind: str) -> LinkServer:
    return LinkServer(
        bind=bind,
        hello=Hello(PROTOCOL_VERSION, Role.COORDINATOR, 7, "coordinator"),
        accept=lambda _: None,
        on_up=lambda _: None,
        on_message=lambda *_: None,
        on_down=lambda *_: None,
        settings=LinkSettings(heartbeat_ms=50),
    )


def test_waiting_for_coordinator_is_logged(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A worker logs that it waits until the coordinator is there, and its goodbye is no loss."""
    monkeypatch.setattr(waiting, "FIRST_S", 0.0)
    monkeypatch.setattr(waiting, "AGAIN_S", 0.01)
    address = f"ipc://{tmp_path}/control"
    settings = WorkerSettings(role="decode", model="m", heartbeat_ms=50).model_copy(update={"coordinator": address})
    said = f"waiting for the coordinator at {address}"

    async def body() -> None:
        heard: Any = HeardLog()
        one = Registration(
            Worker(coordinator_lost=lost.append),
            settings=settings,
            hello=HELLO,
            log=heard,
            links=LinkSettings(heartbeat_ms=50),
        )
        await one.start(HELLO.address)
        assert [await heard.next() for _ in range(3)] == [("info", said), ("warning", said), ("warning", said)]
        server = coordinator(address)
        await server.start()
        while (line := await heard.next()) == ("warning", said):
            pass
        assert line == ("info", "registered")
        assert heard.lines.empty()
        await server.close()
        assert [await heard.next() for _ in range(2)] == [("info", "coordinator left"), ("info", said)]
        assert is_orderly(lost[0])
        await one.close()
        close_sockets()

    lost: list[str] = []
    uvloop.run(body())
