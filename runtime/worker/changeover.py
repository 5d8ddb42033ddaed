"""A worker process takes another role: all its drivers end together, and those of the new role follow.

A mixed worker has two drivers, each with a connection of its own, on which the order comes and may be taken back. So each says
for itself whether it may go, and the change is made at a moment when all may. From then on nothing takes it back.
"""

import asyncio
import contextlib
from collections.abc import Callable, Sequence

from proto.errors import CrossdockError
from proto.status import ProcessRole
from runtime.process.driver import watched
from runtime.worker.driver import WorkerDriver

MakeDrivers = Callable[[ProcessRole, Sequence[WorkerDriver]], Sequence[WorkerDriver]]
"""Of a role, which follow others in this process. May raise `CrossdockError`, `OSError` or `ValueError`."""


class Changeover:
    """Of the drivers that a process has at present."""

    def __init__(self, drivers: Sequence[WorkerDriver], make: MakeDrivers) -> None:
        self.drivers, self._make = drivers, make
        self.successors: Sequence[WorkerDriver] = ()
        """Ready to register."""
        self.is_decided = False
        self._role: ProcessRole | None = None
        self._ordered: set[WorkerDriver] = set()
        self._preparing: asyncio.Task[None] | None = None
        for driver in drivers:
            driver.changeover = self

    def ordered(self, driver: WorkerDriver, role: ProcessRole | None) -> None:
        """Make ready to take this role, or, with None, drop what was made ready."""
        if self.is_decided:
            return
        if role is not self._role or role is None:
            self._drop()
        if role is None:
            return
        self._role = role
        self._ordered.add(driver)
        if self.successors:
            driver.registration.ready_to_flip()
        elif self._preparing is None:
            self._preparing = watched(self._prepare(role))

    def look(self) -> None:
        """One of the drivers may go."""
        if self.successors and not self.is_decided and all(one.registration.could_flip for one in self.drivers):
            self.is_decided = True
            for driver in self.drivers:
                driver.registration.flip()

    def _drop(self) -> None:
        """What a driver was told to become before counts no more: it has to be told again."""
        if self._preparing is not None:
            self._preparing.cancel()
        for driver in self._ordered:
            driver.registration.not_ready_to_flip()
        watched(_discard(self.successors))
        self._role, self._preparing, self.successors = None, None, ()
        self._ordered.clear()

    async def _prepare(self, role: ProcessRole) -> None:
        made: Sequence[WorkerDriver] = ()
        try:
            made = self._make(role, self.drivers)
            for driver in made:
                await driver.prepare()
        except (CrossdockError, OSError, ValueError) as error:
            self._preparing = None
            watched(_discard(made))
            for driver in list(self._ordered):
                driver.registration.cannot_flip(str(error))
            return
        except asyncio.CancelledError:
            watched(_discard(made))
            raise
        self._preparing, self.successors = None, made
        for driver in list(self._ordered):
            driver.registration.ready_to_flip()


async def _discard(drivers: Sequence[WorkerDriver]) -> None:
    """They have never registered."""
    for driver in drivers:
        with contextlib.suppress(TimeoutError):
            await driver.role.close_transfers()
        await driver.close()
