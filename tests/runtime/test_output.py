"""Printing never ends a process: no reader, no room, no descriptor, no character for it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CODE = r"""
import os, socket, sys
from runtime.process import output
from runtime.process.exits import leave
output.secure()
for _ in range(3):
    print("caf\u00e9 \U0001f600 \udcff " + "x" * 100_000)
sys.stdout.flush()
number = socket.socket().fileno()
os.write(9, f"alive {number > 2}".encode())
leave(0)
"""


def printed(redirection: str, encoding: str = "utf-8") -> tuple[int, str, str, bytes]:
    """Returns its status, what it says to the test, its standard error and its standard output."""
    reader, writer = os.pipe()
    command = ["bash", "-c", f'exec 9>&{writer}; "$@" {redirection}', "bash", sys.executable, "-c", CODE]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"PYTHONIOENCODING": encoding, "PYTHONPATH": str(ROOT)},
        pass_fds=[writer], capture_output=True, timeout=60, check=False,
    )  # fmt: skip
    os.close(writer)
    with os.fdopen(reader, "rb") as said:
        return done.returncode, said.read().decode(), done.stderr.decode(), done.stdout


@pytest.mark.parametrize("redirection", ["<&- >&- 2>&-", ">&-", "2>&-", "| head -c 1", "> /dev/null"])
def test_lost_output_ends_no_process(redirection: str) -> None:
    """Closed descriptors and a reader that has gone do not end the process, and no socket gets their number."""
    status, said, errors, _ = printed(redirection)
    assert (status, said, errors) == (0, "alive True", "")


def test_full_disk_is_told_at_the_end() -> None:
    """A command whose output is lost on a full disk runs to its end, and then says so with status 1."""
    status, said, errors, _ = printed("> /dev/full")
    assert (status, said) == (1, "alive True")
    assert errors == "crossdock: cannot write to standard output: No space left on device\n"


def test_missing_characters_become_escapes() -> None:
    """Characters that the encoding lacks, and bytes that are no text, are written as escapes."""
    for encoding, shown in (
        ("latin-1", b"caf\xe9 \\U0001f600 \\udcff"),
        ("utf-8", "caf\u00e9 \U0001f600 \\udcff".encode()),
    ):
        status, said, _, out = printed("", encoding)
        assert (status, said) == (0, "alive True") and out.startswith(shown)
