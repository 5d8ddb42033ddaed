"""One process of each role with probes on their loops, tenants with keys, and what is measured of them during an attack."""

import asyncio
import hashlib
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from launcher.local.ports import free_port
from tests.e2e.parts import ROOT, Parts
from tools.attacks.probe import Record

ROLES = ("coordinator", "gateway", "prefill_worker", "decode_worker")
TENANTS = ("victim", "honest", "evil0", "evil1")
LOOK_S = 0.05
RSS_BYTES_MAX = 4 << 30
"""A process that takes more is killed, as the limit of its container in `deploy/kubernetes.yaml` would do."""
WHOLE_S = 30.0
HEARTBEAT_MS = "500"  # the default


def api_key(tenant: str) -> str:
    return f"sk-{tenant}"


@dataclass
class Target:
    """Everything that an attacker knows."""

    base_url: str
    model: str
    addresses: dict[str, str]  # addresses of the ZeroMQ ports, by process
    keys: str  # the folder of the keys; empty: the cluster has none
    seed: int


@dataclass
class Measured:
    stall_ms: dict[str, float] = field(default_factory=dict)
    """The longest stall of each process's event loop in CPU time, as `probe.Record` counts it."""
    late_ms: float = 0.0  # how late a process was that does nothing else: the noise of this machine
    rss_grown_mib: dict[str, int] = field(default_factory=dict)  # the largest growth of each process
    ended: list[str] = field(default_factory=list)


class Probed(Parts):
    """`begin`, then `watch` in a task; `begin_window` and `end_window` around what is measured."""

    hears_garbage = True

    def begin(self, folder: Path) -> None:
        self.folder = folder
        self.tokens, self.kv = (f"tcp://127.0.0.1:{free_port('127.0.0.1')}" for _ in range(2))
        self._records = {name: Record(folder / f"{name}.probe") for name in (*ROLES, "bystander")}
        self._before: dict[str, int] = {}
        self._most: dict[str, int] = {}
        self._stalls: dict[str, float] = {}
        self._killed: dict[str, str] = {}
        lines = [
            f'[tenants.{tenant}.users.ann]\nkeys = ["{hashlib.sha256(api_key(tenant).encode()).hexdigest()}"]\n'
            for tenant in TENANTS
        ]
        (folder / "tenants.toml").write_text("".join(lines))
        command = [sys.executable, "-m", "tools.attacks.probe", str(folder / "bystander.probe")]
        self._bystander = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
        for role in ROLES:
            self.start_role(role)
        self.wait_registered(2)

    def start_role(self, role: str) -> None:
        tenants = ("--tenants", str(self.folder / "tenants.toml"))
        options = {
            "coordinator": (*tenants, "--usage-db", str(self.folder / "usage.sqlite")),
            "gateway": (*tenants, "--tokens-bind", self.tokens, "--batch-db", str(self.folder / "batches.sqlite")),
            "decode_worker": ("--kv-bind", self.kv),
        }.get(role, ())
        probe = [sys.executable, "-m", "tools.attacks.probe", str(self.folder / f"{role}.probe")]
        common = ("--log-level", "warning", "--log-format", "json", "--heartbeat-ms", HEARTBEAT_MS)
        self._records[role].write(*6 * [0.0])
        self.start(role, *common, *options, inside=probe)

    def target(self, seed: int) -> Target:
        addresses = {"coordinator": self.coordinator, "gateway": self.tokens, "decode_worker": self.kv}
        return Target(self.base_url, self.model_id, addresses, str(self.keys.folder) if self.keys else "", seed)

    def stop(self) -> None:
        if hasattr(self, "_bystander"):
            self._bystander.kill()
            self._bystander.wait()
        super().stop()

    # --- measuring ------------------------------------------------------------------------------------------------------

    async def watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            self.look()

    def look(self) -> None:
        for role, process in self.processes.items():
            if process.poll() is not None:
                continue
            self._stalls[role] = max(self._stalls.get(role, 0.0), self._records[role].stall_s(process.pid))
            rss = rss_bytes(process.pid)
            self._most[role] = max(self._most.get(role, 0), rss)
            if rss > RSS_BYTES_MAX:
                process.kill()
                self._killed[role] = f"killed at {RSS_BYTES_MAX >> 30} GiB"

    def begin_window(self) -> None:
        for record in self._records.values():
            record.reset()
        self._stalls, self._killed = {}, {}
        self._before = {role: rss_bytes(process.pid) for role, process in self.processes.items()}
        self._most = dict(self._before)

    def end_window(self) -> Measured:
        self.look()
        return Measured(
            {role: round(1000 * stall_s, 1) for role, stall_s in self._stalls.items()},
            round(1000 * self._records["bystander"].read()[1], 1),
            {role: (most - self._before.get(role, most)) >> 20 for role, most in self._most.items()},
            self.ended(),
        )

    def ended(self) -> list[str]:
        return [
            f"{role}: {self._killed.get(role) or f'status {process.returncode}'}"
            for role, process in self.processes.items()
            if process.poll() is not None
        ]

    def stands_still(self, for_s: float = 1.0) -> list[str]:
        """Returns the processes whose loop has not ticked for `for_s`."""
        now = time.monotonic()
        alive = (role for role, process in self.processes.items() if process.poll() is None)
        return [role for role in alive if now - self._records[role].read()[2] > for_s]

    async def settle(self, within_s: float) -> None:
        """Waits until each loop has ticked again, so that stalls that lasted until now are counted."""
        since = time.monotonic()
        while time.monotonic() < since + within_s:
            alive = [role for role, process in self.processes.items() if process.poll() is None]
            if all(self._records[role].read()[2] > since for role in alive):
                return
            await asyncio.sleep(LOOK_S)

    def mend(self) -> bool:
        """Kills the processes that stand still, and starts those again that have ended. Returns False if the cluster was not
        whole even then, so that all of it was started anew."""
        for role in self.stands_still(5.0):
            self.processes[role].kill()
            self.processes[role].wait(30)
        self._start_ended()
        try:
            self.wait_for("whole", self._is_whole, WHOLE_S)
        except AssertionError:
            for process in self.processes.values():
                process.kill()
                process.wait(30)
            self._start_ended()
            self.wait_registered(2)
            return False
        return True

    def _start_ended(self) -> None:
        for role, process in list(self.processes.items()):
            if process.poll() is not None:
                self.start_role(role)

    def _is_whole(self) -> bool:
        report = self.status()
        return len(report.workers) == 2 and len(report.gateways) == 1 and self._is_ready()


def rss_bytes(pid: int) -> int:
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0
