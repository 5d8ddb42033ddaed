"""Niceness towards other processes. Linux divides the CPU between sessions first ("autogroup", sched(7)), and a thread's
niceness counts only within its session. A service or a detached process has its own session, and would take half of a core
from its neighbours however nice its threads are. A session has a niceness too, which its leader sets here.
"""

import errno
import os
import threading
from typing import Final

_GROUP: Final = "/proc/self/autogroup"
_TRIES, _AGAIN_S = 50, 0.1  # the kernel allows an unprivileged process one change of any group per tenth of a second


def be_nice_as_group(nice: int) -> None:
    """Set the niceness of this session, if this process leads it. If that is not possible, the session keeps its niceness."""
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
