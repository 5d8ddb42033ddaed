"""Threads that tokenize, and the fair queue in front of them. Used on the event loop's thread only."""

import asyncio
import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final, TypeVar

from gateway.shares import LARGE_BYTES, JobQueue, QueuedJob

THREADS: Final = 3  # Large jobs may take all but one

_TRIMMED_BYTES: Final = 1 << 20  # after jobs of so many bytes
_TRIM_AFTER_S: Final = 2.0
_malloc_trim: Callable[[int], int] = getattr(ctypes.CDLL(None), "malloc_trim", lambda _: 0)  # of glibc alone

R = TypeVar("R")


class TokenizerThreads:
    """The intake bounds the queue: it bounds the requests, and each request has at most one job."""

    def __init__(self, threads: int = THREADS) -> None:
        assert threads >= 2, "one thread is kept for jobs that are not large"
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="tokenize")
        self._queue: JobQueue[tuple[Callable[[], Any], asyncio.Future[Any]]] = JobQueue()
        self._running = 0
        self._running_large = 0
        self._trim: asyncio.TimerHandle | None = None

    async def run(self, tenant: str, size_bytes: int, work: Callable[[], R]) -> R:
        """The result of `work`, run on a thread when it is the tenant's turn."""
        future: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        job = self._queue.push(tenant, size_bytes, (work, future))
        self._start_jobs()
        try:
            return await future
        finally:
            job.dropped = True
            # An error in the future refers to this frame. This cycle would keep the objects of both alive until a full garbage
            # collection.
            del future, job, work

    def shutdown(self) -> None:
        """Jobs that have not begun are dropped."""
        if self._trim is not None:
            self._trim.cancel()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _start_jobs(self) -> None:
        while self._running < self._threads:
            job = self._queue.pop(large=self._running_large < self._threads - 1)
            if job is None:
                return
            self._running += 1
            self._running_large += job.cost >= LARGE_BYTES
            done = asyncio.get_running_loop().run_in_executor(self._pool, job.work[0])
            done.add_done_callback(partial(self._ended, job))

    def _ended(self, job: QueuedJob[tuple[Callable[[], Any], asyncio.Future[Any]]], done: asyncio.Future[Any]) -> None:
        self._running -= 1
        self._running_large -= job.cost >= LARGE_BYTES
        if job.cost >= _TRIMMED_BYTES and self._trim is None:
            self._trim = asyncio.get_running_loop().call_later(_TRIM_AFTER_S, self._give_memory_back)
        future = job.work[1]
        if done.cancelled():
            future.cancel()
            return  # the pool has been shut down
        error = done.exception()
        if future.done():  # the request that waited was cancelled
            pass
        elif error is not None:
            future.set_exception(error)
        else:
            future.set_result(done.result())
        self._start_jobs()

    def _give_memory_back(self) -> None:
        """glibc keeps what large texts have freed: a hundred megabytes or more for each thread."""
        self._trim = None
        self._pool.submit(_malloc_trim, 0)
