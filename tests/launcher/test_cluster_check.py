"""`crossdock cluster check` as a user runs it."""

import os
from pathlib import Path

import pytest

from launcher.commands import build_app
from runtime.settings.command_line import invoke

FILE = """
keys = "{keys}"
[hosts.a]
address = "127.0.0.1"
coordinator = true
gateways = 1
workers = "1P1D"
"""


def check(folder: Path, keys: str) -> int:
    (folder / "cluster.toml").write_text(FILE.format(keys=keys))
    return invoke(build_app(), ["cluster", "check", str(folder / "cluster.toml")], "crossdock")


def test_missing_local_keys_fail_the_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The check fails if a folder of keys that is to be copied to hosts does not exist here."""
    assert check(tmp_path, "keys") == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == (
        f"crossdock: {tmp_path}/cluster.toml: keys: there is no folder {tmp_path}/keys;"
        f" make it with: crossdock keys new {tmp_path}/keys\n"
    )
    (tmp_path / "keys").mkdir()
    assert check(tmp_path, "keys") == 0


def test_host_keys_are_not_checked_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Keys that the hosts hold at an absolute path are not looked for here, and a note says so."""
    assert check(tmp_path, "/etc/no-such-keys") == 0
    assert "note: keys: /etc/no-such-keys is not on this machine; every host needs it" in capsys.readouterr().out


GPUS = """
insecure = true
[hosts.a]
address = "10.0.0.1"
coordinator = true
gateways = 1
[hosts.b]
address = "10.0.0.2"
workers = "1P1D"
gpus = {gpus}
[worker]
engine = "vllm"
vllm_args = "--tensor-parallel-size 2"
"""
LISTED = """GPU 0: NVIDIA H200 (UUID: GPU-8a11-0)
GPU 1: NVIDIA H200 (UUID: GPU-8a11-1)
  MIG 1g.18gb     Device  0: (UUID: MIG-77aa-0)
GPU 2: NVIDIA H200 (UUID: GPU-8a11-2)
"""


@pytest.mark.parametrize(
    ("gpus", "smi", "by_ssh", "expected"),
    [
        ('[[0, 1], [2, "MIG-77"]]', f"cat <<'EOF'\n{LISTED}EOF", True, "note: [hosts.b] gpus: the host has 3"),
        ('[[0, "GPU-8a11-1"], [2, 7]]', f"cat <<'EOF'\n{LISTED}EOF", True, "[hosts.b] gpus: the host has 3, and not 7"),
        ("[[0, 1], [2, 3]]", f"cat <<'EOF'\n{LISTED}EOF", False, "[hosts.b] gpus: the host has 3, and not 3"),
        ("[[0, 1], [2, 3]]", "echo 'no driver' >&2; exit 9", True, "[hosts.b] gpus: nvidia-smi -L fails there: no driver"),
        ("[[0, 1], [2, 3]]", "echo 'Connection refused'; exit 255", True, "note: [hosts.b] gpus: not counted: Connection"),
    ],
)  # fmt: skip
def test_gpus_of_each_host_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    gpus: str, smi: str, by_ssh: bool, expected: str,
) -> None:  # fmt: skip
    """The check counts the GPUs of hosts that are to have some, and names those that are missing."""
    ssh = f'echo "$@" >> {tmp_path}/asked\nwhile [ "${{1#-}}" != "$1" ]; do shift 2; done\nshift\nexec sh -c "$*"'
    for name, script in (("nvidia-smi", smi), ("ssh", ssh)):
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (tmp_path / "cluster.toml").write_text(GPUS.format(gpus=gpus))
    here = [] if by_ssh else ["--local"]
    status = invoke(build_app(), ["cluster", "check", str(tmp_path / "cluster.toml"), *here], "crossdock")
    said = capsys.readouterr()
    assert expected in (said.out if expected.startswith("note") else said.err)
    assert status == (0 if expected.startswith("note") else 2)
    assert "b (10.0.0.2)" in said.out
    asked = (tmp_path / "asked").read_text().splitlines() if by_ssh else []
    assert len([line for line in asked if "10.0.0." in line]) == by_ssh, "only hosts with gpus are asked"
