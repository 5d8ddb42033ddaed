"""SIGTERM to each component under load, and a rolling restart of all: no request fails, and no token changes."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from launcher.local.ports import free_port
from proto.status import StatusReport
from tests.e2e.balancer import Balancer, Load
from tests.e2e.live import READY_S
from tests.e2e.parts import ROOT, STOP_S, Parts, parts

TOKENS = 400
STREAMS = 4
GRACE_S = "0.1"  # less than a stream takes, so that some are handed over; several times that of a prompt
TIERS: tuple[tuple[str, ...], ...] = (
    ("prefill-0", "decode-0", "gateway-0"),
    ("prefill-1", "decode-1", "gateway-1"),
    ("coordinator",),
)
"""What is restarted together."""
NAMES = tuple(name for tier in TIERS for name in tier)


class Twins(Parts):
    """Two of each worker and two gateways."""

    def begin(self, name: str) -> None:
        role = name.partition("-")[0]
        module = f"{role}_worker" if role in ("prefill", "decode") else role
        options = ["--drain-timeout-s", GRACE_S if module != role else "20"] if module != "coordinator" else []
        if role == "gateway":
            options += ["--port", str(self.ports[name])]
        if role == "coordinator":
            options += ["--step-tokens", "32", "--usage-db", str(self.folder / "usage.db")]
        self.start(module, *options, name=name)

    def begin_all(self, folder: Path) -> None:
        self.folder = folder
        self.ports = {name: free_port("127.0.0.1") for name in NAMES if name.startswith("gateway")}
        self.urls = [f"http://127.0.0.1:{port}" for port in self.ports.values()]
        self.base_url = self.urls[0]
        for name in ("coordinator", *NAMES[:-1]):
            self.begin(name)
        self.wait_complete()

    def wait_complete(self) -> None:
        def complete() -> bool:
            report = self.status()
            up = {worker.pid for worker in report.workers}
            mine = {process.pid for name, process in self.processes.items() if name.startswith(("prefill", "decode"))}
            return (
                up == mine
                and len(report.gateways) == 2
                and all(Balancer(self.model_id, [])._ready(u) for u in self.urls)
            )

        self.wait_for("all are there", complete, READY_S)

    def terminate(self, name: str) -> None:
        self.processes[name].send_signal(signal.SIGTERM)

    def wait_gone(self, name: str) -> None:
        """In order, with nothing left."""
        assert self.processes.pop(name).wait(STOP_S) == 0, name


@pytest.fixture(scope="module")
def up(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Twins]:
    with parts(tiny, kind=Twins) as cluster:
        cluster.begin_all(tmp_path_factory.mktemp("state"))
        yield cluster


@contextmanager
def load(up: Twins) -> Iterator[list[Load]]:
    """Streams that never stop; afterwards none has failed or is another."""
    balancer = Balancer(up.model_id, up.urls)
    expected = [balancer.answer(number, TOKENS) for number in range(STREAMS)]
    loads = [Load(balancer, number, expected, TOKENS) for number in range(STREAMS)]
    try:
        yield loads
    finally:
        for one in loads:
            one.stop()
    assert not [wrong for one in loads for wrong in one.wrong]
    up.wait_idle()


def come(up: Parts, loads: list[Load]) -> None:
    """Each client has got one more."""
    before = [one.done for one in loads]
    up.wait_for("streams come", lambda: all(one.done > was for one, was in zip(loads, before, strict=True)))


def drain(up: Twins, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "launcher.cli", "drain", "--coordinator", up.coordinator, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_worker_is_drained_and_restored(up: Twins) -> None:
    """A worker is drained by command while streams run, and gets requests again after an undo."""
    with load(up) as loads:
        come(up, loads)
        unknown = drain(up, "decode-7")
        assert unknown.returncode == 1 and "no worker is called 'decode-7'" in unknown.stderr
        assert "decode-0, decode-1, prefill-0, prefill-1" in unknown.stderr
        done = drain(up, "decode-0", "--wait", "--drain-timeout-s", GRACE_S)
        assert (done.returncode, done.stdout) == (0, "decode-0 is drained\n"), done.stderr
        come(up, loads)
        requests = {worker.name: (worker.draining, worker.requests) for worker in up.status().workers}
        assert requests["decode-0"] == (True, 0) and requests["decode-1"][0] is False
        assert drain(up, "decode-0", "--undo").returncode == 0
        up.wait_for("it gets requests again", lambda: _requests(up.status(), "decode-0") > 0)


def test_fully_drained_role_refuses_requests(up: Twins) -> None:
    """Requests are refused with 503 and the reason while all decode workers are drained."""
    twins = ("decode-0", "decode-1")
    for name in twins:
        assert drain(up, name, "--wait", "--drain-timeout-s", GRACE_S).returncode == 0
    asked = {"model": up.model_id, "prompt": "Hi", "max_tokens": 4}
    for url in up.urls:
        up.wait_for("it is not ready", lambda url=url: httpx.get(f"{url}/ready", trust_env=False).status_code == 503)
        refused = httpx.post(f"{url}/v1/completions", json=asked, timeout=30, trust_env=False)
        assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1, refused.text
        assert "every decode worker is draining" in refused.json()["error"]["message"]
    for name in twins:
        assert drain(up, name, "--undo").returncode == 0
    up.wait_complete()
    assert httpx.post(f"{up.base_url}/v1/completions", json=asked, timeout=60, trust_env=False).status_code == 200


def _requests(report: StatusReport, name: str) -> int:
    return sum(worker.requests for worker in report.workers if worker.name == name and not worker.draining)


def test_rolling_restart_fails_no_request(up: Twins) -> None:
    """A rolling restart of all processes fails no request and changes no token."""
    with load(up) as loads:
        for tier in TIERS:
            come(up, loads)
            if tier == ("coordinator",):
                counters = up.status().counters
                assert counters["interrupted_drained"] and not any(name.endswith("_lost") for name in counters)
            for name in tier:
                up.terminate(name)
            for name in tier:
                up.wait_gone(name)
                up.begin(name)
            up.wait_complete()
        come(up, loads)


@pytest.mark.long
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("name", NAMES)
def test_repeated_restart_fails_no_request(up: Twins, name: str) -> None:
    """Repeated restarts of one process fail no request and change no token."""
    with load(up) as loads:
        for _ in range(5):
            come(up, loads)
            up.terminate(name)
            up.wait_gone(name)
            up.begin(name)
            up.wait_complete()
