"""`crossdock serve` where it does not simply run: what a user is told, and with which status it ends."""

import signal
import subprocess
import sys
from pathlib import Path

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
