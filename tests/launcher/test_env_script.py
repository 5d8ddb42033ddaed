"""What `./scripts/serve` shows while it installs, with a Python and a pip that only pretend."""

import os
import pty
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from tests.documents import ROOT

PYTHON = """#!/bin/sh
case "$*" in
*"-m venv"*) mkdir -p .venv/bin .venv/lib/python3/site-packages; cp "$0" .venv/bin/python ;;
*"-m pip install"*"-e .["*) echo "last: $*" ;;
*"-m pip install"*"torch=="*) echo "torch: $*"; mkdir -p .venv/lib/python3/site-packages/torch-2+cpu.dist-info ;;
*"-m pip install"*)
    echo "first: $*"
    echo "Collecting one>=1 (from crossdock)"; sleep 0.7
    echo "Collecting two"
    [ -z "${PIP_SLEEPS:-}" ] || exec sleep "$PIP_SLEEPS"
    [ "$PIP_STATUS" = 0 ] || { printf '%s\n' "$PIP_SAYS"; exit "$PIP_STATUS"; }
    echo "Installing collected packages: one, two"
    mkdir .venv/lib/python3/site-packages/one-1.dist-info; sleep 0.7 ;;
esac
"""


@pytest.fixture
def fresh(tmp_path: Path) -> Path:
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "_env.sh", tmp_path / "scripts")
    (tmp_path / "scripts" / "go").write_text('set -eu\n. "$(dirname "$0")/_env.sh"\nprepare serve\necho served "$@"\n')
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "constraints.txt").write_text("one==1\ntorch==2\ntwo==2\nthree==3\n")
    (tmp_path / "requirements.lock").write_text("one==1\ntwo==2\nthree==3\n")
    (tmp_path / "python").write_text(PYTHON)
    (tmp_path / "python").chmod(0o755)
    return tmp_path


def begin(folder: Path, *arguments: str, stderr: int = subprocess.PIPE, **more: str) -> "subprocess.Popen[str]":
    environment = {"PATH": os.environ["PATH"], "CROSSDOCK_PYTHON": str(folder / "python"), "PIP_STATUS": "0", **more}
    command = ["sh", "scripts/go", *arguments]
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=stderr, text=True, start_new_session=True
    )


def test_install_phases_are_plain_lines(fresh: Path) -> None:
    """Each phase of the installation is one line if there is no terminal, and pip's log is kept."""
    out, said = (process := begin(fresh)).communicate(timeout=60)
    assert (process.returncode, out) == (0, "served\n"), said
    assert [line for line in said.splitlines()[1:] if "--torch" not in line and "GPU" not in line] == [
        "Installing crossdock and what it needs into .venv (once; a minute or more)",
        "Downloading packages",
        "Installing packages",
    ]
    log = (fresh / ".venv" / "install.log").read_text()
    assert "Collecting two" in log
    assert re.search(r"^first: .*--require-hashes --no-deps -r requirements\.lock$", log, re.M)
    assert re.search(r"^last: .*--no-build-isolation -c constraints\.txt -e \.\[cpu\]$", log, re.M)
    again = begin(fresh)
    assert again.communicate(timeout=60) == ("served\n", ""), "it is done once"


def test_terminal_shows_a_progress_bar(fresh: Path) -> None:
    """A terminal sees bars for downloading and installing instead of pip's lines."""
    ours, theirs = pty.openpty()
    process = begin(fresh, stderr=theirs)
    process.communicate(timeout=60)
    os.close(theirs)
    said = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert process.returncode == 0
    assert "Downloading  [##########" in said and "of 3 packages" in said
    assert "Installing   [###############               ] 1 of 2 packages" in said
    assert "Collecting" not in said


RETRYING = "WARNING: Retrying (Retry(total=0)) after connection broken by"
CONFLICT = """\
ERROR: Cannot install crossdock and torch==2 because these package versions have conflicting dependencies.

The conflict is caused by:
    torch 2 depends on triton==3.7.1
    The user requested (constraint) triton==3.9.0

To fix this you could try to:
1. loosen the range of package versions you've specified
"""


@pytest.mark.parametrize(
    ("says", "reason"),
    [
        ("ERROR: no matching distribution", "ERROR: no matching distribution"),
        (CONFLICT, "torch 2 depends on triton==3.7.1\n      The user requested (constraint) triton==3.9.0"),
        (
            f"{RETRYING} 'NewConnectionError('<pip.Connection at 0x7f>: Name or service not known')': /simple/x/\n"
            "ERROR: Could not find a version that satisfies the requirement x (from versions: none)",
            "The package index cannot be reached: NewConnectionError('Name or service not known')",
        ),
        (
            f"{RETRYING} 'ProtocolError('reset')': /simple/x/\n{CONFLICT}",  # one retry, then an answer
            "torch 2 depends on triton==3.7.1\n      The user requested (constraint) triton==3.9.0",
        ),
        (
            "ERROR: Exception:\nTraceback (most recent call last):\npip._vendor.urllib3.exceptions.ReadTimeoutError: timed out",
            "The package index cannot be reached: pip._vendor.urllib3.exceptions.ReadTimeoutError: timed out",
        ),
        ("ERROR: Could not install: [Errno 28] No space left on device", "The disk is full: No space left on device"),
    ],
)
def test_install_failure_ends_with_reason(fresh: Path, says: str, reason: str) -> None:
    """A failed installation names its log, ends with the reason that pip gave and is tried again next time."""
    out, said = (process := begin(fresh, PIP_STATUS="7", PIP_SAYS=says)).communicate(timeout=60)
    assert (process.returncode, out) == (1, "")
    assert f"Installing failed; pip's log is in {fresh}/.venv/install.log. The reason:" in said
    assert said.endswith(f"    {reason}\n"), said
    assert not (fresh / ".venv" / "ready-serve").exists(), "the next call tries again"


def test_cpu_build_comes_from_its_index(fresh: Path) -> None:
    """`--torch cpu` installs torch's CPU build before the rest, also into an environment that has another build."""
    assert begin(fresh).communicate(timeout=60)[0] == "served\n"
    (fresh / ".venv/lib/python3/site-packages/torch-2.dist-info").mkdir()
    process = begin(fresh, "--once", "--torch", "cpu")
    out, said = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "served --once\n"), said
    first, *_, last = (fresh / ".venv" / "install.log").read_text().splitlines()
    assert first.startswith("torch: ") and first.endswith(
        "--index-url https://download.pytorch.org/whl/cpu torch==2+cpu"
    )
    assert last.startswith("last: ")
    assert begin(fresh, "--torch=cpu").communicate(timeout=60) == ("served\n", ""), "it is done once"
    refused = begin(fresh, "--torch", "cuda")
    assert "--torch: cuda is not cpu" in refused.communicate(timeout=60)[1] and refused.returncode == 2


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_stops_pip_too(fresh: Path, number: int, status: int) -> None:
    """A signal to the script also ends pip, with the signal's status."""
    process = begin(fresh, PIP_SLEEPS="600")
    assert process.stderr is not None
    while "Downloading" not in (line := process.stderr.readline()):
        assert line
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == status
    assert said.endswith("Stopped before it was ready.\n")
