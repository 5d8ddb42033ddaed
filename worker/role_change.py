"""Changes the role of a worker process. The drivers of the new role are made while those of the old role still run. The old
drivers end when they hold nothing more. `changeover` decides when.
"""

import asyncio
import contextlib
from collections.abc import Callable, Sequence

from proto.errors import CrossdockError
from proto.messages import Role
from runtime.link.server import CannotBind
from runtime.process.driver import Stop, watched
from runtime.process.log import Log
from runtime.settings import machine
from worker.changeover import Changeover
from worker.driver import WorkerDriver

MakeDrivers = Callable[[Role, Sequence[WorkerDriver], Changeover], list[WorkerDriver]]  # from those of the role before


class RoleDrivers:
    """The drivers of a process in one of its roles, and those that follow them."""

    def __init__(self, make: MakeDrivers, role: Role, before: Sequence[WorkerDriver] = ()) -> None:
        """Raises as `make` does."""
        self._make = make
        self.changeover = Changeover(self._begin_to_prepare, self._drop)
        self.drivers = make(role, before, self.changeover)
        self.following: RoleDrivers | None = None
        self._preparing: asyncio.Task[None] | None = None

    def _begin_to_prepare(self, role: Role) -> None:
        self._preparing = watched(self._prepare(role))

    async def _prepare(self, role: Role) -> None:
        try:
            self.following = RoleDrivers(self._make, role, self.drivers)
            for driver in self.following.drivers:
                await driver.prepare()
        except (CrossdockError, OSError, ValueError) as error:
            self._preparing = None
            self.changeover.failed(str(error))
            return
        self._preparing = None
        self.changeover.prepared()

    def _drop(self) -> None:
        if self._preparing is not None:
            self._preparing.cancel()
        if self.following is not None:
            watched(_discard(self.following.drivers))
        self._preparing = self.following = None


async def _discard(drivers: Sequence[WorkerDriver]) -> None:
    """Ends drivers that have never registered."""
    for driver in drivers:
        with contextlib.suppress(TimeoutError):
            await driver.role.close_transfers()
        await driver.close()


async def run_roles(lineup: RoleDrivers, stop: Stop, logger: Log) -> int:
    """Runs one role after the other; returns the exit code."""
    following: RoleDrivers | None = lineup
    while following is not None:
        lineup = following
        statuses = await asyncio.gather(*(_run(driver, stop, logger) for driver in lineup.drivers))
        if any(statuses):
            return max(statuses)
        following = lineup.following if lineup.changeover.is_decided else None
    return 0


async def _run(driver: WorkerDriver, stop: Stop, logger: Log) -> int:
    """Run it. If it fails, the rest of this process is to stop, too."""
    try:
        await driver.run(stop)
    except CannotBind as error:
        machine.check_listening("--kv-bind", error)
        logger.error("cannot start", error=f"--kv-bind: {error.strerror}")
        stop.set()
        return 1
    except TimeoutError:
        logger.critical("cannot change the role, as a KV transfer does not end; ending", role=driver.settings.role)
        stop.set()
        return 1
    return 0
