"""A real cluster for tests: `crossdock serve` as a user starts it, its processes, and ways to hurt them."""

import ctypes
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import uvloop
from prometheus_client.parser import text_string_to_metric_families

from launcher.admin.status import NoAnswer, ask
from proto.status import StatusReport
from runtime.link.keys import Keys

READY_S = float(os.environ.get("CROSSDOCK_READY_TIMEOUT_S", "180"))
START_S = 700.0  # `serve` itself gives up after `--ready-timeout-s`, which is 180 s unless a test asks for more
SERVES = "Serving until Ctrl-C"  # what `serve` says once it is ready
ROLES = ("coordinator", "gateway", "prefill_worker", "decode_worker")


class Served:
    """A cluster that serves, however it was started. `base_url` is the gateway's; `coordinator` is a ZeroMQ address."""

    model_id = ""
    base_url = ""
    coordinator = ""
    keys: Keys | None = None  # for its control port
    hears_garbage = False  # a test sends what no process of ours would send

    def __init__(self) -> None:
        self.output: list[str] = []

    def check_links(self) -> None:
        """A message that its receiver refuses ends a link, which heals, so that a test might notice nothing."""
        refused = [line for line in self.output if "protocol error" in line]
        assert self.hears_garbage or not refused, "".join(refused[:5])

    def status(self) -> StatusReport:
        return uvloop.run(ask(self.coordinator, 5_000, self.keys))

    def wait_for(self, what: str, condition: Callable[[], bool], timeout_s: float = 90.0) -> None:
        """Until `condition()` is true; it is polled, since the processes it looks at are not ours to be told by. A coordinator
        that does not answer `status` makes it false."""
        deadline = time.monotonic() + timeout_s
        while not _holds(condition):
            if time.monotonic() > deadline:
                raise AssertionError(f"not in {timeout_s} s: {what}\n" + "".join(self.output[-30:]))
            time.sleep(0.05)

    def wait_ready(self, timeout_s: float = READY_S) -> None:
        self.wait_for("ready", self._is_ready, timeout_s)

    def wait_registered(self, workers: int, timeout_s: float = READY_S) -> None:
        """Until a coordinator knows of the gateway and so many workers, and the gateway of it."""

        def registered() -> bool:
            self.check_running()
            report = self.status()
            return len(report.workers) == workers and len(report.gateways) == 1

        self.wait_for(f"{workers} workers and the gateway are registered", registered, timeout_s)
        self.wait_ready(timeout_s)

    def check_running(self) -> None:
        """Raises AssertionError if a process has failed, where that can be told."""

    def scrape(self, name: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
        """All samples of one process, by name and labels, histograms' buckets included."""
        address = self.status().metrics[name]
        answer = httpx.get(f"http://{address}/metrics", timeout=60.0, trust_env=False)
        assert answer.status_code == 200, said(answer)
        return {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(answer.text)
            for sample in family.samples
        }

    def block_tokens(self) -> int:
        """The tokens of a KV block, which is the engine's choice."""
        found = self.scrape(self.status().workers[0].name)
        return int(next(value for (name, _), value in found.items() if name == "crossdock_kv_block_tokens"))

    def _is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.base_url}/ready", timeout=5.0, trust_env=False).status_code == 200
        except httpx.HTTPError:
            return False

    def wait_idle(self) -> StatusReport:
        """Nothing queued, nothing running, no block held."""

        def idle() -> bool:
            report = self.status()
            return (
                not report.queued
                and not report.running
                and not any(w.kv_blocks_used or w.requests for w in report.workers)
            )

        self.wait_for("everything released", idle)
        return self.status()

    def complete(self, prompt: Any, max_tokens: int, **options: Any) -> dict[str, Any]:
        body = {"model": self.model_id, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, **options}
        answer = httpx.post(f"{self.base_url}/v1/completions", json=body, timeout=120.0, trust_env=False)
        assert answer.status_code == 200, said(answer)
        found: dict[str, Any] = answer.json()
        return found

    def token_ids(self, prompt: list[int], max_tokens: int, **options: Any) -> list[int]:
        """The tokens of one greedy answer."""
        choices = self.complete(prompt, max_tokens, return_token_ids=True, **options)["choices"]
        ids: list[int] = choices[0]["token_ids"]
        return ids


