"""A cluster of real processes that are killed, stopped and started again, and a watcher that asks the coordinator for its
status all the time.

Workers and gateways are forked from a process that has imported torch already: a start then costs a fraction of the CPU, and
hundreds of kills fit into minutes. Workers whose engine runs in another Python have a process of that Python to be forked from.
`fresh=True` starts each as a new program instead; the coordinator always is one.
"""

import asyncio
import ctypes
import json
import multiprocessing
import os
import runpy
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from queue import Queue
from typing import Any, Protocol

import psutil

from launcher.local.ports import free_port
from launcher.process import child_environment, python_command
from proto import limits
from proto.messages import Hello, Message, Role, StatusRequest, Welcome
from proto.status import StatusReport
from runtime.link.client import LinkClient
from runtime.link.server import LinkSettings, Peer
from runtime.process import clock
from tests import tiny_models
from tests.e2e.netns import Network

ROLES = ("coordinator", "gateway", "prefill", "decode")
MODULES = {"prefill": "prefill_worker", "decode": "decode_worker"}
START_S = 300.0
STOP_S = 30.0
ASK_EVERY_S = 0.05
OTHER_PYTHON = os.environ.get("CROSSDOCK_ENGINE_PYTHON", "")  # of workers
KV_GIB = 0.0005 * tiny_models.HEAD_DIM
_PRELOAD = [
    "worker.process",
    "prefill_worker.worker",
    "decode_worker.worker",
    "gateway.main",
    "transformers.models.llama.modeling_llama",
]
_FORK = multiprocessing.get_context("forkserver")
_PR_SET_PDEATHSIG, _CLONE_NEWUTS, _CLONE_NEWNET = 1, 0x04000000, 0x40000000


class Violation(AssertionError):
    """A promise was broken."""


def _become(module: str, arguments: list[str], log: str, host: str = "", namespace: str = "") -> None:
    """Runs a role in a forked process, until the role ends. `host`: its name for the host on which it is; `namespace`: the path
    of that host's network."""
    os.setpgid(0, 0)  # Ctrl-C is for the process that started us
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if host:
        with open(namespace) as network:
            if libc.setns(network.fileno(), _CLONE_NEWNET) or libc.unshare(_CLONE_NEWUTS):
                raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
        socket.sethostname(host)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


class Process(Protocol):
    pid: int

    def poll(self) -> int | None: ...


class _Forked:
    def __init__(self, module: str, arguments: list[str], log: Path, *host: str) -> None:
        self.process = _FORK.Process(target=_become, args=(module, arguments, str(log), *host), daemon=True)
        self.process.start()
        assert self.process.pid is not None
        self.pid = self.process.pid

    def poll(self) -> int | None:
        return self.process.exitcode


def _new_program(module: str, arguments: list[str], log: Path) -> Process:
    """Starts a program that `setpriv` lets end with us. Code of ours between fork and exec would first mark all memory of this
    process for copying: 50 ms in which its clients read nothing."""
    with log.open("ab") as out:
        return subprocess.Popen(
            ("setpriv", "--pdeathsig", "KILL", "--", *python_command(module, *arguments)),
            env=child_environment(1),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            process_group=0,
        )


class _OtherPython:
    """A process of vLLM's Python that forks workers (`tools.chaos.vllm_forks`)."""

    def __init__(self, log: Path) -> None:
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                (OTHER_PYTHON, "-P", "-m", "tools.chaos.vllm_forks"),
                env=child_environment(1) | {"_CROSSDOCK_ENTERED": OTHER_PYTHON},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=out,
                process_group=0,
                text=True,
            )
        self._started: Queue[int] = Queue()
        self.ended: dict[int, int] = {}
        threading.Thread(target=self._read, daemon=True).start()

    def start(self, module: str, arguments: list[str], log: Path) -> Process:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([module, arguments, str(log)]) + "\n")
        self._process.stdin.flush()
        return _ForkedElsewhere(self._started.get(timeout=START_S), self)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            match line.split():
                case ["started", pid]:
                    self._started.put(int(pid))
                case ["ended", pid, status]:
                    self.ended[int(pid)] = int(status)


@dataclass
class _ForkedElsewhere:
    pid: int
    origin: _OtherPython

    def poll(self) -> int | None:
        return self.origin.ended.get(self.pid)


@dataclass(eq=False)
class Member:
    """One place in the cluster, and the process that fills it now."""

    role: str
    slot: str
    options: list[str]
    base_url: str = ""  # the URL of a gateway; empty for other roles
    incarnation: int = 0
    process: Process | None = None
    host: tuple[str, ...] = ()  # the name of the host that it is on, and its network namespace; empty: this machine
    hurt: bool = False  # true from a fault until the process is in its place again
    killed_at: list[float] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{self.slot}.{self.incarnation}"

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid


