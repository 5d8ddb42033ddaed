"""Hostile connections at every port of a cluster while streams run: no process ends, no stream fails, and others get in."""

import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest

from launcher.admin.keys import NewKeysSettings
from launcher.admin.keys import run as make_keys
from launcher.local.ports import free_port
from tests.e2e.balancer import Balancer, Load
from tests.e2e.live import at_once
from tests.e2e.parts import ROOT, Parts, parts
from tests.e2e.test_rolling import come

ROLES = ("coordinator", "gateway", "prefill_worker", "decode_worker")
STREAMS, TOKENS = 3, 120
FEW, FEW_HOLD_S = 300, 5.0
MANY, MANY_HOLD_S = 10_000, 12.0
LEFT_OVER_MAX = 30  # descriptors that a process may have more afterwards: connections between processes come and go


@dataclass
class Port:
    name: str
    address: str
    words: str
    process: str


class Attacked(Parts):
    """One of each role, with ports that are known, and as many descriptors as this machine allows."""

    def begin(self) -> None:
        # The roles inherit it.
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        self.tokens, self.kv = (f"127.0.0.1:{free_port('127.0.0.1')}" for _ in range(2))
        quiet = ("--log-level", "error")
        self.start("coordinator", *quiet)
        self.start("gateway", *quiet, "--tokens-bind", f"tcp://{self.tokens}", "--client-timeout-ms", "4000")
        self.start("prefill_worker", *quiet)
        self.start("decode_worker", *quiet, "--kv-bind", f"tcp://{self.kv}")
        self.wait_registered(2)

    def ports(self) -> list[Port]:
        words = "zmq" if self.keys is None else "curve"
        found = [
            Port("control", self.coordinator.removeprefix("tcp://"), words, "coordinator"),
            Port("token", self.tokens, words, "gateway"),
            Port("KV control", self.kv, words, "decode_worker"),
            Port("HTTP", f"127.0.0.1:{self.port}", "http", "gateway"),
        ]
        metrics = self.status().metrics
        return found + [Port(f"metrics of the {role}", metrics[role], "http", role) for role in ROLES]

    def descriptors(self, name: str) -> int:
        return int(psutil.Process(self.processes[name].pid).num_fds())

    def gets_in(self, port: Port) -> bool:
        """Whether somebody new is served at this port, where a test can ask there."""
        if port.words != "http":
            return bool(self.status().workers)
        path = "/v1/models" if port.name == "HTTP" else "/metrics"
        try:
            return httpx.get(f"http://{port.address}{path}", timeout=5.0, trust_env=False).status_code == 200
        except httpx.TransportError:
            return False


@pytest.fixture(scope="module", params=["plain", "curve"])
def attacked(
    request: pytest.FixtureRequest, tiny: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Attacked]:
    keys = None
    if request.param == "curve":
        keys = tmp_path_factory.mktemp("keys") / "keys"
        make_keys(NewKeysSettings(folder=str(keys)))
    with parts(tiny, keys=keys, kind=Attacked) as up:
        up.begin()
        yield up


def assault(up: Attacked, port: Port, connections: int, hold_s: float) -> dict[str, int]:
    """Attack one port, and look at it meanwhile and afterwards; what became of the connections."""
    before = up.descriptors(port.process)  # with those of other attacks, where there are several at a time
    command = [sys.executable, "-m", "tests.e2e.hostile", port.address, port.words, str(connections), str(hold_s)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as attacker:
        try:
            up.wait_for(f"somebody new gets in: {port.name}", lambda: up.gets_in(port), 60.0)
            written, _ = attacker.communicate(timeout=60 + 5 * hold_s)
        finally:
            attacker.kill()
    counts: dict[str, int] = json.loads(written)
    assert counts["connected"] >= connections * 0.9, (port.name, counts)
    for name, process in up.processes.items():
        assert process.poll() is None, f"{name} ended: {port.name}"
    up.wait_for(
        f"its descriptors are free again: {port.name}",
        lambda: up.descriptors(port.process) <= before + LEFT_OVER_MAX,
        60.0,
    )
    assert up.gets_in(port), port.name
    return counts


def assault_all(up: Attacked, connections: int, hold_s: float, threads: int) -> list[dict[str, int]]:
    """Attack every port, so many at a time, while streams run."""
    balancer = Balancer(up.model_id, [up.base_url])
    expected = [balancer.answer(number, TOKENS) for number in range(STREAMS)]
    loads = [Load(balancer, number, expected, TOKENS) for number in range(STREAMS)]
    try:
        outcomes = at_once(lambda port: assault(up, port, connections, hold_s), up.ports(), threads)
        come(up, loads)
    finally:
        for one in loads:
            one.stop()
    assert not [wrong for one in loads for wrong in one.wrong]
    up.wait_idle()
    assert not any(name.endswith("_restarted") and count for name, count in up.status().counters.items())
    return outcomes


def test_ports_survive_hostile_connections(attacked: Attacked) -> None:
    assault_all(attacked, FEW, FEW_HOLD_S, threads=8)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_ports_survive_many_hostile_connections(attacked: Attacked) -> None:
    """Each port survives ten thousand hostile connections."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < MANY + 1_000:
        pytest.skip(f"this machine allows a process {hard} descriptors")
    outcomes = assault_all(attacked, MANY, MANY_HOLD_S, threads=1)
    sys.stdout.write(
        "".join(f"{port.name}: {counts}\n" for port, counts in zip(attacked.ports(), outcomes, strict=True))
    )
