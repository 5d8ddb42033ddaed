"""Decides when a worker process changes to another role. Pure.

A mixed worker registers twice, on two connections. The order to change the role comes on each of them, and may be withdrawn on
each. So each registration reports whether it could end. The change is made when all of them could, and is then final.
"""

from collections.abc import Callable
from typing import Protocol

from proto.messages import Role


class Half(Protocol):
    """One registration: `worker.registration.Registration` is the real one."""

    @property
    def could_flip(self) -> bool: ...
    def flip(self) -> None: ...
    def ready_to_flip(self) -> None: ...
    def not_ready_to_flip(self) -> None: ...
    def cannot_flip(self, why: str) -> None: ...


class Changeover:
    """A change of the registrations that a process has at present."""

    def __init__(self, prepare: Callable[[Role], None], drop: Callable[[], None]) -> None:
        """`prepare(role)` starts to prepare the registrations in that role; `prepared` or `failed` is called afterwards.
        `drop` stops the preparation and discards its result."""
        self.is_decided = False
        self._prepare, self._drop = prepare, drop
        self._halves: list[Half] = []
        self._ordered: list[Half] = []
        self._role: Role | None = None
        self._is_ready = False

    def add(self, half: Half) -> None:
        self._halves.append(half)

    def ordered(self, half: Half, role: Role | None) -> None:
        """A registration is told that the process is to take this role, or, with None, that it is not."""
        if self.is_decided:
            return
        if self._role is not None and role is not self._role:
            self._take_back()
        if role is None:
            return
        self._ordered.append(half)
        if self._is_ready:
            half.ready_to_flip()
        elif self._role is None:
            self._role = role
            self._prepare(role)

    def prepared(self) -> None:
        self._is_ready = True
        for half in list(self._ordered):
            half.ready_to_flip()

    def failed(self, why: str) -> None:
        halves = list(self._ordered)
        self._take_back()
        for half in halves:
            half.cannot_flip(why)

    def look(self) -> None:
        """Make the change if all registrations could end now."""
        if self._is_ready and not self.is_decided and all(half.could_flip for half in self._halves):
            self.is_decided = True
            for half in self._halves:
                half.flip()

    def _take_back(self) -> None:
        """Withdraw the order on all registrations that have received it. The coordinator has to give it again."""
        halves, self._ordered = self._ordered, []
        self._role, self._is_ready = None, False
        for half in halves:
            half.not_ready_to_flip()
        self._drop()
