"""Workers change their roles under load: no request fails, no token changes, and what was cached is still there."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvloop

from launcher.admin.status import converse
from proto.drain import DrainAnswer, DrainRequest
from proto.messages import Role
from tests.e2e.parts import ROOT, parts
from tests.e2e.test_rolling import Twins, come, load

REUSED = 32


@pytest.fixture(scope="module")
def up(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Twins]:
    with parts(tiny, kind=Twins) as cluster:
        cluster.begin_all(tmp_path_factory.mktemp("state"))
        yield cluster


def flip(up: Twins, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "launcher.cli", "flip", "--coordinator", up.coordinator, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


def roles(up: Twins) -> dict[str, Role]:
    return {worker.name: worker.role for worker in up.status().workers}


def test_a_worker_takes_the_other_role_and_its_own_again_while_streams_run(up: Twins) -> None:
    pids = {worker.name: worker.pid for worker in up.status().workers}
    with load(up) as loads:
        come(up, loads)
        for role, streams in (("prefill", "move"), ("decode", "move"), ("prefill", "finish"), ("decode", "finish")):
            done = flip(up, "decode-0", role, "--streams", streams, "--drain-timeout-s", "0.3", "--first-step-s", "20")
            assert done.returncode == 0 and f"decode-0 is a {role} worker now" in done.stdout, done.stderr
            assert "its first step was done" in done.stdout
            assert roles(up)["decode-0"] == role
            come(up, loads)
    report = up.status()
    assert {worker.name: worker.pid for worker in report.workers} == pids, "the processes are the same"
    assert [one.state for one in report.flips] == ["done"] * 4 and report.counters["flips"] == 4
    assert not report.counters.get("decode_restarted") and not report.counters.get("prefill_lost")


def order(up: Twins, worker: str, *, undo: bool = False) -> None:
    request = DrainRequest(worker, undo, 0.0)
    assert not uvloop.run(converse(up.coordinator, request, DrainAnswer, 5_000)).refusal


def test_its_prompts_are_still_cached_in_the_other_role(up: Twins) -> None:
    """A former decode worker has received a prompt, and need not compute it again as the only prefill worker."""
    prompt = list(range(40, 40 + REUSED))
    order(up, "decode-1")
    expected = up.token_ids(prompt, 4)
    order(up, "decode-1", undo=True)
    up.wait_idle()
    assert flip(up, "decode-0", "prefill", "--first-step-s", "0").returncode == 0
    for prefill in ("prefill-0", "prefill-1"):
        order(up, prefill)
    answer = up.complete(prompt, 4, return_token_ids=True)
    assert answer["choices"][0]["token_ids"] == expected
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= REUSED // 2
    for prefill in ("prefill-0", "prefill-1"):
        order(up, prefill, undo=True)
    assert flip(up, "decode-0", "decode", "--first-step-s", "0").returncode == 0


def test_what_cannot_be_is_refused(up: Twins) -> None:
    for arguments, why in (
        (("decode-7", "prefill"), "no worker is called 'decode-7'"),
        (("decode-0", "decode"), "decode-0 is a decode worker already"),
    ):
        refused = flip(up, *arguments)
        assert refused.returncode == 1 and why in refused.stderr, refused.stderr
    assert flip(up, "decode-0", "prefill", "--first-step-s", "0").returncode == 0
    last = flip(up, "decode-1", "prefill")
    assert last.returncode == 1 and "decode-1 is the only decode worker" in last.stderr and "--force" in last.stderr
    assert flip(up, "decode-0", "decode", "--first-step-s", "0").returncode == 0
