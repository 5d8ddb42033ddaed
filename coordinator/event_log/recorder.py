"""Records the core's events to the file of `--event-log`.

The event loop only appends to a buffer; a thread writes it out when it is large or `FLUSH_S` old. So a killed process loses at
most the last `FLUSH_S`. A slow disk delays no request, and a failing disk ends the recording, never the service.
"""

import asyncio
import fcntl
import os
import platform
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Final

from coordinator.core import Core
from coordinator.event_log.format import FAILED, MAGIC, Chain, Header, encode_end, encode_header, event_bytes
from coordinator.events import Action, Event
from runtime.process import clock, log
from runtime.process.version import version_of

FLUSH_S: Final = 0.2
FLUSH_BYTES: Final = 256 << 10
BUFFER_BYTES_MAX: Final = 64 << 20  # if more waits to be written, the recording ends, since the disk cannot keep up
EARLIER_KEPT: Final = 3  # how many event logs of earlier processes are kept, as FILE.1 (the latest) and so on
CLOSE_TIMEOUT_S: Final = 5.0
ERROR_CHARS_MAX: Final = 500
_MISTAKES: Final = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError)
_END_BYTES: Final = 1024  # room kept for the last record


class EventRecorder:
    """A core, with each event and a digest of its actions written to a file. Used on the event loop's thread."""

    def __init__(self, core: Core, path: str, bytes_max: int, process: str = "") -> None:
        self.path = Path(path).expanduser()
        self._core = core
        self._header = Header(
            core.limits,
            software=version_of(),
            platform=f"Python {platform.python_version()} on {platform.machine()}",
            process=process,
            unix_s=clock.unix_time(),
            started=clock.now(),
        )
        self._chain = Chain(encode_header(self._header))
        self._bytes_max = bytes_max
        self._log = log.get("crossdock.event_log")
        self._fd = -1
        self._buffer = bytearray()
        self._bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self._writing: Future[None] | None = None
        self._last: Future[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="event_log")

    @property
    def recording(self) -> bool:
        return self._fd >= 0

    def open(self) -> None:
        """Begin a new file; those of earlier processes are kept beside it. Raises `OSError` if the path is a mistake. If the
        disk is full, logs that nothing is recorded."""
        try:
            _keep_earlier(self.path)
            start = bytearray(encode_header(self._header))
            self._fd = _open_new(self.path)
            _write_all(self._fd, start)
            self._bytes = len(start)
        except _MISTAKES:
            raise
        except OSError as error:
            self._fail(error)

    def handle(self, event: Event, now: float) -> list[Action]:
        if not self.recording:
            return self._core.handle(event, now)
        chain = self._chain
        chain.add_event(event_bytes(event, now))
        try:
            actions = self._core.handle(event, now)
        except Exception as error:
            self._write(chain.record(FAILED, repr(error)[:ERROR_CHARS_MAX]))
            self.close("the core failed")
            raise
        self._write(chain.record(len(actions), chain.add_actions(actions)))
        return actions

    def _write(self, record: bytes) -> None:
        if self._fd < 0:
            return
        if self._bytes + len(record) > self._bytes_max - _END_BYTES:
            self._give_up(f"the event log has reached its {self._bytes_max >> 20} MiB (--event-log-max-mib)")
            return
        if len(self._buffer) > BUFFER_BYTES_MAX:
            self._give_up(f"{len(self._buffer) >> 20} MiB wait to be written: the disk cannot keep up")
            return
        self._buffer += record
        self._bytes += len(record)
        if len(self._buffer) >= FLUSH_BYTES:
            self._flush()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(FLUSH_S, self._flush)

    def close(self, reason: str) -> None:
        """Write what is left, and why the recording ends; waits for the disk, but not for ever."""
        if self._fd >= 0:
            self._finish(reason)
        if self._last is None:
            return
        try:
            self._last.result(CLOSE_TIMEOUT_S)
        except (OSError, TimeoutError) as error:
            self._log.warning("the end of the event log is lost", path=str(self.path), error=str(error) or "timeout")

    def _fail(self, error: BaseException) -> None:
        self._log.error("the event log is off", path=str(self.path), error=str(error))
        if self._fd >= 0:
            self._release(bytearray())

    def _give_up(self, why: str) -> None:
        self._log.warning("the event log is off", path=str(self.path), why=why)
        self._finish(why)

    def _finish(self, reason: str) -> None:
        self._buffer += encode_end(reason)
        self._release(self._buffer)

    def _release(self, data: bytearray) -> None:
        self._stop_timer()
        self._last = self._thread.submit(_write_and_close, self._fd, data)
        self._thread.shutdown(wait=False)
        self._fd, self._buffer = -1, bytearray()

    def _flush(self) -> None:
        self._stop_timer()
        if self._fd < 0 or not self._buffer or self._writing is not None:
            return  # The write in progress flushes the rest when it is done.
        data, self._buffer = self._buffer, bytearray()
        self._writing = self._thread.submit(_write_all, self._fd, data)
        loop = asyncio.get_running_loop()
        asyncio.wrap_future(self._writing, loop=loop).add_done_callback(self._written)

    def _written(self, done: "asyncio.Future[None]") -> None:
        self._writing = None
        error = None if done.cancelled() else done.exception()
        if error is not None:
            self._fail(error)
        self._flush()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _keep_earlier(path: Path) -> None:
    """Raises `OSError`."""
    if not path.is_file() or path.stat().st_size == 0:
        return
    with path.open("rb") as file:
        _lock(file.fileno(), path)
        if MAGIC.encode() not in file.read(len(MAGIC) + 8):
            raise FileExistsError(f"{path} is there already, and is not an event log")
        names = [path, *(path.with_name(f"{path.name}.{number}") for number in range(1, EARLIER_KEPT + 1))]
        for number in range(EARLIER_KEPT, 0, -1):
            if names[number - 1].exists():
                names[number - 1].replace(names[number])


def _open_new(path: Path) -> int:
    """Open a new file. Raises `OSError` if another coordinator writes to it, or may."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        _lock(descriptor, path)
        if os.fstat(descriptor).st_size:
            raise FileExistsError(f"{path} is being written by another coordinator")
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _lock(descriptor: int, path: Path) -> None:
    """Lock the file until it is closed, at the latest when the process ends. Raises `OSError`, also where the file system has
    no locks, and where the path has become another file's."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise FileExistsError(f"{path} is being written by another coordinator") from None
    if not path.exists() or not os.path.samestat(os.fstat(descriptor), path.stat()):
        raise FileExistsError(f"{path} is being written by another coordinator")


def _write_and_close(fd: int, data: bytearray) -> None:
    try:
        _write_all(fd, data)
    finally:
        os.close(fd)


def _write_all(fd: int, data: bytearray) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]
