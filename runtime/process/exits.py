"""Exit statuses of processes, and the error for settings that cannot work here."""

import atexit
import errno
import os
import sqlite3
import sys
from typing import Final, NoReturn

from proto.errors import CrossdockError
from runtime.process import output

USAGE_EXIT: Final = 2  # `runtime.settings.options.SettingsError`: a setting is missing, malformed or out of bounds
BUG_EXIT: Final = 70  # EX_SOFTWARE of sysexits.h: after an uncaught exception
GPU_EXIT: Final = 74  # EX_IOERR of sysexits.h: after a CUDA error this process can compute nothing more; start it again
HUNG_EXIT: Final = 75  # EX_TEMPFAIL of sysexits.h: a step did not end within --step-timeout-ms; start it again
CONFIG_EXIT: Final = 78  # EX_CONFIG of sysexits.h: valid settings that cannot work on this machine or with this model
INTERRUPTED_EXIT: Final = 130  # as in shells, 128 + SIGINT: after Ctrl-C, where something was left undone
HOPELESS_EXITS: Final = frozenset({USAGE_EXIT, CONFIG_EXIT})  # the same process started again would end in the same way


def leave(status: int) -> NoReturn:
    """End this process now. The `atexit` functions run and the output is flushed, but the interpreter is not shut down. A
    status of 0 becomes 1 if some of the output could not be written.

    A shutdown with torch and transformers loaded takes more than a second of CPU, and waits for threads that cannot be
    interrupted. All our resources are closed before, or the kernel releases them.
    """
    atexit._run_exitfuncs()
    if status == 0 and (why := output.failure()):
        print(f"crossdock: {why}", file=sys.stderr)  # noqa: T201
        status = 1
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            pass  # nobody reads it any more, or it is closed
    os._exit(status)


_PASSING: Final = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.EBUSY}
)
_PASSING_OF_SQLITE: Final = frozenset(
    {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_FULL}
)


class ConfigError(CrossdockError):
    """A setting cannot work here; `str()` is one line that begins with the option."""

    def __init__(self, text: str) -> None:
        super().__init__(" ".join(text.split()))

    @property
    def exit_status(self) -> int:
        """`CONFIG_EXIT`, or 1 if its cause is a state of this machine that passes, such as a full disk."""
        cause = self.__cause__ or self.__context__
        while cause is not None:
            if (isinstance(cause, OSError) and cause.errno in _PASSING) or is_passing(cause):
                return 1
            cause = cause.__cause__ or cause.__context__
        return CONFIG_EXIT


def is_passing(error: BaseException) -> bool:
    """Whether SQLite failed for a reason that may pass: its file is locked, or its disk is full or fails."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # the other bits have details
    return code in _PASSING_OF_SQLITE
