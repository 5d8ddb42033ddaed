"""The one thread that computes. The event loop stays free for heartbeats whatever the model does."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import torch


class EngineThread(ThreadPoolExecutor):
    """Runs what is submitted one after the other on a thread with cores, niceness and torch threads of its own.

    Niceness and affinity belong to a thread on Linux, so the rest of the process keeps its own. `cores` that do not exist
    and niceness that is not permitted are left as they were.
    """

    def __init__(self, *, threads: int, cores: tuple[int, ...] = (), nice: int = 0) -> None:
        super().__init__(
            max_workers=1, thread_name_prefix="engine", initializer=self._prepare, initargs=(threads, cores, nice)
        )

    @staticmethod
    def _prepare(threads: int, cores: tuple[int, ...], nice: int) -> None:
        if cores:
            try:
                os.sched_setaffinity(threading.get_native_id(), cores)
            except OSError:
                pass  # not ours to use: stay where the process is
        if nice:
            try:
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)
            except PermissionError:
                pass  # negative values need a capability; slower, not wrong
        torch.set_num_threads(threads)


def pick_device(device: str) -> str:
    """`auto` is the GPU where torch sees one, else the CPU."""
    if device != "auto":
        return device
    return "cuda" if torch.cuda.is_available() else "cpu"
