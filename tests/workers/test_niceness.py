"""A process that leads a session is nice to other sessions as a whole."""

import subprocess
import sys
from pathlib import Path

import pytest

GROUP = Path("/proc/self/autogroup")
GROUPS = """
from pathlib import Path
from engine.thread import be_nice_as_group
for nice in (7, 0):
    be_nice_as_group(nice)
    print(Path("/proc/self/autogroup").read_text().split()[-1])
"""


@pytest.mark.skipif(not GROUP.exists(), reason="this kernel has no groups of sessions")
@pytest.mark.parametrize(("leads", "nice"), [(True, ["7", "0"]), (False, ["0", "0"])])
def test_only_session_leader_nices_its_group(leads: bool, nice: list[str]) -> None:
    """Niceness is set for the whole session only if the process leads it."""
    run = [sys.executable, "-c", GROUPS]
    command = run if leads else ["sh", "-c", '"$@"; exit $?', "sh", *run]
    done = subprocess.run(command, start_new_session=True, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == nice
