"""Imports have a thread of their own, which alone is nice; and a session of its own is nice to others."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from runtime.process.niceness import import_nicely

GROUP = Path("/proc/self/autogroup")
GROUPS = """
from pathlib import Path
from runtime.process.niceness import be_nice_as_group
for nice in (7, 0):
    be_nice_as_group(nice)
    print(Path("/proc/self/autogroup").read_text().split()[-1])
"""
TOLD = "import os, threading\nNICE = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())\n"


def test_only_the_import_is_nice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "crossdock_loaded_nicely.py").write_text(TOLD)
    before = os.getpriority(os.PRIO_PROCESS, 0)
    import_nicely("crossdock_loaded_nicely", before + 3)
    loaded = sys.modules.pop("crossdock_loaded_nicely")
    assert before + 3 == loaded.NICE
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


def test_what_the_import_raises_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "crossdock_does_not_load.py").write_text("raise RuntimeError('broken')\n")
    with pytest.raises(RuntimeError, match="broken"):
        import_nicely("crossdock_does_not_load", 5)


@pytest.mark.skipif(not GROUP.exists(), reason="this kernel has no groups of sessions")
@pytest.mark.parametrize(("leads", "nice"), [(True, ["7", "0"]), (False, ["0", "0"])])
def test_a_session_is_nice_as_a_whole_if_it_is_ours(leads: bool, nice: list[str]) -> None:
    run = [sys.executable, "-c", GROUPS]
    command = run if leads else ["sh", "-c", '"$@"; exit $?', "sh", *run]
    done = subprocess.run(command, start_new_session=True, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == nice
