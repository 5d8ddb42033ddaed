"""The scenarios of tests/scenarios: each can be played, and says what is required of the scheduler."""

from pathlib import Path

import pytest

from launcher.simulate.load import read, read_scenario
from launcher.simulate.requirements import check
from simulation.load.figures import figures
from simulation.load.run import play

FILES = sorted((Path(__file__).parents[1] / "scenarios").glob("*.toml"))
HELD = ("deadlines-2x", "deadly-in-prefill", "some-steps-fail")
"""They take seconds. `crossdock simulate load FILE` shows what others make of their requirements."""


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_scenario_is_complete(path: Path) -> None:
    """Each scenario begins with a sentence, can be built, and requires something."""
    assert path.read_text("utf-8").startswith("# ") and read_scenario(str(path)).require
    assert read(str(path)).workers


@pytest.mark.parametrize("name", HELD)
def test_scenario_requirements_hold(name: str) -> None:
    """Deadlines, deadly prompts and failing steps are handled as required."""
    path = str(next(path for path in FILES if path.stem == name))
    missed = [one for one in check(read_scenario(path).require, figures(play(read(path)))) if not one.holds]
    assert not missed
