"""How the processes of one `crossdock serve` or `up` fare: a file beside their logs, which `crossdock status` reads.

The coordinator cannot report this: it may be down itself, and it does not know processes that never registered.
"""

import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

FILE = "processes.json"
WINDOW_S = 600.0
RESTARTS_KEPT = 256


class ProcessState(msgspec.Struct, frozen=True):
    """One child process. Times are Unix times."""

    name: str
    pid: int  # 0 while it does not run
    ready: bool
    restarts: int  # since the cluster was started
    restarted_at: tuple[float, ...] = ()  # the latest `RESTARTS_KEPT`, oldest first
    starts_at: float | None = None  # again; None while it runs
    ended: str = ""
    exit_status: int | None = None  # of that incarnation; negative: by a signal

    def recent(self, now: float) -> int:
        """Restarts of the last `WINDOW_S`."""
        return sum(now - at <= WINDOW_S for at in self.restarted_at)


class ProcessStates(msgspec.Struct, frozen=True):
    processes: tuple[ProcessState, ...] = ()
    metrics: str = ""  # HOST:PORT of the supervisor's own


def write(folder: Path, states: ProcessStates) -> None:
    """Writes the states atomically. If the disk is full, the file stays as it was, since serving must not stop for it."""
    half = folder / f"{FILE}.part"
    try:
        half.write_bytes(msgspec.json.encode(states) + b"\n")
        os.replace(half, folder / FILE)
    except OSError:
        pass


def read(folder: Path) -> ProcessStates:
    """Reads the states; empty if there is no such file."""
    try:
        return msgspec.json.decode((folder / FILE).read_bytes(), type=ProcessStates)
    except (OSError, msgspec.DecodeError):
        return ProcessStates()


def lines(states: Iterable[ProcessState], now: float) -> list[str]:
    """Returns a line for each process that does not run or was restarted lately."""
    found = []
    for one in states:
        parts = []
        if not one.pid and one.ended:
            when = (
                f"restarting in {max(one.starts_at - now, 0.0):.0f} s" if one.starts_at is not None else "not running"
            )
            parts.append(f"{when}; it {one.ended}")
        if restarts := one.recent(now):
            times = "1 restart" if restarts == 1 else f"{restarts} restarts"
            why = f", the last after it {one.ended}" if one.pid else ""
            parts.append(f"{times} in the last {WINDOW_S / 60:.0f} min{why}")
        if parts:
            found.append(f"{one.name}: {'; '.join(parts)}")
    return found
