"""Niceness towards other processes. Linux shares the CPU between sessions first ("autogroup", sched(7)), and niceness counts
within one only: a service, or what was started detached, has a session of its own, and would take half of a core from its
neighbours however nice its threads are. The session has a niceness too, which its leader sets here.
"""

import errno
import os
import threading
from typing import Final

_GROUP: Final = "/proc/self/autogroup"
_TRIES, _AGAIN_S = 50, 0.1
"""The kernel takes one change of any group in a tenth of a second from a process without rights."""


def be_nice_as_group(nice: int) -> None:
    """Be nice to all other sessions, if this one is ours alone. Where it cannot be done, it stays as it was."""
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
