"""Leadership by a lease in PostgreSQL: coordinators on any hosts stand by until it is theirs."""

import asyncio
from typing import Final

from coordinator.accounting.ledger import UsageStore
from coordinator.policy_keeper import PolicyStore
from proto.errors import CrossdockError
from runtime.lease.held_lease import HeldLease
from runtime.process.driver import Stop
from runtime.process.exits import ConfigError
from runtime.storage.errors import StorageError

POLL_S: Final = 0.1  # between two looks of a standby


class NotLeader(CrossdockError):
    """This coordinator cannot lead, now or ever; `str()` names the lock or the database."""


class LeaderLease:
    """Used on the event loop's thread."""

    def __init__(self, url: str, holder: str) -> None:
        """Raises `ConfigError`."""
        try:
            from coordinator.postgres import database
        except ImportError as error:
            raise ConfigError(f"--database: needs psycopg 3; install crossdock[postgresql] ({error})") from None
        self._database, self._url = database, url
        try:
            table = database.lease_table(url)
        except StorageError as error:
            raise ConfigError(f"--database: {error}") from None
        self.name = table.name
        self.lost = asyncio.Event()
        self._lease = HeldLease(table, holder, self.lost.set)
        self.is_held = self._lease.is_held
        self.give_up = self._lease.give_up

    def stores(self) -> tuple[UsageStore, PolicyStore]:
        """The ledger and the policies, to be written in the present term alone."""
        term = self._lease.term
        return self._database.PostgresStore(self._url, term), self._database.PostgresPolicies(self._url, term)

    async def acquire(self, stop: Stop) -> bool:
        """Wait for the lease and keep it from then on. Returns False if `stop` came first. Raises `NotLeader`."""
        stopping = asyncio.ensure_future(stop.wait())
        try:
            while not stop.is_set():
                if await self._lease.take():
                    self.lost.clear()
                    return True
                await asyncio.wait({stopping}, timeout=POLL_S)
        except StorageError as error:
            raise NotLeader(f"{self.name}: {error}") from None
        finally:
            stopping.cancel()
        return False
