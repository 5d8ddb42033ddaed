"""The Triton kernels, compiled for each kind of GPU by the compilers in Triton's wheel. They are not run."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

ROOT = Path(__file__).parents[2]
STACK_BYTES_MAX = 256
"""Of one thread, in the worst kernel: what is a few of its 255 registers. Thousands are ten times slower."""


def compiled(what: str, folder: Path) -> list[dict[str, Any]]:
    """Lines of `tests.engine.triton_aot`."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.triton_aot", what], cwd=ROOT, capture_output=True, text=True,
        env=environment | {"TRITON_CACHE_DIR": str(folder)}, check=False, timeout=1800,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(rows: list[dict[str, Any]]) -> None:
    limits = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
    assert {row["capability"] for row in rows} == set(limits)
    assert {row["kernel"] for row in rows} == {
        "decode", "join_splits", "prefill", "write", "add_norm", "rotate_and_write", "activate",
    }  # fmt: skip
    assert [row for row in rows if row["shared"] > limits[row["capability"]]] == []
    assert [row for row in rows if row["stack"] > STACK_BYTES_MAX] == []


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_kernels_compile_for_all_gpus(tmp_path: Path) -> None:
    """All kernels compile for all GPUs, in every type and group size."""
    check(compiled("full", tmp_path))


@pytest.mark.long
def test_batches_never_recompile_kernels(tmp_path: Path) -> None:
    """Two of those that a model has in two forms: the first norm of a model, norms of heads, kinds of activation."""
    [counts] = compiled("batches", tmp_path)
    forms = {"activate": 2, "add_norm": 2, "rotate_and_write": 2}
    assert counts == {name: forms.get(name, 1) for name in ("decode", "join_splits", "prefill", "write", *forms)}