class Cluster:
    """`async with`: a coordinator, or two with `standby`, and `count` of each other role. State, logs and the ledger are in
    `home`."""

    def __init__(
        self, model: Path, home: Path, *, count: int = 2, fresh: bool = False, kv_gib: float = KV_GIB,
        heartbeat_ms: int = 500, worker_options: tuple[str, ...] = (), standby: bool = False,
        network: Network | None = None,
    ) -> None:  # fmt: skip
        """`network`: each prefill worker is on a host of its own there, with a decode worker."""
        self.model, self.home, self.fresh, self.network = model, home, fresh, network
        address = network.address if network is not None else "127.0.0.1"
        self.coordinator = f"tcp://{address}:{free_port(address)}"
        self.usage_db = home / "usage.sqlite"
        self.members: list[Member] = []
        self.watcher = Watcher(self.coordinator)
        self._other: _OtherPython | None = None
        common = ["--heartbeat-ms", str(heartbeat_ms), "--log-format", "json"]
        far = ["--insecure"] if network is not None else []
        core = ["--bind", self.coordinator, *far, "--usage-db", str(self.usage_db), "--step-tokens", "64"]
        self._add("coordinator", "coordinator", [*common, *core, *(["--standby"] if standby else [])])
        if standby:
            self._add("coordinator", "coordinator-1", self.members[0].options)
        common += ["--coordinator", self.coordinator, "--model", str(model)]
        for number in range(count):
            port = free_port("127.0.0.1")
            gateway = [*common, "--port", str(port), *far]
            gateway += ["--tokens-bind", f"tcp://{address}:0"] if network is not None else []
            self._add("gateway", f"gateway-{number}", gateway, f"http://127.0.0.1:{port}")
            host = self._host(f"host-{number}")
            for role in MODULES:
                options = [*common, "--kv-gib", str(kv_gib), *worker_options]
                options += ["--kv-bind", f"tcp://{host[2]}:0", *far] if role == "decode" and network is not None else []
                self._add(role, f"{role}-{number}", options).host = host[:2]

    def _host(self, name: str) -> tuple[str, ...]:
        """Makes a host; returns its name, its network namespace and its address. They are empty without a network."""
        if self.network is None:
            return ()
        address = self.network.host(name)
        return name, self.network.namespace(name), address

    def _add(self, role: str, slot: str, options: list[str], base_url: str = "") -> Member:
        self.members.append(member := Member(role, slot, options, base_url))
        return member

    def of(self, role: str) -> list[Member]:
        return [member for member in self.members if member.role == role]

    def serving(self) -> Member:
        """Returns the coordinator that serves now, by the latest report."""
        own = self.watcher.report.metrics if self.watcher.report is not None else {}
        coordinators = self.of("coordinator")
        return next((member for member in coordinators if member.name in own), coordinators[0])

    def stands_by(self, coordinator: Member) -> bool:
        """Whether it has loaded, and waits for its turn or has had it."""
        if "--standby" not in coordinator.options:
            return True
        lines = (self.home / f"{coordinator.slot}.log").read_text(errors="replace").splitlines()
        return any('"standing by"' in line and f'"{coordinator.name}"' in line for line in lines)

    async def __aenter__(self) -> "Cluster":
        _FORK.set_forkserver_preload(_PRELOAD)
        try:
            for member in self.members:
                self.start(member)
            await self.watcher.start()
            await self.until("the cluster is up", self.is_whole)
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self.close()

    # --- one process ----------------------------------------------------------------------------------------------------

    def start(self, member: Member) -> None:
        member.incarnation += 1
        module, log = MODULES.get(member.role, member.role), self.home / f"{member.slot}.log"
        arguments = ["--name", member.name, *member.options]
        if member.role == "coordinator" or (self.fresh and not member.host):
            member.process = _new_program(module, arguments, log)
        elif OTHER_PYTHON and member.role in MODULES:
            self._other = self._other or _OtherPython(self.home / "forks.log")
            member.process = self._other.start(module, arguments, log)
        else:
            member.process = _Forked(module, arguments, log, *member.host)

    async def kill(self, member: Member, *, rank: bool = False) -> None:
        """Kills the process, or a rank that computes with it; returns when the process has ended."""
        process = member.process
        assert process is not None
        children = psutil.Process(process.pid).children() if rank else []
        ranks = [child.pid for child in children if "worker.rank" in child.cmdline()]
        os.kill(ranks[0] if ranks else process.pid, signal.SIGKILL)
        await self.until(f"{member.name} is dead", lambda: process.poll() is not None, STOP_S)

    def signal(self, member: Member, number: signal.Signals) -> None:
        os.kill(member.pid, number)

    # --- all of them ----------------------------------------------------------------------------------------------------

    def is_whole(self) -> bool:
        """Whether all workers and gateways are registered, by the latest report."""
        known = self.watcher.names()
        return self.watcher.incarnation_known and all(m.name in known for m in self.members if m.role != "coordinator")

    def check_alive(self) -> None:
        for member in self.members:
            if not member.hurt and member.process is not None and (status := member.process.poll()) is not None:
                raise Violation(f"{member.name} ended by itself with status {status}; {self.home}/{member.slot}.log")

    def check_links(self) -> None:
        """A message that its receiver refuses ends a link, which heals, so that no client might notice."""
        for log in self.home.glob("*.log"):
            if (at := (said := log.read_text(errors="replace")).find('"protocol error"')) >= 0:
                line = said[said.rfind("\n", 0, at) + 1 :].partition("\n")[0]
                raise Violation(f"{log}: {line[:500]}")

    async def until(self, what: str, condition: Callable[[], bool], timeout_s: float = START_S) -> float:
        """Waits for `condition()`; returns the seconds it took. Processes cannot tell us of it, so they are polled."""
        begun = time.monotonic()
        while not condition():
            if time.monotonic() - begun > timeout_s:
                raise Violation(f"not in {timeout_s:.0f} s: {what}")
            await asyncio.sleep(0.01)
        return time.monotonic() - begun

    async def until_idle(self, timeout_s: float = 30.0) -> float:
        """Waits until nothing is queued, running or held, as both the coordinator and the workers say; returns the seconds it
        took."""
        begun = time.monotonic()
        while True:
            # A report has the workers' answers to the question before.
            await self.watcher.next_report(timeout_s)
            report = await self.watcher.next_report(timeout_s)
            if is_idle(report) and self.is_whole():
                return time.monotonic() - begun
            if time.monotonic() - begun > timeout_s:
                raise Violation(f"not idle in {timeout_s:.0f} s: {report}")

    async def close(self) -> dict[str, int]:
        """Ends all processes, with SIGTERM first. Returns exit statuses by name: -9 for processes that had to be killed."""
        await self.watcher.close()
        alive = [m for m in self.members if m.process is not None and m.process.poll() is None]
        ended: dict[str, int] = {}
        # Workers and gateways first: they wait for a coordinator that is gone.
        for some in ([m for m in alive if m.role != "coordinator"], [m for m in alive if m.role == "coordinator"]):
            for member in some:
                self.signal(member, signal.SIGCONT)
                self.signal(member, signal.SIGTERM)
            for member in some:
                process = member.process
                assert process is not None
                try:
                    await self.until(f"{member.name} has ended", lambda one=process: one.poll() is not None, STOP_S)  # type: ignore[misc]
                except Violation:
                    await self.kill(member)
                ended[member.name] = process.poll() or 0
                member.process = None
        if self._other is not None:
            self._other.close()
            self._other = None
        return ended


