"""Ctrl-C, SIGTERM and SIGHUP while a command is still being imported: one line, and the status that shells give them.

Without this, Python prints a traceback of whatever it was importing, and an import that catches everything goes on.
"""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_DEFAULTS: dict[signal.Signals, Any] = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGHUP: signal.SIG_DFL,
}
STATUSES = frozenset(128 + number for number in _DEFAULTS)


def guard() -> None:
    """Let these signals end this process at once, until `release`. A signal that is ignored stays ignored, as under
    nohup."""
    for number, default in _DEFAULTS.items():
        if signal.getsignal(number) == default:
            signal.signal(number, _end)


def release() -> None:
    """Restore the default handlers, since the code that runs next cleans up itself or sets its own handlers."""
    for number, default in _DEFAULTS.items():
        if signal.getsignal(number) is _end:
            signal.signal(number, default)


def heeded() -> list[signal.Signals]:
    """Returns the signals that should stop a command: nohup and some shells have a process ignore SIGHUP or SIGINT."""
    return [number for number in _DEFAULTS if signal.getsignal(number) != signal.SIG_IGN]


class SignalReceived(KeyboardInterrupt):
    """A signal that should stop the command came inside `raised`."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.status = status_of(number)


@contextmanager
def raised() -> Iterator[None]:
    """SIGTERM and SIGHUP unwind what runs in this context just as Ctrl-C does. Raises `SignalReceived`, from wherever it is."""

    def stop(number: int, _frame: FrameType | None) -> None:
        raise SignalReceived(number)

    before = {number: signal.signal(number, stop) for number in heeded()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def status_of(number: int) -> int:
    """The exit status that shells give a process that a signal has ended."""
    return 128 + number


def _end(number: int, _frame: FrameType | None) -> None:
    # Not through print: the signal may have come while Python was printing.
    os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, b"crossdock: stopped before it was ready\n")
    os._exit(status_of(number))
