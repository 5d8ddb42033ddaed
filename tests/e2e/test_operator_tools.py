"""The tools for operators against a cluster that runs, and a detached cluster from start to stop."""

import contextlib
import json
import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launcher.doctor import rules
from tests.e2e import doctor_faults
from tests.e2e.live import Live

CROSSDOCK = (sys.executable, "-P", "-m", "launcher.cli")
LAUNCHED_S = 300.0


def _crossdock(up: Live, *arguments: str, **more: str) -> "subprocess.CompletedProcess[str]":
    environment = os.environ | {"XDG_STATE_HOME": str(up.home), "COLUMNS": "200"} | more
    return subprocess.run([*CROSSDOCK, *arguments], env=environment, capture_output=True, text=True, timeout=120.0)


def test_tools_show_a_running_cluster(cluster: Live) -> None:
    """Each tool finds the cluster on this machine by itself, and shows it."""
    cluster.complete(list(range(20, 80)), 8)
    top = _crossdock(cluster, "top", "--once").stdout
    assert "prefill-0" in top and "decode-0" in top and "tokens/s" in top
    logs = _crossdock(cluster, "logs", "decode").stdout.splitlines()
    assert logs and all(line.split()[1] == "decode-0" for line in logs)
    rows = json.loads(_crossdock(cluster, "config", "show", "decode-0", "--json").stdout)
    sources = {row["option"]: (row["value"], row["source"]) for row in rows}
    # `serve` reads this in its environment, and gives it to the worker as a flag.
    assert sources["--kv-gib"] == (0.5, "flag")
    assert sources["--name"] == ("decode-0", "flag") and sources["--max-seqs"] == (64, "default")
    told = subprocess.run(
        [*CROSSDOCK, "chat", "--max-tokens", "5"],
        env=os.environ | {"XDG_STATE_HOME": str(cluster.home)},
        input="Hello\n/reset\nAgain\n",
        capture_output=True,
        text=True,
        timeout=120.0,
    )
    assert told.returncode == 0, told.stderr
    assert len(told.stdout.strip()) > 0


def test_top_ends_with_q(cluster: Live) -> None:
    """On a terminal, top shows the workers until q is typed."""
    near, far = pty.openpty()
    environment = os.environ | {"XDG_STATE_HOME": str(cluster.home), "TERM": "xterm"}
    process = subprocess.Popen([*CROSSDOCK, "top"], env=environment, stdin=far, stdout=far, stderr=far)
    os.close(far)
    seen, deadline = b"", time.monotonic() + 100.0
    while b"decode-0" not in seen and time.monotonic() < deadline:
        if select.select([near], [], [], 1.0)[0]:
            seen += os.read(near, 65_536)
    assert b"decode-0" in seen, seen
    os.write(near, b"q")
    while process.poll() is None and time.monotonic() < deadline:
        if select.select([near], [], [], 0.2)[0]:
            with contextlib.suppress(OSError):  # once the other end is closed
                os.read(near, 65_536)
    os.close(near)
    assert process.wait(10.0) == 0


def test_detached_cluster_restarts_and_stops(tiny: Path, tmp_path: Path) -> None:
    """A detached cluster serves until it is stopped; restart gives it a new process with the same options."""
    environment = os.environ | {"XDG_STATE_HOME": str(tmp_path), "CROSSDOCK_KV_GIB": "0.25", "OMP_NUM_THREADS": "1"}

    def crossdock(*arguments: str) -> "subprocess.CompletedProcess[str]":
        command = [*CROSSDOCK, *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LAUNCHED_S)

    started = crossdock("serve", str(tiny), "--port", "0", "--detach")
    assert started.returncode == 0 and "Base URL" in started.stdout, started.stdout + started.stderr
    (first,) = json.loads(crossdock("status", "--json").stdout)["workers"][:1]
    again = crossdock("restart")
    assert again.returncode == 0 and "Base URL" in again.stdout, again.stdout + again.stderr
    (second,) = json.loads(crossdock("status", "--json").stdout)["workers"][:1]
    assert first["pid"] != second["pid"] and first["kv_blocks"] == second["kv_blocks"]
    stopped = crossdock("stop")
    assert stopped.returncode == 0 and "is stopped" in stopped.stdout
    assert "no cluster of yours runs" in crossdock("stop").stderr


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_doctor_names_real_faults(tmp_path: Path) -> None:
    """`doctor` names at least 11 of 12 faults of a real cluster, and says nothing while there is none."""
    named = []
    with doctor_faults.faulty(tmp_path) as faults:
        for name in doctor_faults.NAMES:
            with getattr(faults, name)():
                time.sleep(5.0)
                found = rules.diagnose(doctor_faults.looked_at(faults.up))
            if name == "healthy":
                assert found == []
            elif name in [one.cause for one in found]:
                named.append(name)
    assert len(named) >= len(doctor_faults.NAMES) - 2, named
