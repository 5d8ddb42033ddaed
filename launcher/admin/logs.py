"""`crossdock logs`: the logs of a cluster on this machine, merged by time."""

import asyncio
import contextlib
import heapq
import json
import sys
from collections import deque
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple

from pydantic import Field
from rich.markup import escape

from launcher import tables
from launcher.local import registry
from launcher.local.child_logs import readable
from launcher.local.detached import NotUp
from runtime.process.output import Output
from runtime.settings.types import Options

POLL_S = 0.25
LEVELS = ("debug", "info", "warning", "error", "critical")
_COLOURS = {"warning": "yellow", "error": "red", "critical": "red", "debug": "dim"}


class LogsSettings(Options):
    """Show the logs of a cluster that crossdock serve or up runs on this machine, or ran last, merged by time."""

    process: str = Field(
        "",
        description="Name of one process, as in crossdock status, or how several names begin, like decode; empty: all.",
        json_schema_extra={"argument": "PROCESS"},
    )
    coordinator: str = Field(
        "", description="Address of the cluster's coordinator; empty: the cluster that started last."
    )
    level: Literal["debug", "info", "warning", "error", "critical"] = Field(
        "debug", description="This level and above."
    )
    lines: int = Field(100, ge=0, le=1_000_000, description="Last lines to show, of all processes together.")
    follow: bool = Field(False, description="Keep printing new lines until Ctrl-C.")


class LogLine(NamedTuple):
    at: str  # in ISO 8601, which sorts by time
    process: str
    level: str
    text: str


class LogFile:
    """One process's log, read as it grows, also when a new file takes its place."""

    def __init__(self, path: Path) -> None:
        self.path, self._at, self._carry = path, "", b""
        self._file: BinaryIO = path.open("rb")

    def new_lines(self) -> Iterator[LogLine]:
        yield from self._read()
        if self.path.exists() and self.path.stat().st_ino != _inode(self._file):
            self._file.close()
            self._file = self.path.open("rb")
            yield from self._read()

    def _read(self) -> Iterator[LogLine]:
        for line in self._file:
            self._carry += line
            if self._carry.endswith(b"\n"):
                text, self._carry = self._carry.decode("utf-8", "replace").rstrip(), b""
                yield self._parsed(text)

    def _parsed(self, line: str) -> LogLine:
        level, text = readable(line)
        if level:
            self._at = str(json.loads(line).get("timestamp", self._at))
        # A line without a time, such as a traceback's, belongs to the one before.
        return LogLine(self._at, self.path.stem, level, text)


def _inode(file: BinaryIO) -> int:
    return Path(f"/proc/self/fd/{file.fileno()}").stat().st_ino


def run(settings: LogsSettings) -> int:
    """Raises `NotUp`."""
    folder = _folder(settings.coordinator)
    paths = {path.stem: path for path in sorted(folder.glob("*.log"))}
    # That of a detached `crossdock serve` repeats the others' warnings.
    named = [name for name in paths if name.startswith(settings.process) and (settings.process or name != "serve")]
    files = [LogFile(paths[name]) for name in named]
    if not files:
        names = ", ".join(paths)
        raise NotUp(f"PROCESS: there is no log of {settings.process} in {folder}, but of {names or 'nothing'}")
    least = LEVELS.index(settings.level)
    _show(deque(_merged(files, least), maxlen=settings.lines))
    if settings.follow:
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(_follow(files, least))
    return 0


async def _follow(files: list[LogFile], least: int) -> None:
    while not (isinstance(sys.stdout, Output) and sys.stdout.is_gone):
        await asyncio.sleep(POLL_S)
        _show(_merged(files, least))


def _folder(coordinator: str) -> Path:
    """Raises `NotUp`."""
    runs = [path for path in registry.runs_folder().glob("*") if any(path.glob("*.log"))]
    if coordinator:
        runs = registry.folders_of(coordinator)
    elif running := [path for path in runs if registry.running(path) is not None]:
        runs = running
    if not runs:
        raise NotUp(f"there are no logs in {registry.runs_folder()}")
    return max(runs, key=lambda path: path.stat().st_ctime)


def _merged(files: list[LogFile], least: int) -> Iterator[LogLine]:
    """Yields new lines in order of time. Lines without a level, such as a library's, count as info."""
    lines = heapq.merge(*(list(one.new_lines()) for one in files), key=attrgetter("at"))
    return (line for line in lines if LEVELS.index(line.level if line.level in LEVELS else "info") >= least)


def _show(lines: Iterator[LogLine] | deque[LogLine]) -> None:
    console = tables.console(highlight=False)
    for line in lines:
        at = line.at[11:23]
        colour = _COLOURS.get(line.level, "default")
        console.print(
            f"[dim]{at:12}[/] {line.process:12} [{colour}]{line.level:8}[/] {escape(line.text)}", soft_wrap=True
        )
    sys.stdout.flush()
