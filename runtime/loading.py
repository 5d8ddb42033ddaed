"""Imports at low priority: a process that starts on a host where others serve takes seconds of CPU to load libraries, and
nobody waits for it as their streams wait for their next token.

Niceness is a thread's on Linux, and a process without rights cannot take its own back, so that imports have a thread of their
own.
"""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module


def import_nicely(module: str, nice: int) -> None:
    """Import `module` and what it needs at this niceness. Raises what the import does."""
    with ThreadPoolExecutor(1, "loading", _be_nice, (nice,)) as loading:
        loading.submit(import_module, module).result()


def _be_nice(nice: int) -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)
