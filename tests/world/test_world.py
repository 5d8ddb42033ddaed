"""The cluster's own code in the simulated world: some hundred seeds (`-m long`: a thousand), and what makes a seed worth
having: it tells one story."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import first
from tests.world.batch import search
from tests.world.faults.plan import FAULTS, draw
from tests.world.run import run_seed, timeline

PART = 125
"""Seeds of one test."""
ROOT = Path(__file__).resolve().parents[2]
DIGESTS = "import sys; from tests.world.run import run_seed; sys.stdout.write(' '.join(run_seed(s).digest for s in range(12)))"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("start", first(1, range(0, 8 * PART, PART)))
def test_no_promise_breaks_for_any_seed(start: int) -> None:
    """Every seed of the range runs without a violation."""
    for seed in range(start, start + PART):
        result = run_seed(seed)
        if result.failure is not None:
            assert result.cluster is not None
            told = "\n".join(timeline(result.cluster, getattr(result.failure, "request_id", "")))
            raise AssertionError(f"seed {seed} (scripts/simulate --seed {seed}): {result.failure}\n{told}") from (
                result.failure
            )


@pytest.mark.parametrize(
    "seed", [1513, 3379, 3899, 4256, 7077, 8509, 14218, 300193, 300817, 303333, 305540, 312694, 411105]
)
def test_formerly_failing_seeds_pass(seed: int) -> None:
    """Seeds that failed in longer searches run without a violation."""
    assert run_seed(seed).failure is None


@pytest.mark.timeout(600)
def test_every_fault_kind_is_injected() -> None:
    """Each kind of fault is injected by at least one of 30 seeds."""
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
def test_single_fault_run_keeps_the_requests(kind: str) -> None:
    """A run with one kind of fault has the same requests as the run with all."""
    alone, with_all = draw(3, frozenset({kind})), draw(3)
    assert [(a.prompt, a.at_s) for a in alone.asked] == [(a.prompt, a.at_s) for a in with_all.asked]
    assert run_seed(3, frozenset({kind})).failure is None


def test_story_is_independent_of_hash_seed() -> None:
    """A seed gives the same digest under any hash seed."""
    here = [run_seed(seed).digest for seed in range(12)]
    assert len(set(here)) == len(here)
    for hash_seed in ("0", "1234"):
        environment = os.environ | {"PYTHONHASHSEED": hash_seed}
        done = subprocess.run(
            [sys.executable, "-c", DIGESTS], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100
        )
        assert done.stdout.split() == here, done.stderr


def test_story_covers_request_and_cluster_events() -> None:
    """A request's timeline has its own events and the faults, but not other requests' events."""
    result = run_seed(7, keep=True)
    assert result.cluster is not None
    told = timeline(result.cluster, "r0", 1000)
    assert any("client asks r0" in line for line in told) and any("healing" in line for line in told)
    assert not any("client asks r1" in line for line in told)
    assert len(timeline(result.cluster, most=10)) == 10


def test_search_adds_up_its_processes() -> None:
    """A search in two processes runs each seed once, with the asked kind of faults alone."""
    counts: list[int] = []
    total = search(range(5, 45), frozenset({"crash"}), 2, lambda so_far: counts.append(so_far.seeds))
    assert total.seeds == counts[-1] == 40 and len(counts) == 3 and not total.failed
    assert set(total.injected) <= {"crash", "tier damaged"}
