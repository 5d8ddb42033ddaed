"""Which Python runs a worker of `--engine vllm`, and how it is told that it lacks something."""

from pathlib import Path

import pytest

from runtime.process.exits import ConfigError
from runtime.settings.workers import WorkerSettings
from worker import engine_python


def python_that_says(folder: Path, words: str, status: int = 0) -> str:
    """A command that answers as a Python would that is asked what it has."""
    file = folder / "python"
    file.write_text(f"#!/bin/sh\necho '{words}'\nexit {status}\n")
    file.chmod(0o755)
    return str(file)


def test_complete_python_is_taken(tmp_path: Path) -> None:
    """A Python with a known vLLM and the packages beside it is fine."""
    assert engine_python.check(python_that_says(tmp_path, "0.32.0+cpu")) == "0.32.0+cpu"


@pytest.mark.parametrize(
    ("words", "status", "says"),
    [
        ("structlog xxhash 0.32.0", 0, "-m pip install structlog xxhash"),
        ("vllm none", 0, "lacks vllm"),
        ("0.14.1", 0, "has vLLM 0.14.1, and crossdock runs 0.32"),
        ("", 3, "is no Python"),
    ],
)
def test_unsuitable_python_is_explained(tmp_path: Path, words: str, status: int, says: str) -> None:
    """The message says what is missing, and how to get it."""
    with pytest.raises(ConfigError, match=says):
        engine_python.check(python_that_says(tmp_path, words, status))


def test_command_vllm_names_its_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without `--engine-python`, the first line of the vllm command says which Python it is."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="--engine-python names the Python"):
        engine_python.python_of_vllm()
    python = python_that_says(tmp_path, "0.32.0")
    (tmp_path / "vllm").write_text(f"#!{python}\n")
    (tmp_path / "vllm").chmod(0o755)
    assert engine_python.python_of_vllm() == python


def test_installed_packages_are_shown_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other Python sees our packages, and not what was installed beside them. Two workers may start at once."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in (*engine_python.PACKAGES, "torch"):
        (tmp_path / "installed" / name).mkdir(parents=True)
    shown = engine_python.packages_alone(tmp_path / "installed")
    assert engine_python.packages_alone(tmp_path / "installed") == shown
    assert sorted(path.name for path in shown.iterdir()) == sorted(engine_python.PACKAGES)
    assert (shown / "worker").resolve() == tmp_path / "installed" / "worker"


def test_own_engine_stays_here(tmp_path: Path) -> None:
    """A worker with crossdock's engine looks for no other Python."""
    engine_python.enter(WorkerSettings(role="decode", model=str(tmp_path), coordinator="tcp://127.0.0.1:1"))
