"""`crossdock serve` where it does not simply run: what a user is told, and with which status it ends."""

import subprocess
import sys
from pathlib import Path

from launcher.process import child_environment
from runtime.exits import CONFIG_EXIT


def _serve(home: Path, *arguments: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "launcher.cli", "serve", "--port", "0", *arguments],
        env=child_environment(1) | {"XDG_STATE_HOME": str(home), "COLUMNS": "200"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_settings_a_role_refuses_end_it_all_with_one_line(tiny: Path, tmp_path: Path) -> None:
    with _serve(tmp_path, "--model", str(tiny), "--device", "cpu", "--kv-gib", "16384") as process:
        out, errors = process.communicate(timeout=100)
    assert process.returncode == CONFIG_EXIT, out + errors
    assert errors.startswith(("crossdock: prefill-0: --kv-gib: 16384 GiB", "crossdock: decode-0: --kv-gib: 16384 GiB"))
    assert errors.count("\n") == 1
    assert "again" not in out, "nothing was started again"
