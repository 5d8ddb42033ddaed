"""`crossdock up` and `down` of one host, with a real process, and what `launch_ssh` sends to which host."""

import asyncio
import io
import json
import os
import signal
import socket
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from lab.profile import Curve, DecodeCost, PrefillCost, Profile, ProfileCapacity, encoded
from launcher.admin.keys import NewKeysSettings
from launcher.admin.keys import run as make_keys
from launcher.cluster import up
from launcher.cluster.file import ClusterError, parse
from launcher.cluster.hosts import HostSite, keys_there, parcel
from launcher.cluster.plan import HostPlan
from launcher.cluster.settings import UpSettings
from launcher.local import registry as here
from launcher.local.ports import free_port
from runtime.settings.options import SettingsError

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).parents[2]
WAIT_S = 60.0


def call(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """A command for the only host of `folder`'s file."""
    return subprocess.run(
        [sys.executable, "-m", "launcher.cli", *arguments, str(folder / "cluster.toml")],
        env={**os.environ, "PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(folder / "state"), "COLUMNS": "200"},
        capture_output=True, text=True, timeout=WAIT_S, check=False,
    )  # fmt: skip


def coordinator_alone(folder: Path, port: int) -> None:
    text = f'[ports]\ncoordinator = {port}\n[hosts.only]\naddress = "127.0.0.1"\ncoordinator = true\n'
    (folder / "cluster.toml").write_text(text)


def children(folder: Path) -> list[psutil.Process]:
    """Of the `crossdock up` that the note in its folder names."""
    note = json.loads((folder / "state/crossdock/runs/crossdock.only/cluster.json").read_text())
    return psutil.Process(note["pid"]).children()


def test_detached_up_restarts_and_cleans_up(tmp_path: Path) -> None:
    """A detached up restarts a killed process, refuses a second up and leaves nothing when down."""
    coordinator_alone(tmp_path, free_port("127.0.0.1"))
    try:
        done = call(tmp_path, "up", "--detach")
        assert done.returncode == 0 and "only of crossdock is up" in done.stdout, done.stderr
        again = call(tmp_path, "up")
        assert again.returncode == 1 and "is up already" in again.stderr
        (first,) = children(tmp_path)
        first.send_signal(signal.SIGKILL)
        deadline = time.monotonic() + WAIT_S
        while not [one for one in children(tmp_path) if one != first]:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        others = children(tmp_path)
    finally:
        done = call(tmp_path, "down")
    assert done.returncode == 0 and "is down" in done.stdout
    assert not [one for one in others if one.is_running()]
    assert not list((tmp_path / "state").rglob("*.*")), "files are left"
    assert "is not up" in call(tmp_path, "down").stdout


def test_up_runs_an_autopilot(tmp_path: Path) -> None:
    """up starts an autopilot beside the coordinator if the file has one."""
    coordinator_alone(tmp_path, free_port("127.0.0.1"))
    curve = Curve((1.0,), (10.0,))
    profile = Profile(PrefillCost(curve), DecodeCost(curve), ProfileCapacity(4096), ProfileCapacity(4096))
    (tmp_path / "profile.json").write_bytes(encoded(profile))
    with (tmp_path / "cluster.toml").open("a") as file:
        file.write('[autopilot]\nprofile = "profile.json"\n')
    try:
        done = call(tmp_path, "up", "--detach")
        assert done.returncode == 0, done.stderr
        commands = [" ".join(one.cmdline()) for one in children(tmp_path)]
        assert len(commands) == 2 and any("lab.commands.autopilot" in one for one in commands)
    finally:
        done = call(tmp_path, "down")
    assert done.returncode == 0


def test_second_up_keeps_the_first_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both had looked before either was up, as where a model has to be fetched first."""
    coordinator_alone(tmp_path, 7070)
    monkeypatch.setattr(here, "runs_folder", lambda: tmp_path)
    settings = UpSettings(cluster_file=str(tmp_path / "cluster.toml"))
    at = up.place(settings.cluster_file, "only")
    at.folder.mkdir()
    with here.noted(at.folder, model_id="m", base_url="", coordinator="tcp://127.0.0.1:7070"):
        with pytest.raises(up.RunsAlready):
            asyncio.run(up._up(settings, at, HostPlan((), ()), "", Console()))
        assert here.running(at.folder)


def test_detached_up_says_why_it_failed(tmp_path: Path) -> None:
    """A detached up that fails says why, and its log can be kept."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        coordinator_alone(tmp_path, taken.getsockname()[1])
        done = call(tmp_path, "up", "--detach")
    assert done.returncode == 1 and "Address already in use" in done.stderr, done.stderr
    assert call(tmp_path, "down", "--keep-logs").returncode == 0
    kept = {path.name for path in (tmp_path / "state").rglob("*.*")}
    assert "up.log" in kept and "cluster.json" not in kept


def test_unknown_host_is_refused(tmp_path: Path) -> None:
    """A --host that is not in the file is refused with those that are."""
    coordinator_alone(tmp_path, 7070)
    done = call(tmp_path, "up", "--host", "other")
    assert done.returncode == 2 and "--host:" in done.stderr and "has no host other, but only" in done.stderr


@pytest.mark.parametrize("arguments", [("up",), ("up", "--detach")])
def test_unwritable_log_folder_is_reported(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    """up ends with one message if no log can be kept."""
    coordinator_alone(tmp_path, 7070)
    (tmp_path / "state").write_text("a file")
    done = call(tmp_path, *arguments)
    assert done.returncode == 1
    assert "cannot keep logs in" in done.stderr and "XDG_STATE_HOME" in done.stderr and "Traceback" not in done.stderr


def site(folder: Path, keys: str) -> HostSite:
    path = folder / "cluster.toml"
    path.write_text(f"""
        keys = "{keys}"
        gateway = {{ tenants = "tenants.toml" }}
        [hosts.front]
        address = "10.0.0.1"
        ssh = "me@front"
        coordinator = true
        gateways = 1
        [hosts.back]
        address = "10.0.0.2"
        workers = "0P2D"
        """)
    return HostSite(path, parse(path.read_text(), folder), local=False)


def test_host_gets_only_own_secret_keys(tmp_path: Path) -> None:
    """A host's parcel holds the secret keys of its own roles and no others."""
    make_keys(NewKeysSettings(folder=str(tmp_path / "keys")))
    at = site(tmp_path, "keys")
    with pytest.raises(SettingsError, match=r"there is no .*tenants.toml"):
        parcel(at, "front")
    (tmp_path / "of-all.toml").write_text("[tenants]")
    (tmp_path / "tenants.toml").symlink_to("of-all.toml")
    (tmp_path / "keys" / "tls.key").write_text("another program's secret")
    secrets = {}
    for host in ("front", "back"):
        with tarfile.open(fileobj=io.BytesIO(parcel(at, host))) as tar:
            members = tar.getmembers()
            tenants = tar.extractfile("tenants.toml")
            assert tenants is not None and tenants.read() == b"[tenants]"
        names = {one.name for one in members}
        assert {one.mode for one in members} == {0o600} and {"cluster.toml", "tenants.toml"} <= names
        assert len([name for name in names if name.endswith(".key")]) == 5
        secrets[host] = sorted(name for name in names if name.endswith(".key_secret"))
    assert secrets["front"] == [f"keys/{role}.key_secret" for role in ("client", "coordinator", "gateway")]
    assert secrets["back"] == ["keys/decode.key_secret"]
    assert keys_there(at) == '"$d"/keys'
    (tmp_path / "keys" / "gateway-9.key").symlink_to("nowhere")
    with pytest.raises(SettingsError, match=r"gateway-9.key: No such file"):
        parcel(at, "back")


def test_only_files_beside_it_are_copied(tmp_path: Path) -> None:
    """Files outside the cluster file's folder are not copied to hosts."""
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "tenants.toml").write_text("")
    with pytest.raises(SettingsError, match="beside or below it"):
        parcel(site(tmp_path / "conf", "../keys"), "back")
    at = site(tmp_path / "conf", "/etc/crossdock keys")
    with tarfile.open(fileobj=io.BytesIO(parcel(at, "back"))) as tar:
        assert sorted(tar.getnames()) == ["cluster.toml", "tenants.toml"]
    assert keys_there(at) == "'/etc/crossdock keys'"


@pytest.mark.parametrize("ssh", ["-oProxyCommand=touch x", "-oProxyCommand=x", " -v", "me@front -oX"])
def test_ssh_destination_is_no_option(tmp_path: Path, ssh: str) -> None:
    """A host's `ssh` that ssh would read as an option, or that has a blank, is refused."""
    text = site(tmp_path, "keys").path.read_text().replace("me@front", ssh)
    with pytest.raises(ClusterError, match="ssh"):
        parse(text, tmp_path)


def test_host_commands_use_ssh_or_shell(tmp_path: Path) -> None:
    """Commands for a host go through ssh, or through a local shell if it is this machine."""
    make_keys(NewKeysSettings(folder=str(tmp_path / "keys")))
    at = site(tmp_path, "keys")
    command = at.command("front", "echo it")
    assert command[0] == "ssh" and command[-2] == "me@front" and "BatchMode=yes" in command
    assert at.command("back", "echo it")[-2] == "10.0.0.2"
    here = HostSite(at.path, at.file, local=True).command("back", 'printf "%s" "$d"')
    done = subprocess.run(
        here, env={"XDG_STATE_HOME": "/s p"}, capture_output=True, text=True, timeout=WAIT_S, check=True
    )
    assert done.stdout == "/s p/crossdock/runs/crossdock.back"
