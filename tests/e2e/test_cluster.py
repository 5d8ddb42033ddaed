"""Four processes, one job: what a user sees, and what must be true behind it."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import psutil

from launcher.process import child_environment
from tests.e2e.live import Live, at_once, live


def test_roles_are_separate_processes(cluster: Live) -> None:
    pids = [p.pid for members in cluster.processes().values() for p in members]
    assert len(pids) == 4 == len(set(pids))


def test_status_finds_local_cluster(cluster: Live) -> None:
    """The status command finds the cluster of this machine without an address."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "launcher.cli", "status", "--json"],
        env=child_environment(1) | {"XDG_STATE_HOME": str(cluster.home)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert {worker["name"] for worker in json.loads(done.stdout)["workers"]} == {"prefill-0", "decode-0"}


def test_roles_compute_only_their_own_work(cluster: Live) -> None:
    """Prefill workers compute only prompts, and decode workers only the tokens after the first."""
    cluster.token_ids([6, 7, 8], 2, ignore_eos=True)  # its end tells what was computed for clients that had left before
    before = {w.role.value: w.tokens_forwarded for w in cluster.wait_idle().workers}
    for length, new in ((150, 10), (3, 20)):
        cluster.token_ids(list(range(6, 6 + length)), new, ignore_eos=True)
    after = {w.role.value: w.tokens_forwarded for w in cluster.wait_idle().workers}
    assert after["prefill"] - before["prefill"] == 150 + 3
    assert after["decode"] - before["decode"] == (10 - 1) + (20 - 1), "the first token is prefill's"
    assert cluster.status().counters["kv_bytes_moved"] > 0


def test_200_streams_keep_their_own_answers(cluster: Live) -> None:
    """Each of 200 streams at once gets its own answer."""

    def stream(number: int) -> list[int]:
        prompt = [6 + number % 200, 7 + number // 200, *range(6, 6 + number % 37)]
        body = {
            "model": cluster.model_id, "prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True, "stream": True,
            "return_token_ids": True,
        }  # fmt: skip
        ids: list[int] = []
        with httpx.stream(
            "POST", f"{cluster.base_url}/v1/completions", json=body, timeout=120.0, trust_env=False
        ) as answer:
            assert answer.status_code == 200, answer.read()
            lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
        assert lines[-1] == "[DONE]"
        for line in lines[:-1]:
            ids += json.loads(line)["choices"][0].get("token_ids") or []
        return ids

    together = at_once(stream, range(200), threads=200)
    assert all(len(ids) == 12 for ids in together)
    sample = range(0, 200, 23)
    assert [together[n] for n in sample] == [stream(n) for n in sample]
    cluster.wait_idle()


def test_leaving_client_frees_everything(cluster: Live) -> None:
    """Requests of clients that leave are cancelled, and the cluster becomes idle again."""
    cluster.wait_idle()
    body = {"model": cluster.model_id, "prompt": [9] * 40, "max_tokens": 400, "ignore_eos": True, "stream": True}
    before = cluster.status().finished.get("cancelled", 0)
    for _ in range(50):  # an answer may be complete before it is seen that nobody wants it
        with httpx.stream(
            "POST", f"{cluster.base_url}/v1/completions", json=body, timeout=60.0, trust_env=False
        ) as answer:
            next(answer.iter_lines())
        report = cluster.wait_idle()
        if report.finished.get("cancelled", 0) >= before + 5:
            break
    else:
        raise AssertionError(f"answers that nobody reads are not cancelled: {report.finished}")


def test_seeded_sampling_repeats_exactly(cluster: Live) -> None:
    """Seeded sampling repeats, and differs between seeds and between choices."""

    def draw(seed: int, n: int = 1) -> list[list[int]]:
        answer = cluster.complete(
            [50, 60, 70], 12, temperature=1.0, seed=seed, n=n, ignore_eos=True, return_token_ids=True
        )
        return [choice["token_ids"] for choice in answer["choices"]]

    first = draw(1, 3)
    assert first == draw(1, 3) and first[0] == draw(1)[0]
    assert len({tuple(ids) for ids in [*first, *draw(2)]}) == 4
    cluster.wait_idle()


def test_killed_launcher_takes_all_processes(tiny: Path, tmp_path: Path) -> None:
    """All processes of a cluster end if its launcher is killed."""
    up = Live(tiny, tmp_path)
    children = [p for members in up.processes().values() for p in members]
    up.process.kill()
    up.process.wait(60)
    _, alive = psutil.wait_procs(children, timeout=60)
    assert not alive


def test_2p2d_serves_and_stops_cleanly(tiny: Path, tmp_path: Path) -> None:
    """Two prefill and two decode workers all serve, and Ctrl-C leaves no process or shared memory behind."""
    shm_before = set(Path("/dev/shm").iterdir())
    with live(tiny, tmp_path, "--prefill", "2", "--decode", "2") as up:
        # Ready is one of each: the others may still be loading.
        up.wait_for("all four are up", lambda: len(up.status().workers) == 4)
        prompts = [[6 + n, *range(10, 60)] for n in range(24)]
        together = at_once(lambda prompt: up.token_ids(prompt, 8, ignore_eos=True), prompts)
        assert together == [up.token_ids(prompt, 8, ignore_eos=True) for prompt in prompts]
        report = up.wait_idle()
        assert len(report.workers) == 4 and all(w.tokens_forwarded > 0 for w in report.workers), report
        children = [p for members in up.processes().values() for p in members]
        assert up.stop(signal.SIGINT) == 0
    assert not [p for p in children if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    assert set(Path("/dev/shm").iterdir()) <= shm_before
