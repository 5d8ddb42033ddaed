"""Links that a worker opens by itself: to gateways for tokens, to decode workers for offering KV.

A destination is an address and an incarnation. A bounded number of messages waits until its handshake is done. A destination
is reported as lost once, and forgotten, if it has another incarnation, cannot be reached in time, or goes away.
"""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from proto.messages import Destination, Hello, Message, Role, Welcome
from runtime.link.client import LinkClient
from runtime.link.server import LinkSettings, OnMessage, Peer
from runtime.process.driver import watched


@dataclass(eq=False)
class _Outlet:
    client: LinkClient
    timer: asyncio.TimerHandle | None = None
    peer: Peer | None = None
    waiting: list[tuple[Message, bytes]] = field(default_factory=list)


class ConnectionPool:
    """Links to processes of role `to`. `on_lost(incarnation, reason)` is called on the event loop, never from inside `send`;
    `on_idle` when nothing waits for a link any more."""

    def __init__(
        self,
        *,
        hello: Hello,
        to: Role,
        on_message: OnMessage,
        on_lost: Callable[[int, str], None],
        on_idle: Callable[[], None] = lambda: None,
        settings: LinkSettings | None = None,
        waiting_max: int = 1_000,
    ) -> None:
        self._hello = hello
        self._to = to
        self._on_message = on_message
        self._on_lost = on_lost
        self._on_idle = on_idle
        self._settings = settings or LinkSettings()
        self._waiting_max = waiting_max
        self._outlets: dict[int, _Outlet] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def idle(self) -> bool:
        """Whether nothing waits for a link that is not up yet."""
        return not any(outlet.waiting for outlet in self._outlets.values())

    def connect(self, to: Destination) -> None:
        """Start connecting, unless that is done or under way."""
        self._outlet(to)

    def send(self, to: Destination, message: Message, blob: bytes = b"") -> None:
        """Send now or as soon as the link is up; if that never happens, `on_lost` says so."""
        outlet = self._outlet(to)
        if outlet.peer is not None:
            outlet.peer.send(message, blob)
        elif len(outlet.waiting) < self._waiting_max:
            outlet.waiting.append((message, blob))
        else:
            asyncio.get_running_loop().call_soon(self._lose, to.incarnation, "too much waits for a link that is not up")

    async def close(self) -> None:
        for incarnation in list(self._outlets):
            self._forget(incarnation)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=5)

    def _outlet(self, to: Destination) -> _Outlet:
        outlet = self._outlets.get(to.incarnation)
        if outlet is not None:
            return outlet
        client = LinkClient(
            address=to.address,
            hello=self._hello,
            on_up=lambda peer, welcome: self._up(to.incarnation, peer, welcome),
            on_message=self._on_message,
            on_down=lambda _, reason: self._lose(to.incarnation, reason),
            settings=self._settings,
            to=self._to,
        )
        loop = asyncio.get_running_loop()
        outlet = self._outlets[to.incarnation] = _Outlet(client)
        outlet.timer = loop.call_later(self._settings.handshake_timeout_ms / 1000, self._too_late, to.incarnation)
        self._spawn(client.start())
        return outlet

    def _too_late(self, incarnation: int) -> None:
        outlet = self._outlets.get(incarnation)
        if outlet is not None and outlet.peer is None:
            self._lose(incarnation, outlet.client.last_error or "could not be reached in time")

    def _up(self, incarnation: int, peer: Peer, welcome: Welcome) -> None:
        outlet = self._outlets.get(incarnation)
        if outlet is None:
            return
        if welcome.incarnation != incarnation:
            self._lose(incarnation, "another incarnation answers there")
            return
        outlet.peer = peer
        if outlet.timer is not None:
            outlet.timer.cancel()
        waiting, outlet.waiting = outlet.waiting, []
        for message, blob in waiting:
            peer.send(message, blob)
        if waiting and self.idle:
            self._on_idle()

    def _lose(self, incarnation: int, reason: str) -> None:
        if self._forget(incarnation):
            self._on_lost(incarnation, reason)
            if self.idle:
                self._on_idle()

    def _forget(self, incarnation: int) -> bool:
        outlet = self._outlets.pop(incarnation, None)
        if outlet is None:
            return False
        if outlet.timer is not None:
            outlet.timer.cancel()
        self._spawn(outlet.client.close())
        return True

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = watched(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
