"""The resources that workers of one host take from each other: CPU time on shared cores, and memory bandwidth."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from threading import Barrier
from typing import Final

import numpy as np
import psutil

READ_BYTES: Final = 64 << 20  # of each thread: more than the caches hold
READ_TIMES: Final = 15
START_S: Final = 30.0


def shared_core_ms(cores: frozenset[int]) -> float | None:
    """Returns the time in ms that threads which may run on these cores only have run so far, in this process and its children.
    Threads that have ended are not counted. None if the kernel does not tell."""
    own = psutil.Process()
    total = 0
    try:
        for process in (own, *own.children(recursive=True)):
            total += _process_ns(process.pid, cores)
    except (FileNotFoundError, ValueError, AttributeError):
        return None
    return total / 1e6


def _process_ns(pid: int, cores: frozenset[int]) -> int:
    """Returns the time of a process's threads. Raises `FileNotFoundError` or `ValueError` if the kernel does not record it."""
    total = 0
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except FileNotFoundError:
        if pid == os.getpid():
            raise  # not Linux
        return 0  # it has ended
    for thread in threads:
        try:
            if not cores >= os.sched_getaffinity(int(thread)):
                continue
            text = Path(f"/proc/{pid}/task/{thread}/schedstat").read_text(encoding="ascii")
        except (ProcessLookupError, FileNotFoundError):
            if pid == os.getpid() and int(thread) == pid:
                raise FileNotFoundError(thread) from None
            continue
        total += int(text.split()[0])
    return total


def read_slower(cores: frozenset[int]) -> float:
    """Returns how many times as long reading memory takes while all of these cores read, compared with one core alone. Decode
    steps spend most of their time reading weights."""
    if len(cores) < 2:
        return 1.0
    alone_s = median(_reads({min(cores)}))
    return max(median(_reads(cores)) / alone_s, 1.0)


def _reads(cores: frozenset[int] | set[int]) -> list[float]:
    """Returns the seconds of each read; one thread on each core reads, all at once."""
    together = Barrier(len(cores), timeout=START_S)

    def read(core: int) -> list[float]:
        os.sched_setaffinity(0, {core})  # of this thread
        values, found = np.ones(READ_BYTES // 8), []
        values.sum()
        together.wait()
        for _ in range(READ_TIMES):
            began = time.perf_counter()
            values.sum()
            found.append(time.perf_counter() - began)
        return found

    with ThreadPoolExecutor(len(cores)) as threads:
        return [took_s for one in threads.map(read, sorted(cores)) for took_s in one]
