"""docs/scenarios/README.md: its generated parts are up to date, and its scenarios show what the page says of them."""

import re
from typing import Any

import pytest

from lab.scenarios import scenario
from tests.documents import ROOT
from tools import policy

PAGE = (ROOT / "docs" / "scenarios" / "README.md").read_text(encoding="utf-8")


def streams(name: str) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = policy.run(name)["traffic"]
    return found


def test_policy_page_is_up_to_date() -> None:
    """docs/scenarios/README.md equals the generated page."""
    assert policy.replace(PAGE) == PAGE, "run: python -m tools.policy docs/scenarios/README.md"


def test_page_without_parts_is_refused() -> None:
    with pytest.raises(ValueError, match="no part"):
        policy.replace("# A page\n")


def test_keys_and_figures_are_explained() -> None:
    """Every scenario key has a description in the page, and every figure is explained."""
    for table in (
        scenario.Scenario,
        scenario.ScenarioWorkers,
        scenario.ScenarioTraffic,
        scenario.FailureOf,
        scenario.Requirement,
    ):
        for key, field in table.model_fields.items():
            assert field.description, key
            assert f"\n| `{key}` | " in PAGE, key
    explained = set(re.findall(r"`(\w+)`", PAGE.partition("## Read the figures")[2].partition("\n## ")[0]))
    assert policy.run("heavy-tenant")["all"].keys() <= explained


def test_every_scenario_is_in_the_page() -> None:
    named = set(re.findall(r"<!-- output: ([\w-]+)", PAGE))
    assert named == {path.stem for path in policy.SCENARIOS.glob("*.toml")} and len(named) == 5


def test_overload_rejects_without_waste() -> None:
    """Requests over capacity are rejected by their deadline, and nearly all computed work is useful."""
    before, after = streams("overload").values()
    assert before["goodput_share"] == 1.0
    assert after["finished"] + after["rejected"]["deadline"] == after["offered"] > after["finished"]
    assert after["useful_share"] > 0.95 and after["finished"] > 0.9 * 7.5 * 40


def test_slow_worker_costs_little() -> None:
    """A slow worker lowers goodput by less than 2% and keeps the TTFT p99 under a second."""
    before, after = streams("slow-worker").values()
    assert before["goodput_share"] == 1.0 and after["goodput_share"] > 0.98
    assert before["ttft_ms"]["p99"] < after["ttft_ms"]["p99"] < 1000


def test_failing_worker_fails_no_request() -> None:
    """Every request finishes though a worker fails, with few interruptions."""
    before, after = streams("failing-worker").values()
    assert before["finished"] == before["offered"] and after["finished"] == after["offered"]
    assert 0 < after["interruptions"] < 20


def test_light_tenant_waits_little() -> None:
    """A light tenant keeps its goodput and a short TTFT beside a heavy tenant, which waits and is refused a part."""
    alone, beside, heavy = streams("heavy-tenant").values()
    assert alone["goodput_share"] == beside["goodput_share"] == 1.0
    assert beside["ttft_ms"]["p99"] < 500 < 10_000 < heavy["ttft_ms"]["p50"]
    assert not beside["rejected"] and heavy["finished"] + heavy["rejected"]["deadline"] == heavy["offered"]


def test_two_decode_workers_carry_the_load() -> None:
    """Two decode workers keep goodput over 90%, and one does not reach 70%."""
    three, two, one = streams("decode-workers").values()
    assert three["goodput_share"] >= two["goodput_share"] > 0.9 and one["goodput_share"] < 0.7
