"""Runs batches: checks their lines, answers each one as if it had come by HTTP, and writes its result.

If several gateways share a store, one of them runs the batches (`BatchStore.lead`). When it ends in any way, another gateway
goes on with the lines that have no result. A line that was being answered when its gateway was killed is answered again, and
only one result of it is ever written.

A line is answered in the lowest priority class that its tenant may use, with the end of the batch as its deadline. If it is
refused for now, it runs again later, until the batch expires.
"""

import asyncio
from collections import Counter
from collections.abc import Coroutine
from functools import partial
from typing import Any, Final

from gateway.batches import batches, files
from gateway.batches.batches import Batch
from gateway.batches.line_queue import LineQueue
from gateway.batches.lines import ERRORS_MAX, BatchLine, LineChecker, parse_line, result, unanswered
from gateway.batches.store import BatchService
from gateway.http.errors import ApiError
from gateway.http.request_log import RequestInfo
from gateway.metrics import BatchMetrics
from gateway.openai.context import Gateway
from gateway.openai.generate import Api, answer_offline
from gateway.openai.routes_generate import CHAT, COMPLETIONS
from gateway.responses.routes import ResponsesApi
from gateway.tenancy import lowest_class
from runtime.process import clock, log
from runtime.process.driver import cancelled, watched
from runtime.process.rate_limited_log import RateLimitedLog
from runtime.storage.errors import StorageError

_log = log.get("crossdock.batches")
POLL_S: Final = 1.0  # Seconds between two checks for batches that were sent to another gateway, and for waiting lines
_PUT_BACK_S_MAX: Final = 60.0  # A line that is to wait longer tries once in a while: limits may have been raised
_STORE_FAILED_S: Final = 5.0
_TRIES_MAX: Final = 3  # The most tries of a line whose workers are lost repeatedly
_CHECK_BYTES: Final = 1 << 20
_PRUNE_S: Final = 600.0
_PRUNE_MAX: Final = 4  # Files deleted in one transaction
_EXPIRE_MAX: Final = 500  # Lines that get the result that they have expired, in one transaction
_DEADLINE_MS_MAX: Final = 86_400_000.0


