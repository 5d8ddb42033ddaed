"""Children's output: whole in the file, warnings shown, cut anywhere and bounded."""

import itertools
import json
import os
import select
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.local import child_logs as childlog
from launcher.local.child_logs import ChildLog, readable

RECORDS = [
    {"event": "loading", "level": "info", "process": "decode-0", "timestamp": "t"},
    {"event": "slow", "level": "warning", "request_id": "r-1", "step_ms": 7},
    {"event": "broken", "level": "error", "exception": "Traceback\nValueError: ä"},
]
TEXT = "".join(json.dumps(record) + "\n" for record in RECORDS).encode() + b"a line of a library\n"


def _log(path: Path, verbose: bool = False) -> tuple[ChildLog, list[str]]:
    shown: list[str] = []
    return ChildLog("decode-0", path, verbose=verbose, show=lambda level, text: shown.append(f"{level}: {text}")), shown


@given(st.lists(st.integers(0, len(TEXT)), max_size=20))
def test_log_is_independent_of_read_boundaries(tmp_path_factory: pytest.TempPathFactory, cuts: list[int]) -> None:
    """The log file, shown lines and tail are the same wherever the reads cut the text."""
    log, shown = _log(tmp_path_factory.mktemp("log") / "decode-0.log")
    edges = [0, *sorted(cuts), len(TEXT)]
    for start, end in itertools.pairwise(edges):
        log.feed(TEXT[start:end])
    log.close()
    assert shown == ["warning: slow request_id=r-1 step_ms=7", "error: broken\nTraceback\nValueError: ä"]
    assert log.path.read_bytes() == TEXT
    assert log.tail[-1] == "a line of a library"
    assert log.last_event == "broken"


def test_tenants_file_reload_is_shown(tmp_path: Path) -> None:
    """The reload of a changed tenants file is shown, though it is only an info line."""
    log, shown = _log(tmp_path / "gateway-0.log")
    log.feed(b'{"event": "tenants file taken", "level": "info", "tenants": 2}\n{"event": "loading", "level": "info"}\n')
    log.close()
    assert shown == ["info: tenants file taken tenants=2"]


def test_full_disk_only_loses_the_file(tmp_path: Path) -> None:
    """A full disk loses the log file alone; lines are still shown and the tail is kept."""
    path = tmp_path / "decode-0.log"
    path.symlink_to("/dev/full")
    log, shown = _log(path)
    log.feed(TEXT)
    log.close()
    assert len(shown) == 2
    assert log.tail[-1] == "a line of a library"


def test_hanging_disk_only_delays_the_file(tmp_path: Path) -> None:
    """While the disk of the log folder takes nothing, output is taken and shown all the same, and memory is bounded."""
    path = tmp_path / "decode-0.log"
    os.mkfifo(path)
    disk = os.open(path, os.O_RDWR | os.O_NONBLOCK)  # takes 64 KiB, and then nothing
    log, shown = _log(path)
    for _ in range(200):
        log.feed(TEXT + b"x" * 60_000 + b"\n")
    assert len(shown) == 400
    written = b""
    for _ in range(100_000):
        if select.select([disk], [], [], 0.5)[0]:
            written += os.read(disk, 1 << 16)
        elif b"were dropped" in written:
            break
    os.close(disk)
    log.close()
    assert 3.9 * (1 << 20) < len(written) < 5 << 20 and b"were dropped" in written and written.endswith(b"x\n")


def test_verbose_shows_every_line(tmp_path: Path) -> None:
    """Every line of a child is shown in verbose mode."""
    log, shown = _log(tmp_path / "decode-0.log", verbose=True)
    log.feed(TEXT)
    log.close()
    assert len(shown) == 4


def test_log_lines_and_files_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Endless lines do not let the log files or the tail grow beyond their bounds."""
    monkeypatch.setattr(childlog, "FILE_BYTES_MAX", 300_000)
    log, _ = _log(tmp_path / "decode-0.log")
    for _ in range(100):
        log.feed(b"x" * 20_000)
    log.close()
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 2 * 300_000
    assert len(log.tail) <= childlog.TAIL_LINES


def test_removed_log_file_is_recreated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A log file that was removed is begun again when it would have been full."""
    monkeypatch.setattr(childlog, "FILE_BYTES_MAX", 300_000)
    log, _ = _log(tmp_path / "decode-0.log")
    log.feed(b"x" * 20_000)
    log.path.unlink()
    for _ in range(20):
        log.feed(b"y" * 20_000 + b"\n")
    log.close()
    assert log.path.read_bytes().startswith(b"y")


@pytest.mark.parametrize(
    "line", ["", "[1]", "{", '{"level": "error"}', "null", "12", pytest.param("[" * 60_000, id="deep")]
)
def test_plain_lines_are_shown_unchanged(line: str) -> None:
    """Lines that are not JSON records are shown as they are."""
    assert readable(line) == ("", line)
