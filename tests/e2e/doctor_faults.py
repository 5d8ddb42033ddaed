"""A real cluster with one fault after the other, for `crossdock doctor`.

`python -m tests.e2e.doctor_faults [NAME …]` saves what `doctor` looked at for the tests of its rules.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil
import uvloop

from launcher.doctor import collect, rules
from launcher.doctor.snapshot import Snapshot
from tests import tiny_models
from tests.e2e.live import Served, cut, sockets_between
from tests.e2e.parts import Parts, parts

SAVED = Path(__file__).parents[1] / "launcher" / "doctor"
LOOK_S = 10.0
SETTLE_S = 8.0  # until a fault has its effect
FORGET_S = 12.0  # until shares of service have forgotten the load before
START_S = 900.0
READ = (
    "process_ crossdock_kv_pairs_ crossdock_kv_transfers_ crossdock_prefill_step crossdock_decode_step"
    " crossdock_coordinator_requests_admitted crossdock_coordinator_prefill_steps crossdock_coordinator_decode_batches"
    " crossdock_coordinator_interruptions crossdock_coordinator_work_failed crossdock_coordinator_prompt_tokens"
    " crossdock_coordinator_leases crossdock_coordinator_tenant_over_quota"
).split()
SHIM = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <time.h>
#include <unistd.h>
int clock_gettime(clockid_t id, struct timespec *at) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int status = real(id, at);
    if (id == CLOCK_REALTIME && access("%s", F_OK) == 0) at->tv_sec += 90;
    return status;
}
"""
TENANTS = """
[tenants.acme]
keys = ["{acme}"]
{limits}
[tenants.lab]
keys = ["{lab}"]
[priority_classes.standard]
weight = 1.0
{targets}
"""


