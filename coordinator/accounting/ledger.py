"""The usage ledger: written by one thread of its own, one row for each accepted request. Its rows are in a SQLite file
(`sqlite_store`) or in PostgreSQL (`coordinator.postgres.database`).

**Journalled before it is acknowledged.** A request's row is written when it is accepted, open and charged at its estimate, and
nothing about the request (its acceptance, its order to a worker) leaves the coordinator until that row is committed
(`coordinator.outbox`). At its end the row is closed with what was computed and emitted. So every request that another process
has heard of has one row, whenever this process is killed:

- killed before the row is committed: nobody has heard of the request. Its gateway submits it again, and it gets a row then.
- killed while the row is open: the next coordinator counts the estimate to the tenant's day, holds the reservation again, and
  closes the row when a worker or the gateway tells how the request ended. If no report comes within a bound (the stream ended
  while no coordinator was there), the row is written off: closed as `lost`, charged at the estimate. Charging nothing would
  give work away; the estimate is the best known figure.
- killed after the end but before the row is closed: the same, the row being open.
- killed after the row is closed: done.

- killed after the row is closed, and the stream's gateway resumes it, as after a worker's link was lost: the row is opened
  again. Amounts are those of the whole answer, with each token counted once. So the greater of the row's old amount and the
  new closing's amount is right, no matter what came in between.

Closed rows are deleted `keep_days` after their acceptance, a bounded number between any two batches.

Rows are found by request id; a second opening or closing of one changes nothing. The rates per minute go on from the
rows of the last minute.

**The event loop never waits.** Entries go into a bounded queue; the thread takes all that is there, commits them as one
transaction and tells the loop which requests are on disk. More load makes larger batches, not more commits.

**Locked, full or hanging storage is waited for.** The thread tries to open the store, and to commit each batch, until it
succeeds. Meanwhile `trouble` says why new requests are refused.
"""

import asyncio
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from math import inf
from typing import Final, Protocol, TypeVar

from coordinator.accounting.billing import Entry, Opened, Past
from coordinator.accounting.quota import DAY_S
from runtime.process import clock, log, notify
from runtime.storage.errors import StorageError, StorageUnavailable

T = TypeVar("T")
QUEUE_MAX: Final = 1 << 16
BATCH_MAX: Final = 4096
PRUNE_MAX: Final = 2000  # rows deleted in one transaction: some ten milliseconds
PRUNE_AGAIN_S: Final = 60.0  # when rows are deleted after storage failed
RETRY_S: Final = 0.25
LATE_S: Final = 2.0  # new requests are refused while an entry has waited for so long
CLOSE_S: Final = 15.0  # how long a process that ends waits for its storage


class UsageStore(Protocol):
    """Where the rows are. Used on the ledger's thread alone. Methods raise `StorageError`."""

    name: str  # in messages

    def open(self) -> None: ...

    def read(self, today: int) -> tuple[Past, int]:
        """Returns what counts at a start, and how many rows were left out."""

    def commit(self, entries: Sequence[Entry]) -> None:
        """Write the entries in one transaction. Raises `StorageUnavailable` if another try may succeed."""

    def prune(self, before_s: float, rows_max: int) -> int:
        """Delete closed rows that were accepted before this time, and return how many there were. Raises as `commit` does."""

    def close(self) -> None: ...


