"""`crossdock serve` where it does not simply run: what a user is told, and with which status it ends."""

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
from pathlib import Path

import psutil
import pytest
import uvloop

from launcher.admin.keys import NewKeysSettings
from launcher.admin.keys import run as make_keys
from launcher.admin.status import NoAnswer, StatusSettings, ask
from launcher.process import child_environment
from proto.messages import Role
from runtime.link.keys import keys_for
from runtime.process.exits import CONFIG_EXIT
from runtime.settings.command_line import parse


def _serve(home: Path, *arguments: str, **environment: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "launcher.cli", "serve", "--port", "0", *arguments],
        cwd=home,
        env=child_environment(1) | {"XDG_STATE_HOME": str(home), "COLUMNS": "200"} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_refused_setting_ends_the_service(tiny: Path, tmp_path: Path) -> None:
    """A setting that a role refuses ends the whole service with one line, and nothing is restarted."""
    with _serve(tmp_path, "--model", str(tiny), "--device", "cpu", "--kv-gib", "16384") as process:
        out, errors = process.communicate(timeout=100)
    assert process.returncode == CONFIG_EXIT, out + errors
    assert errors.startswith(("crossdock: prefill-0: --kv-gib: 16384 GiB", "crossdock: decode-0: --kv-gib: 16384 GiB"))
    assert errors.count("\n") == 1
    assert "again" not in out, "nothing was started again"


@pytest.mark.parametrize("how", ["flag", "environment"])
def test_missing_keys_end_the_service(tiny: Path, tmp_path: Path, how: str) -> None:
    """A missing folder of keys ends the service with one line."""
    flags, environment = (("--keys", "none"), {}) if how == "flag" else ((), {"CROSSDOCK_KEYS": "none"})
    with _serve(tmp_path, "--model", str(tiny), "--device", "cpu", *flags, **environment) as process:
        _, errors = process.communicate(timeout=100)
    assert process.returncode == CONFIG_EXIT
    assert errors.count("\n") == 1 and f"--keys: there is no folder {tmp_path / 'none'}" in errors


def test_hang_up_stops_the_cluster_in_order(tiny: Path, tmp_path: Path) -> None:
    """On a narrow terminal without the characters of the question a cluster serves; when the terminal hangs up, it ends in
    order."""
    terminal, inside = pty.openpty()
    fcntl.ioctl(inside, termios.TIOCSWINSZ, struct.pack("HHHH", 10, 20, 0, 0))
    command = [
        sys.executable,
        "-P",
        "-m",
        "launcher.cli",
        "serve",
        "--port",
        "0",
        "--model",
        str(tiny),
        "--device",
        "cpu",
    ]
    command += ["--max-seqs", "4"]
    environment = child_environment(1) | {"XDG_STATE_HOME": str(tmp_path), "PYTHONIOENCODING": "latin-1"}
    take_terminal = (
        "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", take_terminal, *command], env=environment,
        stdin=inside, stdout=inside, stderr=inside, start_new_session=True,
    )  # fmt: skip
    os.close(inside)
    try:
        shown = b""
        while b"Ctrl-C." not in shown:
            assert select.select([terminal], [], [], 180.0)[0], shown
            shown += os.read(terminal, 1 << 16)
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) >= 4
    finally:
        os.close(terminal)
        status = process.wait(60)
    assert status == 0 and not psutil.wait_procs(children, 10)[1]
    assert not list(tmp_path.rglob("cluster.json")), "it took its note away"


def test_environment_keys_reach_every_process(tiny: Path, tmp_path: Path) -> None:
    """Keys named in the environment are used by every process of the cluster."""
    make_keys(NewKeysSettings(folder=str(tmp_path / "keys")))
    with _serve(tmp_path, "--model", str(tiny), "--device", "cpu", CROSSDOCK_KEYS="keys") as process:
        try:
            assert process.stdout is not None
            said = next(line for line in process.stdout if line.startswith("Status "))
            shown = parse(StatusSettings, said.split()[3:])
            report = uvloop.run(ask(shown.coordinator, 10_000, keys_for(shown, Role.OBSERVER)))
            assert {one.role for one in report.workers} == {Role.PREFILL, Role.DECODE} and report.kv_pairs
            with pytest.raises(NoAnswer, match="keys"):
                uvloop.run(ask(shown.coordinator, 1_000))
        finally:
            process.send_signal(signal.SIGINT)
            out, errors = process.communicate(timeout=60)
    assert process.returncode == 0, out + errors
