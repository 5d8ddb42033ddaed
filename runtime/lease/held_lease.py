"""Takes a lease in PostgreSQL when it is free, and renews it until it is given up or lost."""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from runtime.lease.lease import LEASE_S, RENEW, Lease
from runtime.process import clock, log
from runtime.process.driver import cancelled, watched
from runtime.storage.errors import StorageError, StorageUnavailable

if TYPE_CHECKING:
    from runtime.lease.lease_table import LeaseTable

_log = log.get("crossdock.lease")


class HeldLease:
    """Used on the event loop's thread. Renewals are begun by the event loop, so that one that hangs loses the lease."""

    def __init__(
        self, table: "LeaseTable", holder: str, on_lost: Callable[[], object], *, lease_s: float = LEASE_S
    ) -> None:
        self._table, self._holder, self._on_lost = table, holder, on_lost
        self._lease = Lease(lease_s)
        self._keeping: asyncio.Task[None] | None = None
        self._failure = ""

    @property
    def term(self) -> int:
        """The term in which this process leads, or did; 0 before the first."""
        return self._lease.term

    def is_held(self, now: float) -> bool:
        return self._lease.is_held(now)

    async def take(self) -> bool:
        """Take the lease if it is free, and keep it from then on. Raises `StorageError` if another try would not help."""
        try:
            row = await asyncio.to_thread(self._table.read)
            if not self._lease.may_take(row, clock.now()):
                return False
            asked_at = clock.now()
            taken = await asyncio.to_thread(self._table.take, row, self._holder)
        except StorageUnavailable as error:
            self._unavailable(error)
            return False
        self._failure = ""
        if taken:
            self._lease.granted(row.term + 1, asked_at)
            self._keeping = watched(self._keep())
            _log.info("leads", term=self._lease.term, database=self._table.name)
        return taken

    async def give_up(self) -> None:
        """Let another process lead at once, if this one still leads."""
        if self._keeping is not None:
            await cancelled(self._keeping)
            self._keeping = None
        if self._lease.is_held(clock.now()):
            self._lease.lose()
            try:
                await asyncio.to_thread(self._table.release, self._lease.term)
            except StorageError as error:
                _log.warning("the lease was not released, and runs out", error=str(error))

    async def _keep(self) -> None:
        """Renew the lease until it is lost."""
        renewing = watched(self._renew())
        try:
            while not renewing.done() and (left_s := self._lease.sure_until - clock.now()) > 0:
                await asyncio.wait({renewing}, timeout=left_s)
        finally:
            await cancelled(renewing)
        self._lease.lose()
        self._on_lost()

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._lease.lease_s * RENEW)
            asked_at = clock.now()
            try:
                renewed = await asyncio.to_thread(self._table.renew, self._lease.term)
            except StorageError as error:
                self._unavailable(error)
                continue
            if not renewed:
                return
            self._failure = ""
            self._lease.granted(self._lease.term, asked_at)

    def _unavailable(self, error: StorageError) -> None:
        if not self._failure:
            _log.error("the database cannot be used", database=self._table.name, error=str(error))
        self._failure = str(error)
