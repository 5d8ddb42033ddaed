"""Workers change their roles under load: no request fails, no token changes, and what was cached is still there."""

import json
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import uvloop

from lab.profile import Curve, DecodeCost, PrefillCost, Profile, ProfileCapacity, encoded
from launcher.admin.status import converse
from proto.drain import DrainAnswer, DrainRequest, FlipAnswer, FlipRequest
from proto.messages import Role
from tests.e2e.balancer import Load
from tests.e2e.parts import ROOT, parts
from tests.e2e.test_rolling import Twins, come, load

STREAMED = {"stream": True, "return_token_ids": True}


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


def test_role_change_keeps_streams_running(up: Twins) -> None:
    """A worker takes the other role and its own again in the same process while streams run."""
    pids = {worker.name: worker.pid for worker in up.status().workers}
    with load(up) as loads:
        come(up, loads)
        for role, drain_s in (("prefill", "0"), ("decode", "0"), ("prefill", "0.3"), ("decode", "0.3")):
            take_role(up, loads, role, drain_s)
            assert roles(up)["decode-0"] == role
    report = up.status()
    assert {worker.name: worker.pid for worker in report.workers} == pids, "the processes are the same"
    assert [one.state for one in report.flips] == ["done"] * 4 and report.counters["flips"] == 4
    assert not report.counters.get("decode_restarted") and not report.counters.get("prefill_lost")


def take_role(up: Twins, loads: list[Load], role: str, drain_s: str) -> None:
    """It is decode-0 that does, under load."""
    done = flip(up, "decode-0", role, "--drain-timeout-s", drain_s)
    assert done.returncode == 0 and f"decode-0 is a {role} worker now" in done.stdout, done.stderr
    up.wait_for("its first step", lambda: up.status().flips[-1].first_step_ms > 0.0)
    come(up, loads)


def test_mixed_role_change_keeps_streams(up: Twins) -> None:
    """A worker becomes mixed and then takes another role again while streams run."""
    before = up.status().counters
    pid = up.processes["decode-0"].pid
    with load(up) as loads:
        come(up, loads)
        for role, drain_s in (("mixed", "0"), ("prefill", "0.3"), ("mixed", "0.3"), ("decode", "0")):
            take_role(up, loads, role, drain_s)
            own = {worker.name for worker in up.status().workers if worker.pid == pid}
            assert own == ({"decode-0-prefill", "decode-0-decode"} if role == "mixed" else {"decode-0"})
            if role == "mixed":
                refused = flip(up, "decode-0-decode", "decode")
                assert refused.returncode == 1 and "one role of the mixed worker decode-0" in refused.stderr
    report = up.status()
    assert [(one.before, one.role) for one in report.flips][-4:] == [
        ("decode", "mixed"), ("mixed", "prefill"), ("prefill", "mixed"), ("mixed", "decode"),
    ]  # fmt: skip
    for what in ("decode_restarted", "prefill_restarted", "decode_lost", "prefill_lost", "flips_failed"):
        assert report.counters.get(what) == before.get(what), what


