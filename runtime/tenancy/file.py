"""The tenants file on disk: read at the start, and again whenever it changes or SIGHUP asks for it."""

import asyncio
import os
import stat
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from runtime.process import hangup, log
from runtime.tenancy.tenants import FILE_BYTES_MAX, Tenants, TenantsError, from_tables, tables_of

POLL_S: Final = 2.0
_log = log.get("crossdock.tenants")
_Stamp = tuple[int, int, int]


def read(path: Path) -> Tenants:
    """Raises `TenantsError`; its lines start with the path."""
    return _read(path)[0]


def read_tables(path: Path) -> Mapping[str, object]:
    """The tables of a file without a mistake. Raises `TenantsError`; its lines start with the path."""
    return _read(path)[1]


def _read(path: Path) -> tuple[Tenants, Mapping[str, object], _Stamp]:
    try:
        # Open without blocking: opening a FIFO would block until some process writes to it.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            status = os.fstat(file.fileno())
            stamp = _stamp(status)
            if not stat.S_ISREG(status.st_mode):
                raise TenantsError("not a file")
            content = file.read(FILE_BYTES_MAX + 1)
        if len(content) > FILE_BYTES_MAX:
            raise TenantsError(f"larger than {FILE_BYTES_MAX} bytes")
        tables = tables_of(content.decode("utf-8"))
        return from_tables(tables), tables, stamp
    except OSError as error:
        raise TenantsError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise TenantsError(f"{path}: not UTF-8") from None
    except (ValueError, MemoryError) as error:
        why = "too large for this machine's memory" if isinstance(error, MemoryError) else "not a path"
        raise TenantsError(f"{path!s:.200}: {why}") from None
    except TenantsError as error:
        raise TenantsError("\n".join(f"{path}: {line}" for line in str(error).splitlines())) from None


def _when(stamp: _Stamp) -> str:
    """Returns the file's modification time as text. It is the same in all processes that have read the same file."""
    try:
        return datetime.fromtimestamp(stamp[0] / 1e9, UTC).isoformat(timespec="milliseconds") if stamp[0] else ""
    except (ValueError, OverflowError, OSError):
        return ""  # a time that no calendar has


def _stamp(status: os.stat_result) -> _Stamp:
    return status.st_mtime_ns, status.st_size, status.st_ino


class TenantsFile:
    def __init__(self, path: str | Path) -> None:
        """Reads it. Raises `TenantsError`."""
        try:
            self.path = Path(path).expanduser()
        except RuntimeError as error:  # whose home is not known
            raise TenantsError(f"{path}: {error}") from None
        self.tenants, self.tables, self._seen = _read(self.path)
        self._asked = asyncio.Event()

    async def watch(self, on_change: Callable[[Tenants], None], poll_s: float = POLL_S) -> None:
        """Watch the file until cancelled. If it cannot be used, the error is logged once, and the file before it stays in
        force."""
        hangup.on_hangup(self._ask)
        hangup.listen()
        while True:
            try:
                async with asyncio.timeout(poll_s):
                    await self._asked.wait()
            except TimeoutError:
                pass
            asked = self._asked.is_set()
            self._asked.clear()
            if await asyncio.to_thread(self._look, asked):
                on_change(self.tenants)

    def _ask(self) -> None:
        self._asked.set()

    def _look(self, asked: bool) -> bool:
        """Read the file if it has changed or `asked` is set. Returns whether new tenants are in force. Runs on a thread, since
        a file system may be slow."""
        try:
            stamp = _stamp(self.path.stat())
        except (OSError, ValueError):
            stamp = (0, 0, 0)
        if stamp == self._seen and not asked:
            return False
        self._seen = stamp
        try:
            self.tenants, self.tables, self._seen = _read(self.path)
        except TenantsError as error:
            why = "; ".join(str(error).splitlines())
            _log.error("tenants file not taken, the earlier one stays", error=why, modified=_when(self._seen))
            return False
        tenants = len(self.tenants.policies)
        _log.info("tenants file taken", path=str(self.path), tenants=tenants, modified=_when(self._seen))
        return True
