"""Imports at low priority: a process that starts on a host where others serve takes seconds of CPU to load libraries, and
nobody waits for it as their streams wait for their next token.

Niceness is a thread's on Linux, and a process without rights cannot take its own back, so that imports have a thread of their
own.
"""

import os
import threading
from importlib import import_module


def import_nicely(module: str, nice: int) -> None:
    """Import `module` and what it needs at this niceness. Raises what the import does."""
    failed: list[BaseException] = []

    def load() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)
        try:
            import_module(module)
        except BaseException as error:
            failed.append(error)

    loading = threading.Thread(target=load, name="loading")
    loading.start()
    loading.join()
    if failed:
        raise failed[0]
