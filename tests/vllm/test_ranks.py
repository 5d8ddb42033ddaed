"""A worker of two ranks, on real processes: signals and losses reach the ranks as they reach a worker of one process."""

import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from tests import tiny_models
from tests.e2e.parts import Parts, parts

PROMPT, TOKENS = list(range(30, 100)), 400
STOP_S = 60.0
SHARED_MEMORY = Path("/dev/shm")
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    sizes = {"head_dim": 32, "hidden_size": 128, "intermediate_size": 128}
    return tiny_models.make("llama", tmp_path / "llama", **sizes)


def begin(up: Parts, python: str, name: str) -> None:
    """Start a mixed worker of two ranks."""
    engine = ("--engine", "vllm", "--engine-python", python, "--drain-timeout-s", "60")
    args = "--enforce-eager --block-size 32 --tensor-parallel-size 2"
    up.start("worker", *engine, f"--vllm-args={args}", name=name)


def test_signalled_ranks_compute_until_drained(vllm_python: str, model: Path) -> None:
    """A stream ends as usual though all processes of its worker got SIGTERM, as systemd sends it; then they are gone."""
    with parts(model) as up, ThreadPoolExecutor(1) as pool:
        up.start("coordinator")
        up.start("gateway")
        begin(up, vllm_python, "mixed-0")
        up.wait_registered(2)
        expected = up.token_ids(PROMPT, TOKENS, ignore_eos=True)
        streaming = pool.submit(up.token_ids, PROMPT, TOKENS, ignore_eos=True)
        up.wait_for("it streams", lambda: up.status().running.get("decoding") == 1)
        worker = psutil.Process(up.processes["mixed-0"].pid)
        ranks = worker.children(recursive=True)
        assert any("engine.vllm.rank" in rank.cmdline() for rank in ranks)
        for process in (*ranks, worker):
            process.send_signal(signal.SIGTERM)
        assert not streaming.done(), "it has to be asked amid the stream"
        assert streaming.result() == expected
        assert up.processes.pop("mixed-0").wait(STOP_S) == 0
        assert not psutil.wait_procs(ranks, timeout=STOP_S)[1]


def test_worker_ends_with_its_rank(vllm_python: str, model: Path) -> None:
    """A worker ends by itself when one of its ranks is killed, and its stream goes on at another, token for token."""
    before = set(SHARED_MEMORY.glob("*-cpushm_*"))
    with parts(model) as up, ThreadPoolExecutor(1) as pool:
        up.start("coordinator")
        up.start("gateway")
        begin(up, vllm_python, "mixed-0")
        up.wait_registered(2)
        expected = up.token_ids(PROMPT, TOKENS, ignore_eos=True)
        streaming = pool.submit(up.token_ids, PROMPT, TOKENS, ignore_eos=True)
        up.wait_for("it streams", lambda: up.status().running.get("decoding") == 1)
        lost = up.processes.pop("mixed-0")
        [rank] = [one for one in psutil.Process(lost.pid).children() if "engine.vllm.rank" in one.cmdline()]
        rank.kill()
        assert lost.wait(STOP_S) > 0
        begin(up, vllm_python, "mixed-1")
        up.wait_registered(2)
        assert streaming.result() == expected
    assert set(SHARED_MEMORY.glob("*-cpushm_*")) <= before, "vLLM leaves it where a process is killed"
