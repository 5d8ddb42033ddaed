"""`crossdock bench continuity` as a user runs it, against a cluster whose workers its command kills."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.e2e.live import live

ROOT = Path(__file__).parents[2]


def test_killed_workers_change_no_stream(tiny: Path, tmp_path: Path) -> None:
    """While decode workers are killed, every stream goes on with the same tokens, and no request fails."""
    with live(tiny, tmp_path, "--prefill", "1", "--decode", "2", STEP_TOKENS="64") as up:
        up.wait_registered(3)
        killer = tmp_path / "killer"
        killer.write_text(
            "import os, random, psutil\n"
            f"workers = [one for one in psutil.Process({up.process.pid}).children(recursive=True)\n"
            "           if 'decode_worker' in one.cmdline()]\n"
            "random.choice(workers).kill()\n"
        )
        command = [sys.executable, "-m", "launcher.cli", "bench", "continuity", "--url", up.base_url]
        command += ["--kill", f"{sys.executable} {killer}", "--kills", "3", "--every-s", "0.5", "--json"]
        command += ["--streams", "4", "--tokens", "200"]
        environment = {**os.environ, "COLUMNS": "200", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=ROOT, env=environment, text=True, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)["figures"]
        assert not found["errors"] and not found["failed_kills"], done.stderr
        assert found["compared"] == "token ids" and found["new_request_s"]["count"] == 3
        assert found["interrupted_streams"] > 0, "the kills met no stream"
        for row in found["streams"].values():
            assert row["streams"] == row["judged"] > 0
            assert row["lost"] == row["repeated"] == row["changed"] == row["cut_off"] == 0, done.stderr
        up.wait_idle()
