"""The one thread that computes. The event loop stays free for heartbeats whatever the model does."""

import errno
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import torch

_GROUP: Final = "/proc/self/autogroup"
_TRIES, _AGAIN_S = 50, 0.1  # the kernel allows an unprivileged process one change of any group per tenth of a second


class EngineThread(ThreadPoolExecutor):
    """Runs what is submitted one after the other on a thread with cores, niceness and torch threads of its own.

    Niceness and affinity belong to a thread on Linux, so the rest of the process keeps its own. `cores` that do not exist
    and niceness that is not permitted are left as they were.
    """

    def __init__(self, *, threads: int, cores: tuple[int, ...] = ()) -> None:
        self._others = set(os.listdir("/proc/self/task"))
        super().__init__(
            max_workers=1, thread_name_prefix="engine", initializer=self._prepare, initargs=(threads, cores)
        )

    @staticmethod
    def _prepare(threads: int, cores: tuple[int, ...]) -> None:
        if cores:
            try:
                os.sched_setaffinity(threading.get_native_id(), cores)
            except OSError:
                pass  # not ours to use: stay where the process is
        torch.set_num_threads(threads)

    def be_nice(self, nice: int) -> None:
        """Set the niceness of this thread, of those that torch has made for it, and of the session. Called on the thread when
        the model is loaded: start-up keeps its normal priority, because on a busy machine it would otherwise take minutes."""
        if nice == 0:
            return
        for thread_id in set(os.listdir("/proc/self/task")) - self._others:
            try:
                os.setpriority(os.PRIO_PROCESS, int(thread_id), nice)
            except (PermissionError, ProcessLookupError):
                pass  # negative values need a right, without which it is slower, not wrong; or the thread has just ended
        be_nice_as_group(nice)


def pick_device(device: str) -> str:
    """`auto` is the GPU where torch sees one, else the CPU."""
    if device != "auto":
        return device
    return "cuda" if torch.cuda.is_available() else "cpu"


def be_nice_as_group(nice: int) -> None:
    """Set the niceness of this session, if this process leads it and the kernel permits it. Linux divides the CPU between
    sessions first ("autogroup", sched(7)), and a thread's niceness counts only within its session. A detached process has its
    own, and would take half of a core from its neighbours however nice its threads are."""
    if os.getsid(0) != os.getpid():
        return
    for _ in range(_TRIES):
        try:
            with open(_GROUP, "w") as group:
                group.write(str(nice))
            return
        except OSError as error:
            if error.errno != errno.EAGAIN:
                return  # no such groups here, or no right to a negative niceness
        threading.Event().wait(_AGAIN_S)
