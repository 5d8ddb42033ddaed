"""`scripts/test`: which steps it takes, in which order, and how it ends. Every tool is played."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = 'say() { echo "$*" >&2; }\nprepare() { cd "$(dirname "$0")/.."; }\n'
PYTHON = """#!/bin/sh
case "$*" in
"-m venv "*) mkdir -p "$4/bin" "$4/lib/python3/site-packages"; cp "$0" "$4/bin/python" ;;
"-P -"*) ;;
*)
    case "$PWD" in *"a clone") printf 'elsewhere: ' >> "$STEPS" ;; esac
    echo "$*" >> "$STEPS"
    case "$*" in *"${FAILS:-no step at all}"*) exit 3 ;; esac ;;
esac
"""
LINTERS = ["-m ruff check", "-m ruff format --check", "-m mypy"]
TWO = "-m pytest -q -n logical --maxprocesses 2 --dist loadfile"
PATHS = f"{TWO} -m not cluster and not long tests/test_tiers.py"
UNIT, WITH_VLLM = "-m pytest -q -m not cluster and not long -n logical", "-m pytest -q -m cluster and not long"
CLUSTER = f"{TWO} -m cluster and not long --ignore tests/vllm"
INSTALL = "-m tools.vllm_environment"


def steps(folder: Path, *arguments: str, fails: str = "") -> tuple[int, list[str]]:
    """The exit status, and what was called."""
    for name, text in (("scripts/_env.sh", ENVIRONMENT), (".venv/bin/python", PYTHON)):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    shutil.copy(ROOT / "scripts/test", folder / "scripts/test")
    environment = {"PATH": os.environ["PATH"], "STEPS": str(folder / "steps")} | ({"FAILS": fails} if fails else {})
    done = subprocess.run([folder / "scripts/test", *arguments], env=environment, capture_output=True, timeout=60)
    return done.returncode, (folder / "steps").read_text().splitlines()


def is_each(called: list[str], expected: list[str]) -> bool:
    return len(called) == len(expected) and all(map(str.startswith, called, expected))


def test_full_run_takes_all_tiers(tmp_path: Path) -> None:
    """A run without arguments takes linters, type checks, unit tests, those of paths again elsewhere, some with vLLM, then
    cluster tests."""
    status, called = steps(tmp_path)
    paths, brief = f"elsewhere: {PATHS}", f"{WITH_VLLM} tests/vllm/"
    assert status == 0 and is_each(called, [*LINTERS, UNIT, paths, INSTALL, brief, CLUSTER]), called


@pytest.mark.parametrize(
    ("fails", "taken"),
    [("ruff check", 1), ("mypy", 3), ("not cluster", 4), ("tests/vllm/", 7), ("ignore tests/vllm", 8)],
)
def test_first_failing_step_ends_run(tmp_path: Path, fails: str, taken: int) -> None:
    status, called = steps(tmp_path, fails=fails)
    assert status == 3 and len(called) == taken, called


def test_unreachable_index_leaves_vllm_out(tmp_path: Path) -> None:
    """Cluster tests run though the environment with vLLM cannot be made."""
    status, called = steps(tmp_path, fails=INSTALL)
    assert status == 0 and [called[-2], called[-1]] == [INSTALL, CLUSTER], called


def test_vllm_tier_passes_arguments_on(tmp_path: Path) -> None:
    """Tests with vLLM run in the environment that is made for them, all of them unless some are named."""
    status, called = steps(tmp_path, "vllm", "tests/vllm", "-x")
    assert status == 0 and called == [INSTALL, f"{WITH_VLLM} tests/vllm -x"], called


def test_unit_tier_passes_arguments_on(tmp_path: Path) -> None:
    status, called = steps(tmp_path, "unit", "-k", "fair")
    assert status == 0 and is_each(called, [UNIT]) and called[0].endswith(" -k fair")


@pytest.mark.parametrize("arguments", [("-m", "long"), ("tests/proto", "-x")])
def test_other_arguments_go_to_pytest(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    assert steps(tmp_path, *arguments) == (0, ["-m pytest " + " ".join(arguments)])


def test_ci_runs_the_same_script() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text(encoding="utf-8"))
    assert workflow["jobs"]["test"]["steps"][-1] == {"run": "./.ci/run --torch cpu"}
    assert (ROOT / ".ci/run").read_text(encoding="utf-8").splitlines()[-1] == 'exec ./scripts/test "$@"'
