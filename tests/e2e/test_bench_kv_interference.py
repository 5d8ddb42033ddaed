"""`python -m benchmarks kv-interference` on a tiny model: a real worker, and KV that really arrives beside streams."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests import tiny_models

ROOT = Path(__file__).parents[2]


def run(tiny: Path, state: Path) -> tuple[dict[str, Any], str]:
    command = [sys.executable, "-m", "benchmarks", "kv-interference", str(tiny), "--json"]
    load = ["--prompt-tokens", "128", "--stream-tokens", "48", "--streams", "2", "--rounds", "1", "--seconds", "3"]
    environment = {**os.environ, "COLUMNS": "200", "OMP_NUM_THREADS": "1", "XDG_STATE_HOME": str(state)}
    done = subprocess.run([*command, *load], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    return json.loads(done.stdout), done.stderr


@pytest.mark.long
def test_interference_bench_compares_streams(tmp_path: Path) -> None:
    """The benchmark measures streams with and without arriving KV and leaves no process or segment behind."""
    tiny = tiny_models.make("llama", tmp_path / "tiny")  # its own, by which its processes are told from others
    shared_before = set(os.listdir("/dev/shm"))
    result, said = run(tiny, tmp_path)
    assert "beside / alone" in said
    assert result["alone"]["gaps"] >= 1 and result["beside"]["gaps"] >= 1
    assert result["transfers"] >= 1 and result["kv_mib"] > 0
    assert not [name for name in set(os.listdir("/dev/shm")) - shared_before if name.startswith("crossdock")]
    left = [p for p in psutil.process_iter(["cmdline"]) if str(tiny) in (p.info["cmdline"] or [])]
    assert not left, left
