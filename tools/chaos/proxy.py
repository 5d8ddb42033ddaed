"""A TCP proxy that makes a bad network of a good one, and a cluster whose processes reach each other through it.

A lost packet on a TCP connection delays everything behind it by a retransmission: so a chunk in twenty is held for 200 to 400
ms more, and those behind it with it. Duplicated segments never reach a program, so there is nothing to make of them here;
doubled frames are the simulation's (hostile seeds). A partition holds what is sent in one direction: nothing
arrives, nobody is told, and what was not given up meanwhile arrives when it is over, as TCP would have it.
"""

import asyncio
import random
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.local.ports import free_port
from tools.chaos.cluster import Cluster, Member

CHUNK_BYTES = 1 << 16
HELD_CHUNKS_MAX = 256
"""Chunks held in one direction of one connection; when there are more, the sender is not read from, as with a full window."""


@dataclass
class Weather:
    """The treatment of passing data by a proxy; may change at any time."""

    delay_s: float = 0.0
    loss: float = 0.0  # share of chunks that are delayed by a retransmission
    retransmit_s: tuple[float, float] = (0.2, 0.4)


class Proxy:
    """Listens on `port` of loopback and connects to `target`. `pass_up` lets data from the connecting side through,
    `pass_down` data to it."""

    def __init__(self, target: int, weather: Weather, seed: str) -> None:
        self.port, self.target, self.weather = free_port("127.0.0.1"), target, weather
        self.pass_up, self.pass_down = asyncio.Event(), asyncio.Event()
        self.pass_up.set()
        self.pass_down.set()
        self._random = random.Random(seed)
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:
            writer.transport.abort()
            return
        ways = [
            asyncio.ensure_future(self._pass(reader, far_writer, self.pass_up)),
            asyncio.ensure_future(self._pass(far_reader, writer, self.pass_down)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            for end in (writer, far_writer):
                end.close()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, may: asyncio.Event) -> None:
        """One direction of one connection, in order, until its sender has ended it."""
        held: deque[tuple[float, bytes]] = deque()
        news, room = asyncio.Event(), asyncio.Event()
        room.set()

        async def read() -> None:
            due = 0.0
            while data := await reader.read(CHUNK_BYTES):
                weather = self.weather
                late = self._random.uniform(*weather.retransmit_s) if self._random.random() < weather.loss else 0.0
                due = max(due, time.monotonic() + weather.delay_s + late)
                held.append((due, data))
                news.set()
                if len(held) >= HELD_CHUNKS_MAX:
                    room.clear()
                    await room.wait()
            held.append((due, b""))
            news.set()

        reading = asyncio.ensure_future(read())
        try:
            while True:
                while not held:
                    news.clear()
                    await news.wait()
                due, data = held.popleft()
                room.set()
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                await may.wait()
                if not data:
                    return
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)


class FarCluster(Cluster):
    """Each worker and gateway reaches the coordinator by a proxy of its own, workers reach gateways' token ports and prefill
    workers the KV ports of decode workers by others. KV itself crosses as within a host."""

    def __init__(self, model: Path, home: Path, seed: int, **more: Any) -> None:
        super().__init__(model, home, **more)
        self.weather = Weather()
        self.control: dict[str, Proxy] = {}
        self.ports: dict[str, Proxy] = {}
        """The proxy of each gateway's token port and each decode worker's KV port, by slot."""
        for member in self.members:
            if member.role != "coordinator":
                self._put_far(member, seed)

    def _put_far(self, member: Member, seed: int) -> None:
        def far(target: int, what: str) -> Proxy:
            return Proxy(target, self.weather, f"{seed} {member.slot} {what}")

        proxy = self.control[member.slot] = far(int(self.coordinator.rsplit(":", 1)[1]), "control")
        member.options[member.options.index("--coordinator") + 1] = f"tcp://127.0.0.1:{proxy.port}"
        bind = {"gateway": "--tokens-bind", "decode": "--kv-bind"}.get(member.role)
        if bind is not None:
            port = free_port("127.0.0.1")
            proxy = self.ports[member.slot] = far(port, "port")
            own, shown = f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{proxy.port}"
            member.options += [bind, own, "--advertise", shown]

    async def __aenter__(self) -> "FarCluster":
        for proxy in (*self.control.values(), *self.ports.values()):
            await proxy.start()
        await super().__aenter__()
        return self

    async def close(self) -> dict[str, int]:
        for proxy in (*self.control.values(), *self.ports.values()):
            proxy.pass_up.set()
            proxy.pass_down.set()
        ended = await super().close()
        for proxy in (*self.control.values(), *self.ports.values()):
            await proxy.close()
        return ended
