"""CPU time of threads on cores that control processes and prefill workers share, from the kernel's scheduler."""

import os
from pathlib import Path

import psutil


def shared_core_ms(cores: frozenset[int]) -> float | None:
    """Time that threads of this process and those it started ran so far which may run on these cores only; None where the
    kernel does not say. Threads that have ended are not counted."""
    own = psutil.Process()
    total = 0
    try:
        for process in (own, *own.children(recursive=True)):
            total += _process_ns(process.pid, cores)
    except (FileNotFoundError, ValueError, AttributeError):
        return None
    return total / 1e6


def _process_ns(pid: int, cores: frozenset[int]) -> int:
    """Raises `FileNotFoundError` or `ValueError` where the kernel keeps no such account."""
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
