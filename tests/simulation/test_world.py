"""The cluster's own code in the simulated world: some hundred seeds (`-m long`: a thousand), and what makes a seed worth
having: it tells one story."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from simulation.batch import from_line
from simulation.faults.plan import FAULTS, draw
from simulation.run import run_seed, timeline
from tests.helpers import first

PART = 125
"""Seeds of one test."""
ROOT = Path(__file__).resolve().parents[2]
DIGESTS = (
    "import sys; from simulation.run import run_seed; sys.stdout.write(' '.join(run_seed(s).digest for s in range(12)))"
)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("start", first(1, range(0, 8 * PART, PART)))
def test_nothing_is_lost(start: int) -> None:
    for seed in range(start, start + PART):
        result = run_seed(seed)
        if result.failure is not None:
            assert result.cluster is not None
            told = "\n".join(timeline(result.cluster, getattr(result.failure, "request_id", "")))
            raise AssertionError(f"seed {seed} (crossdock simulate --seed {seed}): {result.failure}\n{told}") from (
                result.failure
            )


@pytest.mark.parametrize("seed", [1513, 3379, 3899, 4256, 7077, 8509, 14218, 303333, 312694, 411105])
def test_what_longer_searches_found_stays_mended(seed: int) -> None:
    assert run_seed(seed).failure is None


@pytest.mark.timeout(600)
def test_each_kind_of_fault_comes_up() -> None:
    injected = {name for seed in range(30) for name in run_seed(seed).injected}
    for kind in (
        "crash",
        "pause",
        "partition",
        "cut",
        "slow",
        "step",
        "hang",
        "transfer",
        "frame",
        "client",
        "segment",
    ):
        assert any(name.startswith(kind) for name in injected), kind


@pytest.mark.parametrize("kind", FAULTS)
def test_a_run_with_one_kind_of_faults_has_the_same_requests(kind: str) -> None:
    alone, with_all = draw(3, frozenset({kind})), draw(3)
    assert [(a.prompt, a.at_s) for a in alone.asked] == [(a.prompt, a.at_s) for a in with_all.asked]
    assert run_seed(3, frozenset({kind})).failure is None


def test_a_seed_tells_the_same_story_whatever_the_hash_seed() -> None:
    here = [run_seed(seed).digest for seed in range(12)]
    assert len(set(here)) == len(here)
    for hash_seed in ("0", "1234"):
        environment = os.environ | {"PYTHONHASHSEED": hash_seed}
        done = subprocess.run(
            [sys.executable, "-c", DIGESTS], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100
        )
        assert done.stdout.split() == here, done.stderr


def test_a_story_is_of_its_request_and_of_what_was_done_to_the_cluster() -> None:
    result = run_seed(7, keep=True)
    assert result.cluster is not None
    told = timeline(result.cluster, "r0", 1000)
    assert any("client asks r0" in line for line in told) and any("healing" in line for line in told)
    assert not any("client asks r1" in line for line in told)
    assert len(timeline(result.cluster, most=10)) == 10


def test_a_child_process_says_what_it_ran() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "simulation", "0", "40", "2", "crash"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    parts = [from_line(line) for line in done.stdout.splitlines()]
    assert sum(part.seeds for part in parts) == 20 and not any(part.failed for part in parts)
    assert {name for part in parts for name in part.injected} <= {"crash"}
