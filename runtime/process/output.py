"""Standard output and error on which printing never ends the process: the reader may have gone, the disk may be full, and the
encoding may lack a character."""

import errno
import io
import os
import sys
from typing import Final

_GONE: Final = (errno.EPIPE, errno.EIO)  # the reader of a pipe has ended, or the terminal has hung up


class Output(io.TextIOWrapper):
    """Drops text that cannot be written, and remembers why."""

    lost: OSError | None = None
    matters = True  # whether a command has failed if its output is lost; not so of servers

    @property
    def is_gone(self) -> bool:
        """Whether nobody can read the output any more."""
        return self.lost is not None and self.lost.errno in _GONE

    def write(self, text: str, /) -> int:
        try:
            return super().write(text)
        except OSError as error:
            self.lost = error
            return len(text)

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            self.lost = error


def secure() -> None:
    """Make standard output and error safe to print to. Descriptors that are closed (`>&-`) become /dev/null first, so that no
    socket or file gets their number. Characters that the encoding lacks are written as escapes."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this one
    for number, name in ((1, "stdout"), (2, "stderr")):
        old = getattr(sys, name)
        if old is not getattr(sys, f"__{name}__"):
            continue  # whoever put another stream there closes it
        buffer = io.BufferedWriter(io.FileIO(number, "w", closefd=False)) if old is None else old.buffer
        encoding = "utf-8" if old is None else old.encoding
        through = old is not None and old.write_through
        new = Output(
            buffer, encoding=encoding, errors="backslashreplace", line_buffering=number == 2, write_through=through
        )
        setattr(sys, name, new)


def failure() -> str:
    """Flush standard output. Returns what is wrong if some of it is lost although somebody reads it, such as a full disk."""
    if not Output.matters or not isinstance(sys.stdout, Output):
        return ""
    sys.stdout.flush()
    lost = None if sys.stdout.is_gone else sys.stdout.lost
    return "" if lost is None else f"cannot write to standard output: {lost.strerror}"