def is_idle(report: StatusReport) -> bool:
    held = any(
        w.kv_blocks_used or w.requests or w.own_blocks or w.own_blocks_quarantined or w.own_sessions
        for w in report.workers
    )
    return not (report.queued or report.running or held)


class Watcher:
    """Asks the coordinator for its status again and again, over one link that comes back by itself."""

    def __init__(self, coordinator: str) -> None:
        self.report: StatusReport | None = None
        self.incarnation_known = False
        self.coordinators = 0
        """How often a coordinator has accepted our link: it grows when one has begun anew after a fault."""
        self._stalls: deque[tuple[float, float]] = deque(maxlen=4096)
        """When we were late, and by how much: the machine itself stood still then."""
        self._peer: Peer | None = None
        self._news = asyncio.Event()
        hello = Hello(
            limits.PROTOCOL_VERSION, Role.OBSERVER, clock.new_incarnation(), f"watcher-{secrets.token_hex(4)}",
            host=socket.gethostname(), pid=os.getpid(),
        )  # fmt: skip
        self._link = LinkClient(
            address=coordinator,
            hello=hello,
            on_up=self._up,
            on_message=self._message,
            on_down=self._down,
            settings=LinkSettings(reconnect_ms=20, reconnect_ms_max=50),
        )
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self._link.start()
        self._task = asyncio.get_running_loop().create_task(self._ask())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
            await self._link.close()

    def names(self) -> set[str]:
        """Returns the names of worker processes and gateways; none while no coordinator answers."""
        return {w.process for w in self.report.workers} | set(self.report.gateways) if self.report else set()

    def lost(self, role: str) -> int:
        """How many of a role this coordinator has lost so far."""
        return self.report.counters.get(f"{role}_lost", 0) if self.report else 0

    async def next_report(self, timeout_s: float = 30.0) -> StatusReport:
        """Returns a report that was asked for after this call. Raises `TimeoutError`."""
        async with asyncio.timeout(timeout_s):
            for _ in range(2):
                self._news.clear()
                await self._news.wait()
                while self.report is None:
                    self._news.clear()
                    await self._news.wait()
            return self.report  # type: ignore[return-value]

    async def _ask(self) -> None:
        while True:
            if self._peer is not None:
                self._peer.send(StatusRequest())
            due = time.monotonic() + ASK_EVERY_S
            await asyncio.sleep(ASK_EVERY_S)
            self._stalls.append((due, time.monotonic() - due))

    def stood_still_s(self, since: float) -> float:
        """Returns the longest time for which the machine stood still since then."""
        return max((late_s for due, late_s in self._stalls if due >= since), default=0.0)

    def _up(self, peer: Peer, _: Welcome) -> None:
        self._peer = peer
        self.coordinators += 1

    def _message(self, _: Peer, message: Message, __: bytes) -> None:
        if isinstance(message, StatusReport):
            self.report, self.incarnation_known = message, True
            self._news.set()

    def _down(self, _: Peer, __: str) -> None:
        self._peer, self.report, self.incarnation_known = None, None, False