class BatchRunner:
    def __init__(self, gateway: Gateway, service: BatchService, metrics: BatchMetrics, lines_max: int) -> None:
        self._gateway = gateway
        self._service = service
        self._store = service.store
        self._metrics = metrics
        self._term = 0  # in which this gateway runs batches; 0: another one does
        self._queue = LineQueue(lines_max)
        self._batches: dict[str, Batch] = {}
        self._tasks: dict[asyncio.Task[None], str] = {}  # Checks and lines under way, each with its batch
        self._tries: Counter[tuple[str, int]] = Counter()
        self._prune_at = 0.0
        self._time = clock.SettledTime()
        self._woken = asyncio.Event()
        service.wake = self._woken.set
        self._store.on_lost = self._lost
        self._say_failed = RateLimitedLog(_log.error)
        metrics.running = lambda: self._queue.running

    async def run(self) -> None:
        """Run until cancelled."""
        try:
            while True:
                self._woken.clear()
                try:
                    await self._look()
                except StorageError as error:
                    self._say_failed("batches cannot go on", error=str(error))
                try:
                    async with asyncio.timeout(POLL_S):
                        await self._woken.wait()
                except TimeoutError:
                    pass
        finally:
            await cancelled(*self._tasks)
            await self._store.give_up()

    def _lost(self) -> None:
        """Another gateway may run the batches from now on. The next look forgets them."""
        for task in self._tasks:
            task.cancel()
        self._woken.set()

    async def _look(self) -> None:
        """Find out what there is to do, and begin it. Raises `StorageError`."""
        term = await self._store.lead()
        if term != self._term:
            for batch_id in list(self._batches):  # of the term before, if there was one
                await self._drop(batch_id)
            self._term = term
        if not term:
            return
        settled_s = self._time.at(clock.unix_time(), clock.now())
        for batch in await self._store.read(batches.open_batches):
            if batch.status == "cancelling":
                await self._end(batch, "cancelled")
            elif settled_s is not None and settled_s >= batch.expires_s:
                await self._end(batch, "expired")
            elif batch.status == "validating":
                if batch.id not in self._tasks.values():
                    self._begin(batch.id, self._check(batch))
            elif batch.id not in self._batches:
                left = await self._store.read(batches.lines_left, batch)
                self._batches[batch.id] = batch
                self._queue.add(batch.id, batch.tenant, left)
            if batch.id in self._batches and self._queue.is_done(batch.id):
                await self._end(batch, "completed")
        self._start_lines()
        if settled_s is not None:
            await self._prune_if_due(int(settled_s))

    def _begin(self, batch_id: str, work: Coroutine[Any, Any, None]) -> None:
        task = watched(work)
        self._tasks[task] = batch_id
        task.add_done_callback(self._tasks.pop)

    # --- a batch ------------------------------------------------------------------------------------------------------

    async def _check(self, batch: Batch) -> None:
        """Look at each line, a mebibyte at a time, on the threads that look at bodies."""
        checker = LineChecker(batch.endpoint, self._gateway.model)
        after = 0
        try:
            while lines := await self._store.read(batches.input_lines, batch, after, _CHECK_BYTES):
                size = sum(len(data) for _, data in lines)
                await self._gateway.threads.run(batch.tenant, size, partial(checker.check, lines))
                after = lines[-1][0]
                if len(checker.errors) >= ERRORS_MAX:
                    break
            now_s = int(clock.unix_time())
            if checker.errors:
                await self._store.write(batches.refuse, batch, checker.errors, now_s)
                self._say(batch, "failed")
            else:
                await self._store.write(batches.start, batch, checker.total, now_s)
        except StorageError as error:
            _log.error("a batch cannot be checked", batch=batch.id, error=str(error))
            return  # the next look begins anew
        self._woken.set()

    async def _end(self, batch: Batch, status: str) -> None:
        await self._drop(batch.id)
        now_s = int(clock.unix_time())
        if status == "expired" and batch.started_s is not None:
            while await self._store.write(batches.expire_lines, batch, _EXPIRE_MAX):
                pass
        await self._store.write(batches.finish, batch, status, now_s)
        self._say(batch, status)

    def _say(self, batch: Batch, status: str) -> None:
        self._metrics.batches.labels(status).inc()
        _log.info("batch ended", batch=batch.id, tenant=batch.tenant, status=status)

    async def _drop(self, batch_id: str) -> None:
        """End what is under way for a batch."""
        if self._batches.pop(batch_id, None) is not None:
            self._queue.remove(batch_id)
        await cancelled(*[task for task, its in self._tasks.items() if its == batch_id])
        for key in [key for key in self._tries if key[0] == batch_id]:
            del self._tries[key]

    async def _prune_if_due(self, now_s: int) -> None:
        if clock.now() < self._prune_at:
            return
        gone = await self._store.write(files.prune, now_s, _PRUNE_MAX)
        gone += await self._store.write(batches.prune, now_s - self._service.keep_s, _PRUNE_MAX)
        self._prune_at = clock.now() + (0.0 if gone else _PRUNE_S)

    # --- its lines ----------------------------------------------------------------------------------------------------

    def _start_lines(self) -> None:
        while self._gateway.backend.not_ready is None and (found := self._queue.next(clock.now())) is not None:
            batch_id, number = found
            self._begin(batch_id, self._line(self._batches[batch_id], number))

    async def _line(self, batch: Batch, number: int) -> None:
        try:
            outcome = await self._answer(batch, number)
        except ApiError as error:
            self._put_back(batch, number, error.retry_after_s or 1.0)
        except StorageError as error:
            _log.error("a line of a batch cannot go on", batch=batch.id, line=number, error=str(error))
            self._put_back(batch, number, _STORE_FAILED_S)
        else:
            self._metrics.lines.labels(outcome).inc()
            if batch.id in self._queue:
                self._queue.answered(batch.id)
                if self._queue.is_done(batch.id):
                    self._woken.set()
        self._start_lines()

    def _put_back(self, batch: Batch, number: int, after_s: float) -> None:
        self._metrics.lines.labels("put_back").inc()
        if batch.id in self._queue:
            self._queue.put_back(batch.id, number, clock.now() + min(after_s, _PUT_BACK_S_MAX))

    async def _answer(self, batch: Batch, number: int) -> str:
        """Answer one line and write its result. Raises `ApiError` if it is to run again, and `StorageError`."""
        data, held = await self._store.read(batches.line, batch, number)
        line = await self._gateway.threads.run(batch.tenant, len(data), partial(parse_line, data))
        del data
        info = RequestInfo()
        line_id = f"batch_req_{info.token}"
        if held >= self._service.tenant_bytes_max:
            message = "The tenant's files and batches take all the room that it may have."
            written, is_error = unanswered(line_id, line.custom_id, "storage_quota_exceeded", message), True
        else:
            status, content = await self._content(batch, number, line, info)
            written, is_error = result(line_id, line.custom_id, status, info.request_id, content), status != 200
        await self._store.write(batches.put_result, batch, number, is_error, written)
        return "failed" if is_error else "completed"

    async def _content(self, batch: Batch, number: int, line: BatchLine, info: RequestInfo) -> tuple[int, bytes]:
        """(status, body) of the answer. Raises `ApiError` if the line is to run again."""
        gateway, left_ms = self._gateway, 1000 * (batch.expires_s - clock.unix_time())
        try:
            body = await answer_offline(
                gateway,
                batch.tenant,
                _api(gateway, batch.tenant, line.url),
                bytes(line.body),
                info,
                priority_class=lowest_class(gateway.keys.tenants, batch.tenant),
                deadline_ms=min(max(left_ms, 1.0), _DEADLINE_MS_MAX),
            )
        except ApiError as error:
            self._tries[batch.id, number] += error.code == "interrupted"
            is_lost = error.code == "interrupted" and self._tries[batch.id, number] < _TRIES_MAX
            if is_lost or (error.status in (429, 503) and error.retry_after_s is not None):
                raise
            return error.status, error.encoded(info.request_id)
        except Exception as error:  # noqa: BLE001 - as over HTTP: else one line would end every gateway that tries it
            _log.error("bug", batch=batch.id, line=number, exc_info=error)
            failed = ApiError(500, "The gateway failed.", code="internal_error")
            return failed.status, failed.encoded(info.request_id)
        return 200, body


def _api(gateway: Gateway, tenant: str, url: str) -> Api[Any]:
    if url == "/v1/responses":
        return ResponsesApi(gateway, tenant)
    return CHAT if url == "/v1/chat/completions" else COMPLETIONS