@pytest.mark.parametrize("role", ["prefill", "mixed"])
def test_stream_resumes_with_kept_kv(up: Twins, role: str) -> None:
    """The worker computes no more than the last tokens of it again."""
    prompt, tokens, block = [200 + len(role), *range(60, 90)], 470, up.block_tokens()
    body = {"model": up.model_id, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    moved: list[int] = []
    worker = ""
    with httpx.stream(
        "POST", f"{up.base_url}/v1/completions", json=body | STREAMED, timeout=60.0, trust_env=False
    ) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                moved += (json.loads(line[len("data: ") :])["choices"] or [{}])[0].get("token_ids", ())
            if not worker and len(moved) > 2 * block:
                (worker,) = (one.name for one in up.status().workers if one.role is Role.DECODE and one.requests)
                request = FlipRequest(worker, Role(role), 0.0)
                assert not uvloop.run(converse(up.coordinator, request, FlipAnswer, 5_000)).refusal
    try:
        up.wait_for("its first step", lambda: up.status().flips[-1].first_step_ms > 0.0)
        sums = prefix_tokens(up, f"{worker}-prefill" if role == "mixed" else worker)
        assert sums["queried"] > len(prompt) + block, "it prefills what it had, with some of the answer"
        assert sums["queried"] - sums["hit"] <= block + 1, sums
    finally:
        assert flip(up, worker, "decode").returncode == 0
    up.wait_idle()
    assert moved == up.token_ids(prompt, tokens, ignore_eos=True)


def prefix_tokens(up: Twins, worker: str) -> Counter[str]:
    """Tokens that it has looked up in its prefix cache to prefill them, and found, since it took its role."""
    sums = Counter[str]()
    for (name, labels), value in up.scrape(worker).items():
        for what in ("queried", "hit"):
            if name == f"crossdock_prefix_cache_{what}_tokens_total" and ("role", "decode") not in labels:
                sums[what] += int(value)
    return sums


def order(up: Twins, worker: str, *, undo: bool = False) -> None:
    request = DrainRequest(worker, undo, 0.0)
    assert not uvloop.run(converse(up.coordinator, request, DrainAnswer, 5_000)).refusal


def test_prompts_stay_cached_after_role_change(up: Twins) -> None:
    """A former decode worker has received a prompt, and need not compute it again as the only prefill worker."""
    block = up.block_tokens()
    prompt = list(range(40, 40 + 2 * block))
    order(up, "decode-1")
    expected = up.token_ids(prompt, 4)
    order(up, "decode-1", undo=True)
    up.wait_idle()
    assert flip(up, "decode-0", "prefill").returncode == 0
    for prefill in ("prefill-0", "prefill-1"):
        order(up, prefill)
    answer = up.complete(prompt, 4, return_token_ids=True)
    assert answer["choices"][0]["token_ids"] == expected
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= block
    for prefill in ("prefill-0", "prefill-1"):
        order(up, prefill, undo=True)
    assert flip(up, "decode-0", "decode").returncode == 0


def test_impossible_flip_is_refused(up: Twins) -> None:
    """Role changes of unknown workers, to the present role or of the last decode worker are refused."""
    for arguments, why in (
        (("decode-7", "prefill"), "no worker is called 'decode-7'"),
        (("decode-0", "decode"), "decode-0 is a decode worker already"),
    ):
        refused = flip(up, *arguments)
        assert refused.returncode == 1 and why in refused.stderr, refused.stderr
    assert flip(up, "decode-0", "prefill").returncode == 0
    last = flip(up, "decode-1", "prefill")
    assert last.returncode == 1 and "decode-1 is the only decode worker" in last.stderr and "--force" in last.stderr
    assert flip(up, "decode-0", "decode").returncode == 0


def test_autopilot_explains_its_role_change(up: Twins, tmp_path: Path) -> None:
    """By its profile a prompt takes 900 ms, so that the traffic wants more prefill workers than there are."""
    profile = tmp_path / "profile.json"
    slow = Profile(
        PrefillCost(Curve((1.0,), (900.0,))),
        DecodeCost(Curve((1.0,), (1.0,))),
        ProfileCapacity(4096),
        ProfileCapacity(4096),
    )
    profile.write_bytes(encoded(slow))
    command = [sys.executable, "-m", "launcher.cli", "autopilot", "--coordinator", up.coordinator, "--mode", "on"]
    options = {"profile": profile, "slo-ttft-ms": 3000, "slo-tpot-ms": 50, "log-format": "json"}
    log = tmp_path / "autopilot.log"
    with log.open("wb") as out:
        arguments = [text for name, value in options.items() for text in (f"--{name}", str(value))]
        process = subprocess.Popen([*command, *arguments], cwd=ROOT, stdout=out, stderr=subprocess.STDOUT)
    try:
        number = 0

        def has_changed() -> bool:
            nonlocal number
            number += 1
            up.token_ids([number % 300, *range(10, 20)], 2)
            time.sleep(0.1)
            return list(roles(up).values()).count(Role.PREFILL) == 3

        up.wait_for("a decode worker prefills", has_changed, 180.0)
        (address,) = re.findall(r'"address": ?"([^"]+)"', log.read_text())
        text = httpx.get(f"http://{address}/metrics", trust_env=False).text
        assert 'crossdock_autopilot_present_workers{role="prefill"}' in text
        assert re.search(r'crossdock_autopilot_needed_workers{role="prefill"} [1-9]', text)
        assert re.search(r"^crossdock_autopilot_flips_total [1-9]", text, re.MULTILINE)
        up.wait_for("the coordinator knows what it wants", lambda: any(up.status().autopilots), 20.0)
        (said,) = up.status().autopilots
        assert said.mode == "on" and "requests/s" in said.reason
    finally:
        process.terminate()
        assert process.wait(20) == 0, log.read_text()
    changed = up.status().flips[-1]
    assert changed.why.startswith("autopilot: ") and "keep the SLO" in changed.why
    assert flip(up, changed.worker, "decode").returncode == 0


def test_autopilot_needs_a_profile(tmp_path: Path) -> None:
    """The autopilot refuses to start if its profile is missing or not valid."""
    (tmp_path / "not.json").write_text("{}")
    for name, why in (("not.json", "not a profile, as"), ("none.json", "No such file")):
        command = [sys.executable, "-m", "launcher.cli", "autopilot", "--profile", str(tmp_path / name)]
        refused = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert refused.returncode == 78 and "--profile" in refused.stderr and why in refused.stderr, refused.stderr
