"""Leadership by a lease in PostgreSQL: coordinators on any hosts stand by until it is theirs. `lease` decides."""

import asyncio

from coordinator.accounting.ledger import UsageStore
from coordinator.policy_keeper import PolicyStore
from coordinator.postgres.lease import POLL_S, RENEW_S, Lease
from proto.errors import CrossdockError
from runtime.process import clock, log
from runtime.process.driver import Stop, cancelled, watched
from runtime.process.exits import ConfigError
from runtime.storage.errors import StorageError, StorageUnavailable

_log = log.get("crossdock.lease")


class NotLeader(CrossdockError):
    """This coordinator cannot lead, now or ever; `str()` names the lock or the database."""


class LeaderLease:
    """Used on the event loop's thread. Renewals are begun by the event loop, so that one that hangs loses the lease."""

    def __init__(self, url: str, holder: str) -> None:
        """Raises `ConfigError`."""
        try:
            from coordinator.postgres import database
        except ImportError as error:
            raise ConfigError(f"--database: needs psycopg 3; install crossdock[postgresql] ({error})") from None
        self._database, self._url, self._holder = database, url, holder
        try:
            self._table = database.LeaseTable(url)
        except StorageError as error:
            raise ConfigError(f"--database: {error}") from None
        self.name = self._table.name
        self.lost = asyncio.Event()
        self._lease = Lease()
        self._keeping: asyncio.Task[None] | None = None
        self._failure = ""

    def is_held(self, now: float) -> bool:
        return self._lease.is_held(now)

    def stores(self) -> tuple[UsageStore, PolicyStore]:
        """The ledger and the policies, to be written in the present term alone."""
        term = self._lease.term
        return self._database.PostgresStore(self._url, term), self._database.PostgresPolicies(self._url, term)

    async def acquire(self, stop: Stop) -> bool:
        """Wait for the lease and keep it from then on. Returns False if `stop` came first. Raises `NotLeader`."""
        stopping = asyncio.ensure_future(stop.wait())
        try:
            while not stop.is_set():
                if await self._take():
                    self.lost.clear()
                    self._keeping = watched(self._keep())
                    _log.info("leads", term=self._lease.term, database=self.name)
                    return True
                await asyncio.wait({stopping}, timeout=POLL_S)
        finally:
            stopping.cancel()
        return False

    async def give_up(self) -> None:
        """Let another coordinator lead at once, if this one still leads."""
        if self._keeping is not None:
            await cancelled(self._keeping)
            self._keeping = None
        if self._lease.is_held(clock.now()):
            self._lease.lose()
            try:
                await asyncio.to_thread(self._table.release, self._lease.term)
            except StorageError as error:
                _log.warning("the lease was not released, and runs out", error=str(error))

    async def _take(self) -> bool:
        try:
            row = await asyncio.to_thread(self._table.read)
            if not self._lease.may_take(row, clock.now()):
                return False
            asked_at = clock.now()
            taken = await asyncio.to_thread(self._table.take, row, self._holder)
        except StorageUnavailable as error:
            self._unavailable(error)
            return False
        except StorageError as error:
            raise NotLeader(f"{self.name}: {error}") from None
        self._failure = ""
        if taken:
            self._lease.granted(row.term + 1, asked_at)
        return taken

    async def _keep(self) -> None:
        """Renew the lease until it is lost."""
        renewing = watched(self._renew())
        try:
            while not renewing.done() and (left_s := self._lease.sure_until - clock.now()) > 0:
                await asyncio.wait({renewing}, timeout=left_s)
        finally:
            await cancelled(renewing)
        self._lease.lose()
        self.lost.set()

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(RENEW_S)
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
            _log.error("the database cannot be used", database=self.name, error=str(error))
        self._failure = str(error)
