"""Imports have a thread of their own, which alone is nice."""

import os
import sys
from pathlib import Path

import pytest

from runtime.loading import import_nicely

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
