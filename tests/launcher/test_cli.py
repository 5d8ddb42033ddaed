"""The command as a user types it."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.process import child_environment
from runtime.process.exits import CONFIG_EXIT, USAGE_EXIT

pytestmark = pytest.mark.cluster


def _crossdock(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "launcher.cli", *arguments],
        env=child_environment(1),
        capture_output=True,
        text=True,
        timeout=110,
    )


def test_help_names_every_command() -> None:
    done = _crossdock()
    assert done.returncode == 0
    for command in ("serve", "coordinator", "gateway", "worker", "status", "explain", "replay", "bench"):
        assert command in done.stdout
    assert "isolation" in _crossdock("bench").stdout


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("worker", "--model", "m"), "crossdock: --role: needed"),
        (("serve", "/no/such/folder"), "crossdock: --model: there is no folder /no/such/folder"),
        (("serve", "--prefill", "0"), "crossdock: --prefill: 0, and no --mixed: nothing would compute prompts"),
        (("bench", "isolation", "--plot", "/no/such/folder/x.svg"), "crossdock: --plot: there is no folder"),
        (("tune", "--html", "/no/such/folder/x.html"), "crossdock: --html: there is no folder"),
        (("replay",), "crossdock: FILE: needed"),
        (("brew",), "crossdock: No such command"),
    ],
)
def test_usage_mistakes_are_one_line(arguments: tuple[str, ...], expected: str) -> None:
    """A mistake on the command line gives one line on stderr and status 2, without a traceback."""
    done = _crossdock(*arguments)
    assert done.returncode == 2
    assert done.stderr.startswith(expected)
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("worker", "--role", "decode", "--model", "m", "--cpu-cores", "8000"), "crossdock: --cpu-cores: 8000 cannot"),
        (
            ("worker", "--role", "prefill", "--model", "m", "--device", "cpu", "--kv-gib", "16384"),
            "crossdock: --kv-gib: ",
        ),
        (("worker", "--role", "decode", "--model", "/no/model"), "crossdock: --model: /no/model: no such folder"),
        (("gateway", "--model", "/no/model", "--port", "0"), "crossdock: --model: /no/model: there is no such folder"),
        (("gateway", "--model", "m", "--host", "192.0.2.1"), "crossdock: --host, --port: cannot listen on 192.0.2.1"),
        (
            ("coordinator", "--bind", "tcp://192.0.2.1:7", "--insecure"),
            "crossdock: --bind: cannot bind tcp://192.0.2.1:7",
        ),
    ],
)
def test_impossible_settings_exit_at_once(arguments: tuple[str, ...], expected: str) -> None:
    """Settings that cannot work on this machine end the role with one line and a status of their own."""
    done = _crossdock(*arguments)
    assert done.returncode == CONFIG_EXIT, done.stderr
    assert done.stderr.splitlines()[-1].startswith(expected)
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("module", ["coordinator", "gateway", "prefill_worker", "decode_worker", "worker"])
def test_each_role_module_has_help(module: str) -> None:
    """Each role is a module whose --help has its options, without --role."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", module, "--help"],
        env=child_environment(1),
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    assert "--log-format" in done.stdout
    assert "--role" not in done.stdout, "the module is the role"


def test_taken_port_is_reported_first(tmp_path: Path) -> None:
    """A taken HTTP port is reported before anything is started."""
    (tmp_path / "config.json").write_text("{}")
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen(1)
        port = other.getsockname()[1]
        done = _crossdock("serve", "--model", str(tmp_path), "--port", str(port))
    assert (done.returncode, done.stdout) == (USAGE_EXIT, "")
    assert done.stderr.startswith(f"crossdock: --port: {port} on 127.0.0.1 is taken")


def test_misspelt_variable_is_noted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A misspelt CROSSDOCK_ variable is noted once, with a suggestion, and ignored."""
    monkeypatch.setenv("CROSSDOCK_HEARTBEET_MS", "100")
    monkeypatch.setenv("CROSSDOCK_STREAMS", "3")
    done = _crossdock("coordinator", "--bind", "tcp://192.0.2.1:7", "--insecure")
    note = "note: CROSSDOCK_HEARTBEET_MS in the environment is no option, and is ignored; did you mean"
    assert done.stderr.count("note:") == 1
    assert done.stderr.startswith(f"crossdock: {note} CROSSDOCK_HEARTBEAT_MS?\n")