@contextmanager
def load(up: Served, clients: int, prompt: int, output: int, key: str = "", same: int = 0) -> Iterator[None]:
    """Sends requests until the context ends. `same`: how many prompts there are, each sent again and again; 0: all differ."""
    stop, numbers = threading.Event(), count()

    def client() -> None:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        with httpx.Client(base_url=up.base_url, timeout=60.0, trust_env=False, headers=headers) as http:
            while not stop.is_set():
                number = next(numbers) % same if same else next(numbers)
                tokens = [10 + number % 250, 10 + number // 250 % 250, *range(10, 8 + prompt)]
                body = {"model": up.model_id, "prompt": [t % 300 + 10 for t in tokens], "max_tokens": output}
                body |= {"ignore_eos": True, "stream": True}
                with suppress(httpx.HTTPError), http.stream("POST", "/v1/completions", json=body) as answer:
                    if answer.status_code != 200:
                        stop.wait(0.1)
                    for _ in answer.iter_lines():
                        if stop.is_set():
                            break  # which cancels the request

    threads = [threading.Thread(target=client, daemon=True) for _ in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()


@contextmanager
def again_and_again(action: Callable[[], Any], every_s: float) -> Iterator[None]:
    stop = threading.Event()

    def run() -> None:
        while not stop.wait(every_s):
            with suppress(psutil.Error, OSError):
                action()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


class Faults:
    """One cluster. Each method gives it the fault of its name, under load, for as long as the context lasts."""

    def __init__(self, up: Parts, folder: Path) -> None:
        self.up, self.folder = up, folder

    def start(self) -> None:
        self.tenants()
        source, library = self.folder / "skew.c", self.folder / "skew.so"
        source.write_text(SHIM % (self.folder / "skew"))
        subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True)
        self.skew = ("env", f"LD_PRELOAD={library}")
        tenants = ("--tenants", str(self.folder / "tenants.toml"))
        self.up.start("coordinator", *tenants)
        self.up.start("gateway", *tenants)
        for name in ("prefill-0", "decode-0", "decode-1"):
            self.start_worker(name)
        self.up.wait_registered(3, START_S)

    def start_worker(self, name: str) -> None:
        role = name.partition("-")[0]
        inside = ("env", f"HANG_ROLE={role}", f"HANG_WHEN={self.folder / name}", *self.skew[1:])
        options = ("--kv-gib", "0.01", "--kv-transport", "tcp")
        self.up.start("tests.e2e.hanging_worker", *options, name=name, inside=inside)

    def process(self, name: str) -> psutil.Process:
        return psutil.Process(self.up.processes[name].pid)

    def tenants(self, limits: str = "", targets: str = "") -> None:
        digests = {name: hashlib.sha256(name.encode()).hexdigest() for name in ("acme", "lab")}
        (self.folder / "half").write_text(TENANTS.format(limits=limits, targets=targets, **digests))
        (self.folder / "half").replace(self.folder / "tenants.toml")

    @contextmanager
    def with_tenants(self, limits: str = "", targets: str = "") -> Iterator[None]:
        """The tenants file is read again within seconds."""
        self.tenants(limits, targets)
        time.sleep(4.0)
        yield
        self.tenants()

    @contextmanager
    def healthy(self) -> Iterator[None]:
        with (
            self.with_tenants("limits = { concurrency = 8 }", "tpot_ms = 5000"),
            load(self.up, 2, 100, 40, "acme", same=8),
            load(self.up, 2, 100, 40, "lab"),
        ):
            yield

    @contextmanager
    def slow_worker(self) -> Iterator[None]:
        slow = self.process("decode-1")

        def hold() -> None:
            slow.suspend()
            time.sleep(0.3)
            slow.resume()

        with load(self.up, 6, 100, 40, "lab"), again_and_again(hold, 0.02):
            yield

    @contextmanager
    def full_kv(self) -> Iterator[None]:
        with load(self.up, 30, 50, 400, "lab"):
            yield

    @contextmanager
    def hot_tenant(self) -> Iterator[None]:
        with load(self.up, 40, 50, 300, "acme"), load(self.up, 4, 50, 100, "lab"):
            yield

    @contextmanager
    def wrong_ratio(self) -> Iterator[None]:
        with load(self.up, 24, 450, 2, "lab"):
            yield

    @contextmanager
    def broken_pair(self) -> Iterator[None]:
        one, other = self.process("prefill-0"), self.process("decode-0")
        own = int(self.up.coordinator.rsplit(":", 1)[1])

        def break_all() -> None:
            for descriptor in sockets_between(one, other, {own}):
                cut(one, descriptor)

        with load(self.up, 6, 100, 20, "lab"), again_and_again(break_all, 0.005):
            yield

    @contextmanager
    def clock_skew(self) -> Iterator[None]:
        (self.folder / "skew").touch()
        with load(self.up, 1, 50, 10, "lab"):
            yield
        (self.folder / "skew").unlink()

    @contextmanager
    def few_descriptors(self) -> Iterator[None]:
        gateway = self.process("gateway")
        before = gateway.rlimit(psutil.RLIMIT_NOFILE)
        gateway.rlimit(psutil.RLIMIT_NOFILE, (1024, before[1]))
        with load(self.up, 1, 50, 10, "lab"):
            yield
        gateway.rlimit(psutil.RLIMIT_NOFILE, before)

    @contextmanager
    def throttled_cpu(self) -> Iterator[None]:
        """Needs root, and the cpu controller of cgroups."""
        root = Path("/sys/fs/cgroup/cpu" if Path("/sys/fs/cgroup/cpu").is_dir() else "/sys/fs/cgroup")
        group = root / f"crossdock-test-{os.getpid()}"
        group.mkdir()
        if (group / "cpu.max").exists():
            (group / "cpu.max").write_text("5000 100000")
        else:
            (group / "cpu.cfs_quota_us").write_text("5000")
        (group / "cgroup.procs").write_text(str(self.process("decode-0").pid))
        with load(self.up, 4, 100, 40, "lab"):
            yield
        (root / "cgroup.procs").write_text(str(self.process("decode-0").pid))
        group.rmdir()

    @contextmanager
    def small_quota(self) -> Iterator[None]:
        with self.with_tenants("limits = { requests_per_min = 1 }"), load(self.up, 2, 50, 5, "acme"):
            yield

    @contextmanager
    def impossible_target(self) -> Iterator[None]:
        with self.with_tenants("", "tpot_ms = 1"), load(self.up, 1, 50, 40, "acme"):
            yield

    @contextmanager
    def failing_worker(self) -> Iterator[None]:
        (self.folder / "decode-1").write_text("fail")
        with load(self.up, 6, 100, 20, "lab"):
            yield
        (self.folder / "decode-1").unlink()

    @contextmanager
    def cold_cache(self) -> Iterator[None]:
        with load(self.up, 2, 300, 2, "lab", same=10):
            time.sleep(10.0)
        for name in ("prefill-0", "decode-0", "decode-1"):
            self.up.kill(name)
            self.start_worker(name)
        self.up.wait_registered(3, START_S)
        with load(self.up, 1, 300, 2, "lab"):
            yield


NAMES = [name for name, method in vars(Faults).items() if hasattr(method, "__wrapped__") and name != "with_tenants"]


@contextmanager
def faulty(folder: Path) -> Iterator[Faults]:
    """Yields a cluster that can have faults."""
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 8}
    with parts(tiny_models.make("llama", folder / "model", **sizes)) as up:
        faults = Faults(up, folder)
        faults.start()
        yield faults


def looked_at(up: Served, seconds: float = LOOK_S) -> Snapshot:
    return uvloop.run(collect.cluster(up.coordinator, None, seconds))


def save(name: str, seen: Snapshot) -> None:
    kept = [
        msgspec.structs.replace(one, series={n: r for n, r in one.series.items() if n.startswith(tuple(READ))})
        for one in seen.processes
    ]
    traffic = seen.report.traffic if name == "cold_cache" else ()
    report = msgspec.structs.replace(seen.report, traffic=traffic)
    found = msgspec.structs.replace(seen, processes=tuple(kept), report=report)
    SAVED.mkdir(exist_ok=True)
    (SAVED / f"{name}.json").write_bytes(msgspec.json.encode(found) + b"\n")


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main(names: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder, faulty(Path(folder)) as faults:
        for name in names or NAMES:
            _say(f"--- {name} {time.strftime('%H:%M:%S')}")
            try:
                with getattr(faults, name)():
                    time.sleep(SETTLE_S)
                    seen = looked_at(faults.up)
            except Exception as error:
                _say(f"    failed: {error!r}")
                continue
            save(name, seen)
            for finding in rules.diagnose(seen):
                _say(f"    {finding.confidence} {finding.cause}: {finding.what} {finding.evidence}")
            faults.up.wait_idle()
            time.sleep(FORGET_S)


if __name__ == "__main__":
    main(sys.argv[1:])
