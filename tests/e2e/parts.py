"""A cluster started process by process, as on several machines: each with options of its own, and a place to run in."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import psutil

from launcher.local.ports import free_port
from proto.messages import Role
from runtime.link.keys import Keys
from tests.e2e.live import Served

ROOT = Path(__file__).parents[2]
STOP_S = 30.0


class Parts(Served):
    """Coordinator and gateway on loopback, unless told otherwise; `start` each process, then `wait_registered`."""

    def __init__(
        self, model: Path, host: str = "127.0.0.1", gateway_host: str = "127.0.0.1", keys: Path | None = None
    ) -> None:
        """`keys`: a folder with all of them, for all processes."""
        super().__init__()
        self.keys = Keys(keys, Role.OBSERVER) if keys else None
        self.model = model
        self.model_id = model.name
        self.coordinator = f"tcp://{host}:{free_port('127.0.0.1')}"
        self.port = free_port("127.0.0.1")
        self.base_url = f"http://{gateway_host}:{self.port}"
        self.trees: dict[str, Path] = {}  # by name, where the code of a process is; the others run that of this tree
        self.processes: dict[str, subprocess.Popen[str]] = {}
        self._readers: dict[str, threading.Thread] = {}

    def start(self, role: str, *arguments: str, name: str = "", inside: Sequence[str] = ()) -> None:
        """`role` is a module; `inside` is a command that runs another in some place, like `ip netns exec NAME`."""
        options = ["--heartbeat-ms", "300"]
        if role == "coordinator":
            options += ["--bind", self.coordinator]
        else:
            options += ["--coordinator", self.coordinator, "--model", str(self.model)]
        if role == "gateway":
            options += ["--port", str(self.port)]
        elif role.endswith("_worker"):
            options += ["--kv-gib", "0.25"]
        if self.keys is not None:
            options += ["--keys", str(self.keys.folder)]
        name = name or role
        tree = self.trees.get(name, ROOT)
        path = os.pathsep.join([str(tree), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        process = subprocess.Popen(
            [*inside, sys.executable, "-m", role, "--name", name, *options, *arguments],
            env=environment,
            cwd=tree,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.processes[name] = process
        self._readers[name] = threading.Thread(target=self._read, args=(name, process), daemon=True)
        self._readers[name].start()

    def _read(self, name: str, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self.output.append(f"{name}: {line}")

    def check_running(self) -> None:
        for name, process in self.processes.items():
            if (process.poll() or 0) > 0:  # by itself: what a test kills has a negative status
                self._readers[name].join(STOP_S)
                words = [line for line in self.output if line.startswith(f"{name}: ")]
                raise AssertionError(f"{name} ended with status {process.returncode}\n" + "".join(words[-15:]))

    def kill(self, name: str) -> None:
        process = self.processes.pop(name)
        process.kill()
        process.wait(STOP_S)

    def stop(self) -> None:
        """All of them and at once, kindly first."""
        for process in self.processes.values():
            process.send_signal(signal.SIGCONT)
            process.terminate()
            process.send_signal(signal.SIGINT)
        for process in self.processes.values():
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(STOP_S)
        for reader in self._readers.values():
            reader.join(STOP_S)


P = TypeVar("P", bound=Parts)


def listening(up: Parts, name: str) -> str:
    """The address of a process's ZeroMQ port."""
    there = psutil.Process(up.processes[name].pid).net_connections("tcp")
    observed = {int(address.rpartition(":")[2]) for address in up.status().metrics.values()}
    ports = {one.laddr.port for one in there if one.status == psutil.CONN_LISTEN} - {up.port} - observed
    return f"tcp://127.0.0.1:{min(ports)}"


@contextmanager
def parts(
    model: Path,
    host: str = "127.0.0.1",
    gateway_host: str = "127.0.0.1",
    keys: Path | None = None,
    kind: type[P] = Parts,  # type: ignore[assignment]
) -> Iterator[P]:
    cluster = kind(model, host, gateway_host, keys)
    try:
        yield cluster
    finally:
        cluster.stop()
    cluster.check_links()
