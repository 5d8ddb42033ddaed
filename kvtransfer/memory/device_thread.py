"""The one thread of a process that starts and ends NCCL operations on a device, whichever pair they belong to.

Operations of several communicators on one device can deadlock if several threads start them. Here one thread starts all of
them in the order of submission, then only polls them. Several may be in progress, and one that hangs does not keep the others
from ending.

Starting an operation does not block: a communicator is set up on the thread of its pair, so a peer that does not come delays
no other pair. An operation has no deadline here until its other end is known to have started (`counts`). That end may have to
wait for its own device; the requester limits that wait itself.

`DeviceQueue` holds all of the logic except the thread, and gets its clock as an argument.
"""

import os
import select
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable

POLL_S = 100e-6  # while operations are in progress: a GPU has no descriptor to wait for
IDLE_S = 60.0


class WakeupFd:
    """Rung on any thread, waited for in a `poll`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def fileno(self) -> int:
        return self._event

    def ring(self) -> None:
        """Wake the waiting thread. Has no effect after `close`."""
        with self._lock:
            if self._event >= 0:
                os.eventfd_write(self._event, 1)

    def clear(self) -> None:
        try:
            os.eventfd_read(self._event)
        except BlockingIOError:
            return

    def wait(self, timeout_s: float) -> None:
        """Wait until `ring` is called, at most `timeout_s`."""
        poll = select.poll()
        poll.register(self._event, select.POLLIN)
        poll.poll(max(0.0, timeout_s) * 1e3)
        self.clear()

    def close(self) -> None:
        with self._lock:
            event, self._event = self._event, -1
        os.close(event)


class Operation(ABC):
    """Called only on the device's thread. An operation that raises any exception has failed, and its communicator is unusable.
    The requester aborts an operation that hangs, on its own thread, because that can take long."""

    @abstractmethod
    def launch(self) -> None:
        """Start it. Does not block."""

    @abstractmethod
    def is_done(self, now: float) -> bool:
        """Whether it has ended well."""


class TransferHandle:
    """One operation asked for. Written by the device's thread; read anywhere."""

    def __init__(self, operation: Operation, timeout_s: float, notify: Callable[[], None], counts: bool = True) -> None:
        self.launched = False
        self.counts = counts  # its timeout runs; set by the requester
        self.ended = False  # well, or with an `error`
        self.error = ""
        self._operation = operation
        self._timeout_s = timeout_s
        self._notify = notify
        self._deadline: float | None = None
        self._cancelled = False

    def cancel(self) -> None:
        """Mark the operation as unwanted: it is not started, or no longer polled. The handle still ends."""
        self._cancelled = True

    # --- on the device's thread ---

    def begin(self) -> None:
        if self._cancelled:
            self._end("it was given up before it began")
            return
        try:
            self._operation.launch()
        except Exception as error:  # noqa: BLE001 -- whatever it is, who asked must learn it, and this thread goes on
            self._end(f"{type(error).__name__}: {error}")
            return
        self.launched = True
        self._notify()

    def look(self, now: float) -> None:
        try:
            if self._operation.is_done(now):
                self._end("")
                return
        except Exception as error:  # noqa: BLE001 -- whatever it is, who asked must learn it, and this thread goes on
            self._end(f"{type(error).__name__}: {error}")
            return
        if self._deadline is None and self.counts:
            self._deadline = now + self._timeout_s
        if self._cancelled:
            self._end("it was given up")
        elif self._deadline is not None and now >= self._deadline:
            self._end(f"it did not end in {self._timeout_s:g} s")

    def _end(self, error: str) -> None:
        self.error, self.ended = error, True
        self._notify()


class DeviceQueue:
    """`submit` from any thread, `step` from one."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._waiting: deque[TransferHandle] = deque()
        self._under_way: list[TransferHandle] = []

    def submit(self, handle: TransferHandle) -> None:
        self._waiting.append(handle)

    def step(self) -> bool:
        """Start waiting operations and poll those in progress. Returns whether any is still in progress."""
        while self._waiting:
            handle = self._waiting.popleft()
            handle.begin()
            if not handle.ended:
                self._under_way.append(handle)
        self._look()
        return bool(self._under_way)

    def _look(self) -> None:
        for handle in self._under_way:
            handle.look(self._clock())
        self._under_way = [handle for handle in self._under_way if not handle.ended]


class DeviceThread:
    def __init__(self, name: str) -> None:
        self._queue = DeviceQueue(time.monotonic)
        self._asked = threading.Event()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(
        self, operation: Operation, timeout_s: float, notify: Callable[[], None], counts: bool = True
    ) -> TransferHandle:
        """Queue an operation. `notify` is called on the device's thread when it has begun and when it has ended. It must not
        raise."""
        handle = TransferHandle(operation, timeout_s, notify, counts)
        self._queue.submit(handle)
        self._asked.set()
        return handle

    def _run(self) -> None:
        while True:
            busy = self._queue.step()
            self._asked.wait(POLL_S if busy else IDLE_S)
            self._asked.clear()


_threads: dict[int, DeviceThread] = {}
_lock = threading.Lock()


def device_thread(index: int) -> DeviceThread:
    with _lock:
        if index not in _threads:
            _threads[index] = DeviceThread(f"nccl-{index}")
        return _threads[index]
