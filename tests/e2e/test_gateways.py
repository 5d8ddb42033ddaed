"""Two gateways: one is killed, its requests are cancelled everywhere, and clients go on with the other. And what new requests
do while the coordinator is away."""

import re
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.e2e.live import Live, live
from tests.e2e.test_faults import PROMPT, TOKENS, Background, busy


@pytest.fixture(scope="module")
def up(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with live(tiny, tmp_path_factory.mktemp("state"), "--gateways", "2", HEARTBEAT_MS="300") as one:
        yield one


def urls(up: Live) -> list[str]:
    return [found[1] for line in up.output if (found := re.match(r"(?:Base URL|and) +(http://\S+)/v1", line))]


def registered(up: Live) -> bool:
    report = up.status()
    return len(report.workers) == 2 and report.gateways == ("gateway-0", "gateway-1")


def test_killed_gateway_ends_only_its_requests(up: Live) -> None:
    """A killed gateway ends its own requests, and another gateway's streams go on."""
    first, second = urls(up)
    assert int(second.rsplit(":", 1)[1]) > 0 and registered(up)
    expected = up.token_ids(PROMPT, TOKENS, ignore_eos=True)
    lost = [Background(up) for _ in range(4)]
    up.wait_for("streams decode", lambda: busy(up, "decoding"))
    up.base_url = second
    kept = Background(up)
    up.wait_for("all of them run", lambda: up.status().running.get("decoding", 0) == 5)
    victim = next(p for p in up.processes()["gateway"] if "gateway-0" in p.cmdline())
    victim.send_signal(signal.SIGKILL)
    assert kept.result() == expected, "another gateway's streams are untouched, and clients can go on there"
    for stream in lost:
        stream.join(60)
        assert stream.error and not stream.ids
    assert up.wait_idle().finished["cancelled"] == 4
    up.wait_for("it is started again", lambda: registered(up))
    up.base_url = first
    up.wait_ready()
    assert up.token_ids(PROMPT, TOKENS, ignore_eos=True) == expected


def test_requests_wait_for_new_coordinator(up: Live) -> None:
    """New requests wait while a killed coordinator is started again, and are then answered."""
    up.wait_for("all are there", lambda: registered(up))
    up.one("coordinator").send_signal(signal.SIGKILL)
    answers = [Background(up, tokens=5) for _ in range(4)]
    assert all(len(answer.result()) == 5 for answer in answers)


def test_wait_for_coordinator_is_limited(up: Live) -> None:
    """A request is answered with 503 and Retry-After if the coordinator stays away."""
    up.wait_for("all are there", lambda: registered(up))
    body = {"model": up.model_id, "prompt": "x", "max_tokens": 2}
    # A supervisor that runs would start a new coordinator.
    stopped = (psutil.Process(up.process.pid), up.one("coordinator"))
    for process in stopped:
        process.send_signal(signal.SIGSTOP)
    try:
        up.wait_for("a gateway notices", lambda: not up._is_ready())
        answer = httpx.post(f"{up.base_url}/v1/completions", json=body, timeout=60, trust_env=False)
    finally:
        for process in reversed(stopped):
            process.send_signal(signal.SIGCONT)
    assert answer.status_code == 503 and int(answer.headers["Retry-After"]) >= 1
    assert answer.json()["error"]["code"] == "coordinator_unreachable"
