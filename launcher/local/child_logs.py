"""The output of child processes: kept whole in files, the last lines in memory, warnings and errors shown as they come."""

import contextlib
import json
import os
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from runtime.storage.background_writer import BackgroundWriter

FILE_BYTES_MAX = 16 << 20
LINE_BYTES_MAX = 64 << 10
TAIL_LINES = 40
NEWS = ("tenants file taken", "tenants file not taken")
"""Lines that begin so are shown at any level, because they answer an action of a person. Several processes may log the same
line."""
_LOUD = ("warning", "error", "critical")
_OWN_KEYS = ("event", "level", "timestamp", "process", "exception")


class ChildLog:
    """The output of one role. `show(line)` gets what a person should see now."""

    def __init__(self, name: str, path: Path, *, verbose: bool, show: Callable[[str, str], None]) -> None:
        self.name = name
        self.path = path
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self.last_event = ""
        self._verbose = verbose
        self._show = show
        self._carry = b""
        self._file = self._open()
        self._writer = BackgroundWriter(self._keep, note=self._note)

    def feed(self, data: bytes) -> None:
        """Bytes as they came from the pipe, cut anywhere."""
        *lines, self._carry = (self._carry + data).split(b"\n")
        if len(self._carry) > LINE_BYTES_MAX:
            lines.append(self._carry)
            self._carry = b""
        self._take(lines)

    def close(self) -> None:
        if self._carry:
            self._take([self._carry])
            self._carry = b""
        if self._writer.close():
            self._file.close()

    def _take(self, lines: list[bytes]) -> None:
        if lines:
            self._writer.put(b"".join(line + b"\n" for line in lines), len(lines))
        for line in lines:
            self._line(line)

    def _line(self, raw: bytes) -> None:
        level, text = readable(raw.decode("utf-8", "replace").rstrip())
        if not text:
            return
        self.tail.append(text)
        if level in ("info", *_LOUD):
            self.last_event = text.splitlines()[0]
        if self._verbose or level in _LOUD or text.startswith(NEWS):
            self._show(level, text)

    def _keep(self, data: bytes) -> None:
        """Runs on a thread: if the disk is full or stands still, lines are still shown, the last ones are kept in memory, and
        the process serves on. Raises `OSError`."""
        if os.fstat(self._file.fileno()).st_size + len(data) > FILE_BYTES_MAX:
            # The file was removed, or the last attempt failed just after this line.
            with contextlib.suppress(FileNotFoundError):
                os.replace(self.path, self.path.with_suffix(".log.1"))
            full, self._file = self._file, self._open()
            full.close()
        self._file.write(data)

    def _note(self, count: int) -> bytes:
        record = {"event": "log lines were dropped, since the disk took none", "level": "warning", "lines": count}
        return json.dumps({**record, "process": self.name}).encode() + b"\n"

    def _open(self) -> IO[bytes]:
        return self.path.open("ab", buffering=0)


def readable(line: str) -> tuple[str, str]:
    """Returns (level, text for people) of a log line; the level is "" for a line that is no record, like a library's print."""
    try:
        record: Any = json.loads(line)
    except (ValueError, RecursionError):
        return "", line
    if not isinstance(record, dict) or "event" not in record:
        return "", line
    rest = " ".join(f"{key}={value}" for key, value in record.items() if key not in _OWN_KEYS)
    text = f"{record['event']} {rest}".strip()
    if record.get("exception"):
        text += f"\n{record['exception']}"
    return str(record.get("level", "")), text