class Ledger:
    """Used on the event loop's thread, by the coordinator that leads (`coordinator.serve`). `on_committed`
    gets the ids of requests whose opening is on disk, `on_failed` the error after which nothing is written any more; both
    are called on the loop."""

    def __init__(
        self,
        store: UsageStore,
        *,
        on_committed: Callable[[list[str]], None],
        on_failed: Callable[[StorageError], None],
        keep_days: int = 0,
    ) -> None:
        """`keep_days`: after which closed rows are deleted; 0: never."""
        self._store = store
        self.keep_days = keep_days
        self._prune_at = 0.0
        """When old rows are deleted next, by the one clock: soon after the start, and then once a day."""
        self._time = clock.SettledTime()
        self._on_committed, self._on_failed = on_committed, on_failed
        self._entries: queue.Queue[tuple[float, Entry] | None] = queue.Queue(QUEUE_MAX)
        self._oldest_at = inf  # when the first entry of the batch in hand was written; infinite while there is none
        self._failure = ""  # why the last try to commit that batch failed
        self._ends = threading.Event()
        self._gives_up = False
        self._thread: threading.Thread | None = None

    async def start(self, today: int) -> Past:
        """Open the store, and read what it says of `today` and of open requests. Waits for storage that does not answer;
        `close` ends that. Raises `StorageError`."""
        loop = asyncio.get_running_loop()
        past: Future[Past] = Future()
        self._thread = threading.Thread(target=self._run, args=(loop, past, today), name="ledger", daemon=True)
        self._thread.start()
        return await asyncio.wrap_future(past)

    @property
    def behind(self) -> bool:
        """Whether no further request should be admitted: so much waits to be written, or it has waited for so long."""
        return bool(self.trouble(clock.now()))

    def trouble(self, now: float) -> str:
        """Returns why no further request should be admitted; empty where there is no reason."""
        if self._entries.qsize() > QUEUE_MAX // 2:
            return "usage cannot be recorded as fast as requests come"
        late_s = now - self._oldest_at
        if late_s < LATE_S:
            return ""
        return f"storage: the usage ledger could not be written for {late_s:.0f} s ({self._failure or 'no answer yet'})"

    def write(self, entry: Entry) -> None:
        """Raises `StorageError` where the queue is full, which refusing requests while `behind` prevents."""
        try:
            self._entries.put_nowait((clock.now(), entry))
        except queue.Full:
            raise StorageError(f"{self._store.name}: {QUEUE_MAX} entries wait to be written") from None

    async def close(self, wait: bool = True) -> None:
        """Write what is queued, and let the store go. `wait` False: give up what is not written yet."""
        if self._thread is None:
            return
        if wait:
            await asyncio.to_thread(self._stop, self._thread)
        else:
            self._gives_up = True
            self._ends.set()
            if not self._entries.full():
                self._entries.put_nowait(None)
        self._thread = None

    def _stop(self, thread: threading.Thread) -> None:
        self._ends.set()
        # The queue may be full and the thread dead: then there is nothing to wait for.
        while thread.is_alive():
            try:
                self._entries.put(None, timeout=0.1)
                break
            except queue.Full:
                if clock.now() - self._oldest_at > CLOSE_S:
                    break
        thread.join(CLOSE_S)

    # --- on the thread ------------------------------------------------------------------------------------------------

    def _run(self, loop: asyncio.AbstractEventLoop, past: "Future[Past]", today: int) -> None:
        try:
            past.set_running_or_notify_cancel()
            while not past.done():
                self._open(past, today)
                if not past.done() and self._ends.wait(RETRY_S):
                    return
            while self._write_batch(loop):
                self._prune_if_due()
        except BaseException as error:  # noqa: BLE001 - a thread that ends in silence holds back every message for ever
            expected = isinstance(error, OSError | StorageError)
            why = str(error) if expected else f"{type(error).__name__}: {error}"
            failure = StorageError(f"{self._store.name}: {why}")
            if not past.done():
                past.set_exception(failure)
            elif not self._gives_up:
                _tell(loop, self._on_failed, failure)
        finally:
            self._store.close()

    def _open(self, past: "Future[Past]", today: int) -> None:
        try:
            self._store.open()
            past.set_result(self._read(today))
        except StorageUnavailable as error:
            self._store.close()
            if not self._failure:
                said = "the usage ledger cannot be read; the coordinator waits for it"
                log.get("crossdock.ledger").error(said, usage_db=self._store.name, error=str(error))
                notify.ready(f"waits for {self._store.name}")
            self._failure = str(error)
        else:
            self._failure = ""

    def _read(self, today: int) -> Past:
        past, unreadable = self._store.read(today)
        if unreadable:
            what = "rows of the ledger cannot be read and are left out: what they say counts for no tenant"
            log.get("crossdock.ledger").warning(what, usage_db=self._store.name, rows=unreadable)
        return past

    def _write_batch(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Wait for entries, or until rows are to be deleted, and commit all that are there; False once told to stop."""
        try:
            batch = [self._entries.get(timeout=max(self._prune_at - clock.now(), 0.0) if self.keep_days else None)]
        except queue.Empty:
            return True
        while batch[-1] is not None and len(batch) < BATCH_MAX:
            try:
                batch.append(self._entries.get_nowait())
            except queue.Empty:
                break
        written = [item for item in batch if item is not None]
        if written:
            self._oldest_at, entries = written[0][0], [entry for _, entry in written]
            while not self._commit(entries):
                if self._ends.wait(RETRY_S) and (self._gives_up or clock.now() - self._oldest_at > CLOSE_S):
                    raise StorageError(self._failure)
            self._oldest_at = inf
            opened = [entry.request_id for entry in entries if isinstance(entry, Opened)]
            if opened:
                _tell(loop, self._on_committed, opened)
        return batch[-1] is not None

    def _commit(self, entries: Sequence[Entry]) -> bool:
        """Whether the entries are stored; False: another try may succeed."""
        try:
            self._store.commit(entries)
        except StorageUnavailable as error:
            if not self._failure:
                log.get("crossdock.ledger").error(
                    "usage cannot be written; new requests are refused until it can be",
                    usage_db=self._store.name,
                    error=str(error),
                )
            self._failure = str(error)
            return False
        self._failure = ""
        return True

    def _prune_if_due(self) -> None:
        if not self.keep_days or clock.now() < self._prune_at:
            return
        settled_s = self._time.at(clock.unix_time(), clock.now())
        if settled_s is None:
            self._prune_at = clock.now() + clock.SETTLE_S
            return
        before_s, self._prune_at = settled_s - self.keep_days * DAY_S, clock.now() + DAY_S
        try:
            if self._store.prune(before_s, PRUNE_MAX) == PRUNE_MAX:
                self._prune_at = 0.0
        except StorageUnavailable:
            self._prune_at = clock.now() + PRUNE_AGAIN_S


def _tell(loop: asyncio.AbstractEventLoop, callback: Callable[[T], None], value: T) -> None:
    try:
        loop.call_soon_threadsafe(callback, value)
    except RuntimeError:
        pass  # the loop has closed, and nobody is left to hear it
