"""How long the event loop of a process stands still: a task on that loop measures it, and writes it into a file.

    python -m tools.attacks.probe FILE python -m ROLE ARGUMENTS…

runs a role of the product, unchanged, with such a task beside it. `Record` reads the file from outside, also of a process that
was killed in the middle of a stall.
"""

import asyncio
import mmap
import os
import runpy
import struct
import sys
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import psutil
import uvloop

TICK_S = 0.005
_FIELDS = struct.Struct("6d")


class Record:
    """The longest stall and the longest delay in seconds since `reset`, and the time of the last tick by three clocks. A stall
    is the CPU time that the loop's thread used between two ticks. If another thread keeps the interpreter's lock, it is how
    late the tick was although a core was free for the loop's thread, if that is longer, but at most the CPU time of the whole
    process. Other programs on a busy machine lengthen the delay, and hardly the stall.
    """

    def __init__(self, path: Path) -> None:
        with path.open("r+b" if path.exists() else "w+b") as file:
            file.truncate(_FIELDS.size)
            self._map = mmap.mmap(file.fileno(), _FIELDS.size)

    def read(self) -> tuple[float, ...]:
        return _FIELDS.unpack(self._map[:])

    def write(self, *values: float) -> None:
        self._map[:] = _FIELDS.pack(*values)

    def reset(self) -> None:
        self.write(0.0, 0.0, *self.read()[2:])

    def stall_s(self, pid: int) -> float:
        """Returns the longest stall, including one that still lasts, if it is visible from outside."""
        longest, _, at, thread_s, process_s, _ = self.read()
        if not at:
            return 0.0
        try:
            ran_s = int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9
            times = psutil.Process(pid).cpu_times()
        except (OSError, psutil.Error):
            return longest
        late_s = min(time.monotonic() - at - TICK_S, times.user + times.system - process_s)
        lasting_s = max(ran_s - thread_s, late_s)
        return max(longest, lasting_s) if lasting_s > 0.1 else longest


async def watch(record: Record) -> None:
    scheduler = os.open("/proc/self/schedstat", os.O_RDONLY)  # of the main thread

    def clocks() -> tuple[float, float, float, float]:
        waited_s = int(os.pread(scheduler, 100, 0).split()[1]) / 1e9
        return time.monotonic(), time.thread_time(), time.process_time(), waited_s

    before = clocks()
    while True:
        await asyncio.sleep(TICK_S)
        after = clocks()
        passed, ran, process_ran, waited = (b - a for a, b in zip(before, after, strict=True))
        stall = max(ran, min(passed - TICK_S - waited, process_ran))
        longest, latest = record.read()[:2]
        record.write(max(longest, stall), max(latest, passed - TICK_S), *after)
        before = after


def main() -> None:
    record, arguments = Record(Path(sys.argv[1])), sys.argv[4:]
    run = uvloop.run

    def run_watched(main: Awaitable[Any], **options: Any) -> Any:
        async def both() -> Any:
            watching = asyncio.create_task(watch(record))
            try:
                return await main
            finally:
                watching.cancel()

        return run(both(), **options)

    uvloop.run = run_watched  # `run_process` calls it
    if not arguments:
        asyncio.run(watch(record))  # a process that does nothing else: it shows how late any process is on this machine
    sys.argv = arguments
    runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
