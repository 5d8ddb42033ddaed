"""When a worker process takes another role. Pure.

A mixed worker registers twice, on connections of their own, on each of which the order comes and may be taken back. So each
registration says for itself whether it could end, and the change is made at a moment when all could. From then on nothing takes
it back.
"""

from collections.abc import Callable
from typing import Protocol

from proto.messages import Role


class Half(Protocol):
    """One registration: `runtime.worker.registration.Registration` is the real one."""

    @property
    def could_flip(self) -> bool: ...
    def flip(self) -> None: ...
    def ready_to_flip(self) -> None: ...
    def not_ready_to_flip(self) -> None: ...
    def cannot_flip(self, why: str) -> None: ...


class Changeover:
    """A change of the registrations that a process has at present."""

    def __init__(self, prepare: Callable[[Role], None], drop: Callable[[], None]) -> None:
        """`prepare(role)` makes ready what registers in that role, and leads to `prepared` or `failed`; `drop` ends that, and
        drops what was made ready."""
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
        """One of them could end now."""
        if self._is_ready and not self.is_decided and all(half.could_flip for half in self._halves):
            self.is_decided = True
            for half in self._halves:
                half.flip()

    def _take_back(self) -> None:
        """An order to change the role that an earlier registration got counts no more: the coordinator has to give it again."""
        halves, self._ordered = self._ordered, []
        self._role, self._is_ready = None, False
        for half in halves:
            half.not_ready_to_flip()
        self._drop()
