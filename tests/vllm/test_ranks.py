"""A worker of two ranks, on real processes: signals and losses reach the ranks as they reach a worker of one process."""

import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests import tiny_models
from tests.e2e.parts import Parts, parts
from tests.e2e.test_exactness import generate

PROMPT, TOKENS = list(range(30, 100)), 400
STOP_S = 60.0
SHARED_MEMORY = Path("/dev/shm")
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    sizes = {"head_dim": 32, "hidden_size": 128, "intermediate_size": 128}
    return tiny_models.make("llama", tmp_path / "llama", **sizes)


def begin(up: Parts, python: str, name: str, role: str = "worker", ranks: int = 2) -> None:
    """Start a worker of so many ranks, a mixed one where no role is given."""
    engine = ("--engine", "vllm", "--engine-python", python, "--drain-timeout-s", "60")
    args = f"--enforce-eager --block-size 32 --tensor-parallel-size {ranks}"
    up.start(role, *engine, f"--vllm-args={args}", name=name)


@pytest.mark.parametrize(("prefill", "decode"), [(1, 2), (2, 1)])
def test_phases_have_ranks_of_their_own(prefill: int, decode: int, vllm_python: str, model: Path) -> None:
    """KV crosses between workers of different tensor parallelism, and later turns find it: tokens are those of generate."""
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    expected = [generate(reference, PROMPT[:length], 48) for length in (20, 32, 70)]
    with parts(model) as up:
        up.start("coordinator")
        up.start("gateway")
        begin(up, vllm_python, "prefill-0", "prefill_worker", prefill)
        begin(up, vllm_python, "decode-0", "decode_worker", decode)
        up.wait_registered(2)
        found = [up.token_ids(PROMPT[:length], 48, ignore_eos=True) for length in (20, 32, 70)]
        assert found == expected
        turn = [*PROMPT, *found[-1], *PROMPT[:40]]
        assert up.token_ids(turn, 24, ignore_eos=True) == generate(reference, turn, 24)


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
        assert any("worker.rank" in rank.cmdline() for rank in ranks)
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
        [rank] = [one for one in psutil.Process(lost.pid).children() if "worker.rank" in one.cmdline()]
        rank.kill()
        assert lost.wait(STOP_S) > 0
        begin(up, vllm_python, "mixed-1")
        up.wait_registered(2)
        assert streaming.result() == expected
    assert set(SHARED_MEMORY.glob("*-cpushm_*")) <= before, "vLLM leaves it where a process is killed"
