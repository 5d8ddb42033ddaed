"""A cluster of several hosts from one file, as `scripts/launch_ssh` brings it up and takes it down."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from launcher.admin.keys import NewKeysSettings
from launcher.admin.keys import run as make_keys
from proto.messages import Role
from runtime.link.keys import Keys
from tests.e2e.live import Served
from tests.e2e.netns import network
from tests.e2e.test_secured import knock_in_vain

ROOT = Path(__file__).parents[2]
FAKE_SSH = """#!/bin/sh
# Takes what ssh would, notes it, and runs the command here in an empty environment, as a login on another host would.
echo "$@" >> "{log}"
while [ "${{1#-}}" != "$1" ]; do shift 2; done
shift
exec env -i HOME="{home}" PATH=/usr/bin:/bin OMP_NUM_THREADS=1 sh -c "$*"
"""


class Launched(Served):
    """One file, and the command that starts it."""

    def __init__(self, folder: Path, text: str, *, local: bool = True) -> None:
        super().__init__()
        self.state = folder / "home" / ".local" / "state"
        self.path = folder / "cluster.toml"
        self.path.write_text(text)
        self.options = ["--local"] if local else []
        self.environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "150"}
        self.environment["XDG_STATE_HOME"] = str(self.state)

    def call(self, verb: str, *more: str, expect: int = 0) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "launcher.cli", "cluster", "launch", verb, str(self.path), *self.options, *more],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        said = done.stdout + done.stderr
        assert done.returncode == expect, said
        return said

    def processes(self) -> list[psutil.Process]:
        """All that was started for it, known by its environment."""
        home = str(self.path.parent / "home")
        found = []
        for one in psutil.process_iter():
            try:
                environment = one.environ()
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
            if home in environment.get("XDG_STATE_HOME", "") + environment.get("HOME", ""):
                found.append(one)
        return found


@contextmanager
def launched(folder: Path, text: str, *, local: bool = True) -> Iterator[Launched]:
    cluster = Launched(folder, text, local=local)
    try:
        yield cluster
    finally:
        subprocess.run(
            [sys.executable, "-m", "launcher.cli", "cluster", "launch", "down", str(cluster.path), *cluster.options],
            env=cluster.environment, capture_output=True, timeout=300, check=False,
        )  # fmt: skip
    assert not cluster.processes()
    assert not list(cluster.state.rglob("*.*")), "down leaves something behind"


def in_namespaces(model: Path, spaces: dict[str, tuple[str, str]], security: str) -> str:
    parts = {
        "c": "coordinator = true",
        "g": "gateways = 1",
        "p": 'workers = "1P0D"\ninterface = "eth0"',
        "d": 'workers = "0P1D"\ninterface = "eth0"',
    }
    hosts = "\n".join(
        f'[hosts.{name}]\naddress = "{address}"\nnetns = "{space}"\n{parts[name]}'
        for name, (address, space) in spaces.items()
    )
    return f'model = "{model}"\n{security}\n{hosts}\n[worker]\nkv_gib = 0.25\n[common]\nheartbeat_ms = 300\n'


@pytest.mark.long
@pytest.mark.timeout(600)
def test_one_file_starts_four_hosts(tiny: Path, tmp_path: Path) -> None:
    """One cluster file starts a cluster with keys on four hosts, each a network namespace."""
    with network() as net:
        spaces = {name: (net.host(name), net.inside(name)[-1]) for name in ("c", "g", "p", "d")}
        with launched(tmp_path, in_namespaces(tiny, spaces, "")) as cluster:
            assert "keys: needed, since [hosts.c] listens on" in cluster.call("up", expect=2)
        make_keys(NewKeysSettings(folder=str(tmp_path / "keys")))
        with launched(tmp_path, in_namespaces(tiny, spaces, 'keys = "keys"')) as cluster:
            cluster.keys = Keys(tmp_path / "keys", Role.OBSERVER)
            assert f"Base URL   http://{spaces['g'][0]}:8000/v1" in cluster.call("up")
            cluster.model_id, cluster.base_url = tiny.name, f"http://{spaces['g'][0]}:8000"
            cluster.coordinator = f"tcp://{spaces['c'][0]}:7070"
            expected = cluster.token_ids([1, 2, 3], 20)
            assert len(expected) == 20
            said = cluster.call("status")
            assert "d.decode-0" in said and said.count("up (pid") == 4
            assert "d | info registered" in cluster.call("logs", "--host", "d")
            there = sorted(path.name for path in cluster.state.rglob("*.key_secret"))
            names = ("client", "coordinator", "decode", "gateway", "prefill")
            assert there == [f"{name}.key_secret" for name in names], "each host has its own roles' keys alone"
            tokens, kv = f"tcp://{spaces['g'][0]}:7100", f"tcp://{spaces['d'][0]}:7200"
            knock_in_vain(tmp_path / "keys", tmp_path / "foreign", cluster.coordinator, tokens, kv)
            counters = cluster.status().counters
            assert all(counters[f"turned_away_{why}"] for why in ("plain", "unknown_key", "wrong_role")), counters
            assert "is up already on c, g, p, d" in cluster.call("up", expect=1)
            before = next(one for one in cluster.processes() if "decode_worker" in one.cmdline())
            before.send_signal(signal.SIGKILL)
            cluster.wait_for("the decode worker's end is noticed", lambda: len(cluster.status().workers) == 1)
            cluster.wait_registered(2)
            assert cluster.token_ids([1, 2, 3], 20) == expected
            assert cluster.call("down").count("is down") == 4
            assert not cluster.processes()
            assert cluster.call("status", expect=1).count("down") == 4


@pytest.mark.long
def test_launch_works_over_ssh(tiny: Path, tmp_path: Path) -> None:
    """With an ssh that runs the command here: everything must survive its quoting, and an environment without ours."""
    log, home, binaries = tmp_path / "ssh.log", tmp_path / "home", tmp_path / "bin"
    home.mkdir()
    binaries.mkdir()
    (binaries / "ssh").write_text(FAKE_SSH.format(log=log, home=home))
    (binaries / "ssh").chmod(0o755)
    text = f"""
        model = "{tiny}"
        command = "env PYTHONPATH={ROOT} {sys.executable} -P -m launcher.cli"
        ports = {{ coordinator = 17070, http = 18000, tokens = 0, kv = 0 }}
        worker = {{ kv_gib = 0.25 }}
        [hosts.front]
        address = "127.0.0.1"
        ssh = "me@front"
        coordinator = true
        gateways = 1
        [hosts.back]
        address = "127.0.0.2"
        workers = "1P1D"
    """
    with launched(tmp_path, text, local=False) as cluster:
        cluster.environment["PATH"] = f"{binaries}:{cluster.environment['PATH']}"
        cluster.path.write_text(text.replace("kv_gib = 0.25", "kv_gib = 16384"))
        said = cluster.call("up", expect=1)
        assert "back: status 78" in said and "--kv-gib: 16384 GiB is over the memory" in said
        assert not cluster.processes(), "what runs on the other host waits in vain"
        cluster.path.write_text(text)
        cluster.call("up")
        cluster.model_id, cluster.base_url = tiny.name, "http://127.0.0.1:18000"
        assert len(cluster.token_ids([1, 2, 3], 5)) == 5
        assert "back.prefill-0" in cluster.call("status")
        assert "127.0.0.2" in log.read_text() and "me@front" in log.read_text()
        cluster.call("down")
        with pytest.raises(httpx.ConnectError):
            httpx.get(cluster.base_url, trust_env=False)
