"""`python -m benchmarks kv`, small: all transports, everything beside them, as JSON."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import first

ROOT = Path(__file__).parents[2]


@pytest.mark.long
@pytest.mark.parametrize("segments", first(1, ["4096", "512,4096"]))
def test_bench_kv_measures_all_transports(segments):
    """The KV benchmark measures each transport beside the plain copies and sockets of the machine."""
    command = [sys.executable, "-m", "benchmarks", "kv", "--json", "--rounds", "1"]
    command += ["--session-mib", "256", "--segment-kib", segments, "--block-kib", "64"]
    command += ["--transports", "shm,tcp,tcp-plain"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert [row["segment_bytes"] for row in found["rows"]] == [int(kib) << 10 for kib in segments.split(",")]
    for row in found["rows"]:
        names = {"memcpy", "digest", "shm", "tcp", "tcp-plain", "socket", "bare shm"}
        assert set(row["gb_per_s"]) == names and min(row["gb_per_s"].values()) > 0
        assert set(row["ratio"]) == {*("shm/mem", "shm/bare", "tcp/socket", "tcp-plain/socket")}
    for kind in ("commit", "acknowledgement"):
        overheads = found["overhead_ms_p50"][kind]
        assert set(overheads) == {"shm", "tcp", "tcp-plain"} and min(overheads.values()) > 0
