"""The part of the links that the cores of both worker kinds need: the drivers' real ones, or those of the simulated world."""

from collections.abc import Callable
from typing import Protocol

from proto.messages import Destination, Message

TakeChanges = Callable[[int], tuple[bytes, bytes]]
"""Takes (hashes inserted, hashes evicted) out of a prefix cache's list of changes, so many at the most."""


class CoordinatorLink(Protocol):
    """`worker.registration.Registration` is the real one."""

    @property
    def up(self) -> bool: ...

    def send(self, message: Message) -> None: ...

    def report_cache(self, take_changes: TakeChanges) -> None: ...


class Gateways(Protocol):
    """`runtime.link.connection_pool.ConnectionPool` is the real one."""

    def connect(self, to: Destination) -> None: ...

    def send(self, to: Destination, message: Message) -> None: ...
