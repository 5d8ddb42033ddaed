"""Hot prefixes on several prefill workers: no worker is overloaded for its cache, and caches are used (see `herding`)."""

import pytest

from tests.coordinator.herding import POLICIES, Cell, judge, measure, one_shared_prefix
from tests.helpers import first

CORNER = [Cell(1, 0.7, 2), Cell(8, 0.5, 4), Cell(64, 0.5, 4, requests=900), Cell(8, 0.7, 8)]
FEW = 775
"""KV blocks that are less than two caches of each hot prefix: about 700, and those of the prompt that is computed."""
FULL = [
    Cell(hot, load, workers) for hot in (1, 4, 16, 64) for load in (0.2, 0.5, 0.7, 0.95) for workers in (2, 4, 8, 16)
] + [Cell(24, 0.5, 4, blocks=FEW), Cell(24, 0.95, 4, blocks=FEW)]


def test_shared_prefix_does_not_herd() -> None:
    """One shared prefix does not send all requests to one worker."""
    found = measure(4, one_shared_prefix(), POLICIES["ours"], skip=0.0)
    assert found.most_on_one < 0.5, "at 40 of 64 requests per second"
    assert found.ttft_p50_s < 0.5


@pytest.mark.parametrize("cell", first(1, CORNER), ids=str)
def test_grid_corner_keeps_its_bounds(cell: Cell) -> None:
    """A corner of the grid keeps the bounds on slowdown and cache hits."""
    slower, hits, ok = judge(cell)
    assert ok, (slower, hits)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("cell", FULL, ids=str)
def test_full_grid_keeps_its_bounds(cell: Cell) -> None:
    """The full grid keeps the bounds on slowdown and cache hits."""
    slower, hits, ok = judge(cell)
    assert ok, (slower, hits)
