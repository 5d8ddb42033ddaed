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
*"-m pip install"*)
    echo "first: $*"
    echo "Collecting one>=1 (from crossdock)"; sleep 0.7
    echo "Collecting two"
    [ -z "${PIP_SLEEPS:-}" ] || exec sleep "$PIP_SLEEPS"
    [ "$PIP_STATUS" = 0 ] || { echo "ERROR: no matching distribution"; exit "$PIP_STATUS"; }
    echo "Installing collected packages: one, two"
    mkdir .venv/lib/python3/site-packages/one-1.dist-info; sleep 0.7 ;;
esac
"""


@pytest.fixture
def fresh(tmp_path: Path) -> Path:
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "_env.sh", tmp_path / "scripts")
    (tmp_path / "scripts" / "go").write_text('set -eu\n. "$(dirname "$0")/_env.sh"\nprepare serve\necho served\n')
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "constraints.txt").write_text("one==1\ntwo==2\nthree==3\n")
    (tmp_path / "requirements.lock").write_text("one==1\ntwo==2\nthree==3\n")
    (tmp_path / "python").write_text(PYTHON)
    (tmp_path / "python").chmod(0o755)
    return tmp_path


def begin(folder: Path, *, stderr: int = subprocess.PIPE, **more: str) -> "subprocess.Popen[str]":
    environment = {"PATH": os.environ["PATH"], "CROSSDOCK_PYTHON": str(folder / "python"), "PIP_STATUS": "0", **more}
    command = ["sh", "scripts/go"]
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=stderr, text=True, start_new_session=True
    )


def test_install_phases_are_plain_lines(fresh: Path) -> None:
    """Each phase of the installation is one line if there is no terminal, and pip's log is kept."""
    out, said = (process := begin(fresh)).communicate(timeout=60)
    assert (process.returncode, out) == (0, "served\n"), said
    assert said.splitlines()[1:] == [
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


def test_install_failure_shows_the_log_end(fresh: Path) -> None:
    """A failed installation names its log, shows the log's last lines and is tried again next time."""
    out, said = (process := begin(fresh, PIP_STATUS="7")).communicate(timeout=60)
    assert (process.returncode, out) == (1, "")
    assert f"Installing failed; pip's log is in {fresh}/.venv/install.log. Its last lines:" in said
    assert said.endswith("    ERROR: no matching distribution\n")
    assert not (fresh / ".venv" / "ready-serve").exists(), "the next call tries again"


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
