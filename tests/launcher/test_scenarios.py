"""The scenarios of tests/scenarios: each can be played, says what is required of the scheduler, and has pinned figures."""

import pytest

from lab.cluster.figures import figures
from lab.cluster.run import play
from lab.commands.simulate import read, read_scenario
from lab.scenarios.requirements import check
from tools import scenarios
from tools.scenarios import FOLDER, NAMES, SEEDS, Row, differences, page, pinned, play_seed, rows

HELD = ("deadlines-2x", "deadly-in-prefill", "some-steps-fail")
"""They take seconds. `crossdock simulate load FILE` shows what others make of their requirements."""


@pytest.mark.parametrize("name", NAMES)
def test_scenario_is_complete(name: str) -> None:
    """Each scenario begins with a sentence, can be built, and requires something."""
    path = FOLDER / f"{name}.toml"
    assert path.read_text("utf-8").startswith("# ") and read_scenario(str(path)).require
    assert read(str(path)).workers


@pytest.mark.parametrize("name", HELD)
def test_scenario_requirements_hold(name: str) -> None:
    """Deadlines, deadly prompts and failing steps are handled as required."""
    path = str(FOLDER / f"{name}.toml")
    missed = [one for one in check(read_scenario(path).require, figures(play(read(path)))) if not one.holds]
    assert not missed


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_figures_are_as_pinned(name: str) -> None:
    """Each figure, the median of three seeds, is within 3 % of the pinned one."""
    found = rows(name, [play_seed(name, seed) for seed in SEEDS])
    told = list(differences(name, pinned()[name], found))
    assert not told, "\n".join([*told, f"if that is meant: python -m tools.scenarios {name} --write"])


def test_every_required_figure_is_pinned() -> None:
    """figures.json has each scenario with its requirements, as the files say them, and each seed."""
    assert tuple(pinned()) == NAMES, "run: python -m tools.scenarios NAME --write"
    for name, some in pinned().items():
        required = read_scenario(str(FOLDER / f"{name}.toml")).require
        wanted = [(f"{one.of}: {one.figure}", one.limit()) for one in required]
        assert [(row["figure"], row["required"]) for row in some if "required" in row] == wanted, name
        assert all(len(row["found"]) == len(SEEDS) for row in some)
        assert len({row["figure"] for row in some}) == len(some)


def test_scenarios_page_is_up_to_date() -> None:
    """The table of tests/scenarios/README.md is what figures.json says."""
    text = scenarios.PAGE.read_text("utf-8")
    assert page(text, pinned()) == text
    with pytest.raises(ValueError, match="needs the lines"):
        page("# A page\n", {})


def row(*found: float | None) -> Row:
    return {"figure": "all: x", "found": list(found)}


@pytest.mark.parametrize(
    ("was", "now", "differ"),
    [
        ((100, 90, 110), (103, 500, 0), False),
        ((100, 90, 110), (103.5, 90, 110), True),
        ((0, 0, 0), (0.01, 0.01, 0), False),
        ((0, 0, 0), (0.02, 0.02, 0), True),
        ((None, None, None), (None, None, None), False),
        ((None, None, None), (1, 1, 1), True),
    ],
)
def test_figures_outside_bands_are_told(was: tuple[float, ...], now: tuple[float, ...], differ: bool) -> None:
    """A median that differs by more than 3 % or 0.01 is told with scenario, figure, pinned and found; so is a new one."""
    told = list(differences("chats", [row(*was)], [row(*now)]))
    assert bool(told) is differ
    assert all(line.startswith("chats, all: x: ") and " is pinned, " in line for line in told)
    assert bool(list(differences("chats", [], [row(*now)]))) is (None not in now)
