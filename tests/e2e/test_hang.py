"""A worker that hangs in a step while it answers its heartbeats: found, fenced, ended; its streams go on elsewhere."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.process.exits import HUNG_EXIT
from tests.e2e.parts import ROOT, Parts, parts
from tests.e2e.test_faults import Background
from tests.helpers import first

PROMPT = list(range(20, 90))
TOKENS = 200


@pytest.fixture(scope="module")
def up(tiny: Path) -> Iterator[Parts]:
    with parts(tiny) as one:
        for part in ("coordinator", "gateway", "prefill_worker", "decode_worker"):
            one.start(part)
        one.wait_registered(2)
        yield one


@pytest.mark.parametrize(("role", "drains"), first(2, [("prefill", False), ("decode", True), ("decode", False)]))
def test_hanging_worker_changes_no_token(
    up: Parts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, role: str, drains: bool
) -> None:
    """A worker that hangs in a step changes no token, whether it is being drained or not."""
    monkeypatch.setenv("HANG_ROLE", role)
    monkeypatch.setenv("HANG_WHEN", str(tmp_path / "now"))
    expected = up.token_ids(PROMPT, TOKENS, ignore_eos=True)
    before = up.wait_idle().counters
    up.start("tests.e2e.hanging_worker", "--step-timeout-ms", "500", name="bad")
    up.wait_registered(3)
    if drains:  # its first step hangs, for the 5 s it is given: a drain may hand all streams over before a later one
        (tmp_path / "now").touch()
    streams = [Background(up, PROMPT, TOKENS) for _ in range(8)]
    if role == "decode":
        up.wait_for("it has work", lambda: any(w.name == "bad" and w.requests for w in up.status().workers))
    drain = [sys.executable, "-m", "launcher.cli", "drain", "bad", "--wait", "--coordinator", up.coordinator]
    draining = subprocess.Popen(drain, cwd=ROOT, stdout=subprocess.PIPE, text=True) if drains else None
    if drains:
        up.wait_for("it drains", lambda: any(w.draining for w in up.status().workers))
    (tmp_path / "now").touch()
    others = [Background(up, [5 + number, *PROMPT], 5) for number in range(8)]
    assert [stream.result() for stream in streams] == [expected] * 8
    assert all(len(stream.result()) == 5 for stream in others)
    assert up.processes.pop("bad").wait(30) == HUNG_EXIT
    if draining is not None:
        said, _ = draining.communicate(timeout=30)
        assert (draining.returncode, said.partition(";")[0]) == (HUNG_EXIT, "bad hung and was given up")
    report = up.wait_idle()
    assert report.counters[f"{role}_hung"] == before.get(f"{role}_hung", 0) + 1
    # Others are missed too where the machine stands still for longer than a heartbeat may.
    assert report.counters[f"{role}_lost"] > before.get(f"{role}_lost", 0)
    assert [worker.name for worker in report.workers if worker.name == "bad"] == []
