"""`crossdock serve` with a certificate."""

import os
import subprocess
import sys
from pathlib import Path

from tests.runtime.test_tls import write_certificate


def test_first_question_crosses_tls(tiny: Path, tmp_path: Path) -> None:
    """The first question is answered by a gateway that speaks TLS alone, with a certificate that no system trusts."""
    write_certificate(tmp_path, "authority")
    write_certificate(tmp_path, "server", "authority")
    command = [sys.executable, "-P", "-m", "launcher.cli", "serve", str(tiny), "--port", "0", "--once", "--verbose"]
    options = ["--tls-certificate", str(tmp_path / "server.crt"), "--tls-key", str(tmp_path / "server.key")]
    more = {"XDG_STATE_HOME": str(tmp_path), "OMP_NUM_THREADS": "1", "CROSSDOCK_KV_GIB": "0.5"}
    done = subprocess.run(
        [*command, *options], env=os.environ | more, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "https://" in done.stdout and "\nA " in done.stdout
