"""`crossdock cluster check` as a user runs it."""

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
