"""`crossdock logs`: lines of several processes in order of time, by process and level, and as they come."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.admin import logs
from launcher.admin.logs import LogFile, LogsSettings
from launcher.local import registry
from launcher.local.detached import NotUp


def _record(second: int, event: str, level: str = "info") -> str:
    return json.dumps({"event": event, "level": level, "timestamp": f"2026-11-29T08:00:{second:02}.500000Z"})


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    folder = registry.runs_folder() / "20261129-080000-1"
    folder.mkdir(parents=True)
    (folder / "decode-0.log").write_text(f"{_record(1, 'one')}\n{_record(4, 'four', 'error')}\n  in a traceback\n")
    (folder / "gateway-0.log").write_text(f"{_record(2, 'two', 'debug')}\n{_record(3, 'three', 'warning')}\n")
    return folder


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str]) -> Callable[..., list[str]]:
    def show(**options: object) -> list[str]:
        assert logs.run(LogsSettings(**options)) == 0  # type: ignore[arg-type]
        return [" ".join(line.split()[-2:]) for line in capsys.readouterr().out.splitlines()]

    return show


def test_logs_merge_by_time(run: Path, shown: Callable[..., list[str]]) -> None:
    """Lines of all processes come in order of time, and those without a time stay behind the line before."""
    assert shown() == ["info one", "debug two", "warning three", "error four", "a traceback"]
    assert shown(lines=2) == ["error four", "a traceback"]
    assert shown(process="gateway") == ["debug two", "warning three"]
    assert shown(level="warning") == ["warning three", "error four"]
    with pytest.raises(NotUp, match=r"no log of prefill in .*, but of decode-0, gateway-0"):
        shown(process="prefill")


def test_followed_log_survives_rotation(run: Path) -> None:
    """New lines are read as they come, a half one when it is whole, and those of a new file of the same name."""
    path = run / "decode-0.log"
    log = LogFile(path)
    assert [line.text for line in log.new_lines()] == ["one", "four", "  in a traceback"]
    with path.open("a") as file:
        file.write(_record(5, "five")[:20])
        file.flush()
        assert list(log.new_lines()) == []
        file.write(_record(5, "five")[20:] + "\n")
    assert [line.text for line in log.new_lines()] == ["five"]
    os.replace(path, path.with_suffix(".log.1"))
    path.write_text(_record(6, "six") + "\n")
    assert [(line.at[17:19], line.text) for line in log.new_lines()] == [("06", "six")]
