"""Real clusters with one fault each, for `crossdock doctor`. `python -m tests.e2e.doctor_faults [NAME …]` makes them and saves
what `doctor` looked at, for the tests of its rules, in `tests/launcher/doctor/`.
"""

import hashlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
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
from tests.e2e.live import Served, cut, live, sockets_between
from tests.e2e.parts import Parts, parts

SAVED = Path(__file__).parents[1] / "launcher" / "doctor"
LOOK_S = 5.0
READ = (
    "process_ crossdock_kv_pairs_ crossdock_kv_transfers_failed crossdock_prefill_step_ crossdock_decode_step_"
    " crossdock_coordinator_requests_admitted crossdock_coordinator_prefill_steps crossdock_coordinator_decode_batches"
    " crossdock_coordinator_interruptions crossdock_coordinator_work_failed crossdock_coordinator_prompt_tokens"
    " crossdock_coordinator_leases crossdock_coordinator_tenant_over_quota"
).split()
SHIM = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <time.h>
int clock_gettime(clockid_t id, struct timespec *at) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int status = real(id, at);
    if (id == CLOCK_REALTIME) at->tv_sec += 90;
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
                with suppress(httpx.HTTPError):
                    if http.post("/v1/completions", json=body | {"ignore_eos": True}).status_code != 200:
                        stop.wait(0.1)

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
    """Each method yields a cluster that has the fault of its name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 8}
        self.model = tiny_models.make("llama", folder / "model", **sizes)

    def tenants(self, limits: str = "", targets: str = "") -> str:
        digests = {name: hashlib.sha256(name.encode()).hexdigest() for name in ("acme", "lab")}
        path = self.folder / "tenants.toml"
        path.write_text(TENANTS.format(limits=limits, targets=targets, **digests))
        return str(path)

    @contextmanager
    def healthy(self) -> Iterator[Served]:
        with live(self.model, self.folder, "--prefill", "2", "--decode", "2") as up, load(up, 3, 100, 40):
            yield up

    @contextmanager
    def healthy_tenants(self) -> Iterator[Served]:
        """Within its quotas and targets, with the same prompts again and again."""
        path = self.tenants("limits = { concurrency = 8 }", "tpot_ms = 2000")
        with live(self.model, self.folder, "--tenants", path) as up:
            with load(up, 2, 100, 40, "acme", same=8), load(up, 2, 100, 40, "lab", same=8):
                yield up

    @contextmanager
    def slow_worker(self) -> Iterator[Served]:
        with live(self.model, self.folder, "--prefill", "1", "--decode", "2") as up:
            slow = up.processes()["decode_worker"][0]

            def hold() -> None:
                slow.suspend()
                time.sleep(0.08)
                slow.resume()

            with load(up, 4, 100, 40), again_and_again(hold, 0.01):
                yield up

    @contextmanager
    def full_kv(self) -> Iterator[Served]:
        with live(self.model, self.folder, KV_GIB="0.02") as up, load(up, 24, 100, 300):
            yield up

    @contextmanager
    def hot_tenant(self) -> Iterator[Served]:
        with live(self.model, self.folder, "--tenants", self.tenants(), MAX_SEQS="4") as up:
            with load(up, 32, 100, 100, "acme"), load(up, 2, 100, 100, "lab"):
                yield up

    @contextmanager
    def wrong_ratio(self) -> Iterator[Served]:
        with live(self.model, self.folder, "--prefill", "1", "--decode", "2") as up, load(up, 24, 450, 2):
            yield up

    @contextmanager
    def broken_pair(self) -> Iterator[Served]:
        with live(self.model, self.folder, "--prefill", "1", "--decode", "1", KV_TRANSPORT="tcp") as up:
            prefill, decode = up.one("prefill_worker"), up.one("decode_worker")
            own = int(up.coordinator.rsplit(":", 1)[1])

            def break_all() -> None:
                for one in sockets_between(prefill, decode, {own}):
                    cut(prefill, one)

            with load(up, 4, 100, 20), again_and_again(break_all, 0.005):
                yield up

    @contextmanager
    def clock_skew(self) -> Iterator[Served]:
        source, library = self.folder / "skew.c", self.folder / "skew.so"
        source.write_text(SHIM)
        subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True)
        with self._parts(decode=("env", f"LD_PRELOAD={library}")) as up, load(up, 2, 100, 20):
            yield up

    @contextmanager
    def few_descriptors(self) -> Iterator[Served]:
        with self._parts(gateway=("prlimit", "--nofile=1024:1024")) as up, load(up, 2, 100, 20):
            yield up

    @contextmanager
    def throttled_cpu(self) -> Iterator[Served]:
        """Needs root, and the cpu controller of cgroups."""
        root = Path("/sys/fs/cgroup/cpu" if Path("/sys/fs/cgroup/cpu").is_dir() else "/sys/fs/cgroup")
        group = root / f"crossdock-test-{os.getpid()}"
        group.mkdir()
        if (group / "cpu.max").exists():
            (group / "cpu.max").write_text("20000 100000")
        else:
            (group / "cpu.cfs_quota_us").write_text("20000")
        with live(self.model, self.folder) as up, load(up, 4, 100, 40):
            slow = up.one("decode_worker")
            (group / "cgroup.procs").write_text(str(slow.pid))
            yield up
        group.rmdir()

    @contextmanager
    def cold_cache(self) -> Iterator[Served]:
        with live(self.model, self.folder) as up:
            with load(up, 2, 300, 2, same=20):
                time.sleep(6.0)
            up.wait_idle()
            for role in ("prefill_worker", "decode_worker"):
                up.one(role).send_signal(signal.SIGKILL)
            up.wait_for("the workers are new", lambda: all(w.steps == 0 for w in up.status().workers))
            up.wait_registered(2)
            with load(up, 1, 300, 2):
                yield up

    @contextmanager
    def small_quota(self) -> Iterator[Served]:
        with live(self.model, self.folder, "--tenants", self.tenants("limits = { requests_per_min = 6 }")) as up:
            with load(up, 2, 50, 5, "acme"), load(up, 1, 50, 5, "lab"):
                yield up

    @contextmanager
    def impossible_target(self) -> Iterator[Served]:
        with live(self.model, self.folder, "--tenants", self.tenants("", "tpot_ms = 1")) as up:
            with load(up, 2, 50, 40, "acme"):
                yield up

    @contextmanager
    def failing_worker(self) -> Iterator[Served]:
        when = self.folder / "fails"
        when.write_text("fail")
        with self._parts() as up:
            inside = ("env", "HANG_ROLE=prefill", f"HANG_WHEN={when}")
            up.start("tests.e2e.hanging_worker", name="bad", inside=inside)
            up.wait_registered(3)
            with load(up, 6, 100, 20):
                yield up

    @contextmanager
    def _parts(self, **inside: tuple[str, ...]) -> Iterator[Parts]:
        with parts(self.model) as up:
            for role in ("coordinator", "gateway", "prefill_worker", "decode_worker"):
                up.start(role, inside=inside.get(role.partition("_")[0], ()))
            up.wait_registered(2)
            yield up


NAMES = [name for name, method in vars(Faults).items() if not name.startswith("_") and name != "tenants"]


def looked_at(up: Served, seconds: float = LOOK_S) -> Snapshot:
    time.sleep(3.0)  # until the load is there
    return uvloop.run(collect.cluster(up.coordinator, None, seconds))


def save(name: str, seen: Snapshot) -> None:
    kept = [
        msgspec.structs.replace(one, series={n: r for n, r in one.series.items() if n.startswith(tuple(READ))})
        for one in seen.processes
    ]
    report = msgspec.structs.replace(seen.report, traffic=())
    found = msgspec.structs.replace(seen, processes=tuple(kept), report=report)
    SAVED.mkdir(exist_ok=True)
    (SAVED / f"{name}.json").write_bytes(msgspec.json.encode(found) + b"\n")


def main(names: list[str]) -> None:
    for name in names or NAMES:
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            up = stack.enter_context(getattr(Faults(folder), name)())
            seen = looked_at(up)
        save(name, seen)
        print(f"--- {name}", flush=True)
        for finding in rules.diagnose(seen):
            print(f"    {finding.confidence} {finding.cause}: {finding.what} {finding.evidence}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
