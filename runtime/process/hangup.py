"""Handles SIGHUP, which asks a process to read its files again. Several parts of the process may have such files."""

import asyncio
import signal
import weakref
from collections.abc import Callable

_methods: "list[weakref.WeakMethod[Callable[[], None]]]" = []


def on_hangup(call: Callable[[], None]) -> None:
    """Call a method of an object at each SIGHUP, on the event loop, for as long as there is the object."""
    _methods.append(weakref.WeakMethod(call))


def listen() -> None:
    """Let SIGHUP call the registered methods from now on, instead of ending this process."""
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, _hear)


def _hear() -> None:
    for reference in list(_methods):
        call = reference()
        if call is None:
            _methods.remove(reference)
        else:
            call()