class Live(Served):
    """`crossdock serve`; ready once made, on ports of its own choice."""

    def __init__(
        self, model: Path, home: Path, *arguments: str, port: int | None = 0,
        command: Sequence[str] = (sys.executable, "-m", "launcher.cli"), **settings: str,
    ) -> None:  # fmt: skip
        """`port`: None leaves `--port` open. `command` is what runs `crossdock`. `settings` go by the environment."""
        super().__init__()
        self.model = model
        self.home = home
        self.model_id = model.name
        environment = {
            **os.environ,
            "XDG_STATE_HOME": str(home),
            "CROSSDOCK_KV_GIB": "0.5",
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "200",
            **{f"CROSSDOCK_{name}": value for name, value in settings.items()},
        }
        serve = [*command, "serve", "--model", str(model), *(() if port is None else ("--port", str(port))), *arguments]
        self.process = subprocess.Popen(
            serve,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        self._serving = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._serving.wait(START_S)
        if not any(line.startswith(SERVES) for line in self.output):
            self.stop()
            raise AssertionError("the cluster did not come up:\n" + "".join(self.output))

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output.append(line)
            if found := re.search(r"--coordinator (tcp://\S+)", line):
                self.coordinator = found[1]
            if found := re.match(r"Base URL +(http://\S+)/v1", line):
                self.base_url = found[1]
            if line.startswith(SERVES):
                self._serving.set()
        self._serving.set()

    # --- processes ------------------------------------------------------------------------------------------------------

    def processes(self) -> dict[str, list[psutil.Process]]:
        """Live children by module."""
        found: dict[str, list[psutil.Process]] = {role: [] for role in ROLES}
        for child in psutil.Process(self.process.pid).children(recursive=True):
            try:
                arguments = child.cmdline()
            except psutil.Error:
                continue
            for role in ROLES:
                if role in arguments:
                    found[role].append(child)
        return found

    @property
    def port(self) -> int:
        """Of HTTP."""
        return int(self.base_url.rsplit(":", 1)[1])

    @property
    def tokens(self) -> str:
        """The gateway's token port, as a ZeroMQ address."""
        connections = self.one("gateway").net_connections("tcp")
        others = {self.port, int(self.status().metrics["gateway-0"].rsplit(":", 1)[1])}
        (port,) = {one.laddr.port for one in connections if one.status == psutil.CONN_LISTEN} - others
        return f"tcp://127.0.0.1:{port}"

    def one(self, role: str) -> psutil.Process:
        return self.processes()[role][0]

    def stop(self, number: signal.Signals = signal.SIGINT) -> int:
        """As Ctrl-C does; returns the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            code = self.process.wait(90)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        self._reader.join(60)
        return code


def said(answer: httpx.Response) -> str:
    """For an assertion about its status."""
    return f"{answer.request.method} {answer.request.url.path}: HTTP {answer.status_code}: {answer.text[:2000]}"


def _holds(condition: Callable[[], bool]) -> bool:
    try:
        return condition()
    except NoAnswer:
        return False


def at_once(work: Any, items: Any, threads: int = 16) -> list[Any]:
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(work, items))


@contextmanager
def live(model: Path, home: Path, *arguments: str, **settings: Any) -> Iterator[Live]:
    cluster = Live(model, home, *arguments, **settings)
    try:
        yield cluster
    finally:
        cluster.stop()
    cluster.check_links()


# --- breaking things ------------------------------------------------------------------------------------------------------


def sockets_between(one: psutil.Process, other: psutil.Process, but_ports: set[int]) -> list[int]:
    """Descriptors in `one` of TCP connections with `other`, those of the given ports left out."""
    theirs = {(c.laddr, c.raddr) for c in other.net_connections("tcp") if c.raddr}
    return [
        c.fd
        for c in one.net_connections("tcp")
        if c.raddr and (c.raddr, c.laddr) in theirs and not {c.laddr.port, c.raddr.port} & but_ports
    ]


def shm_connections(process: psutil.Process) -> list[int]:
    """Descriptors of its connections with peers that it shares memory with."""
    return [c.fd for c in process.net_connections("unix") if c.type == socket.SOCK_SEQPACKET]


def cut(process: psutil.Process, descriptor: int) -> None:
    """Shut a socket of another process down, as a broken cable would (needs the right to trace it)."""
    libc = ctypes.CDLL(None, use_errno=True)
    pidfd = os.pidfd_open(process.pid)
    try:
        duplicate = libc.syscall(438, pidfd, descriptor, 0)  # pidfd_getfd
        if duplicate < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        with socket.socket(fileno=duplicate) as connection:
            connection.shutdown(socket.SHUT_RDWR)
    finally:
        os.close(pidfd)
