"""The linter and the type checker, as tests, so that every way of running the tests runs them."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def _run(*arguments: str) -> None:
    done = subprocess.run([sys.executable, "-m", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, f"{' '.join(arguments)}\n{done.stdout}{done.stderr}"


def test_ruff() -> None:
    _run("ruff", "check", "--output-format", "concise", ".")


@pytest.mark.timeout(300)
def test_mypy() -> None:
    _run("mypy")
