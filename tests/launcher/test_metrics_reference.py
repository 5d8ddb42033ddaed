"""The reference, the dashboard and the alerts name what the processes really export (`tests/e2e/test_metrics.py` compares that
with real processes)."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import promql_parser as promql
import pytest
import yaml  # type: ignore[import-untyped]

from runtime.metrics.registry import Family
from tools import metrics as metrics_reference

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "scripts" / "metrics"
NOT_OURS = {"up": ("job", "instance"), "process_resident_memory_bytes": ()}
"""Of Prometheus and its client, with labels beside ours."""
TARGET_LABELS = {"instance", "job", "crossdock_role", "crossdock_name"}
FAMILIES = metrics_reference.families()


def test_metrics_reference_is_up_to_date() -> None:
    """docs/metrics.md equals the generated text."""
    assert (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8") == metrics_reference.text(), (
        "run: python -m tools.metrics docs/metrics.md"
    )


def test_metric_names_follow_conventions() -> None:
    """Metric names follow the conventions and mean the same in every role."""
    seen: dict[str, Family] = {}
    for registry in metrics_reference.registries().values():
        for family in registry.families:
            assert seen.setdefault(family.name, family) == family, "one name is one thing"
            assert re.fullmatch(r"crossdock_[a-z0-9_]+", family.name) and family.help
            assert not re.search(r"_(ms|us|mib|kib|percent|total|count|sum|bucket)$", family.name), family.name
            assert all(
                re.fullmatch(r"[a-z_]+", label) and label not in ("le", "key", "prompt") for label in family.labels
            )
            if family.kind == "gauge":
                assert not family.exported.endswith("_total")
    for row in metrics_reference.ELSEWHERE:
        name = row[0].partition(",")[0]
        assert name == "…" or name in FAMILIES, name


def expressions() -> Iterator[tuple[str, str]]:
    """(where, PromQL) of both files; `$__rate_interval` is Grafana's."""
    dashboard = json.loads((FOLDER / "grafana-dashboard.json").read_text(encoding="utf-8"))
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            yield f"panel {panel['title']!r}", target["expr"].replace("$__rate_interval", "5m")
    for group in yaml.safe_load((FOLDER / "alerts.yaml").read_text(encoding="utf-8"))["groups"]:
        for rule in group["rules"]:
            yield f"alert {rule['alert']}", rule["expr"]


def selectors(
    node: object, by: frozenset[str] = frozenset(), rated: str = ""
) -> Iterator[tuple[object, frozenset[str], str]]:
    """Vector selectors, with what the aggregation around keeps, and the function right around."""
    match node:
        case promql.AggregateExpr():
            kept = frozenset(node.modifier.labels if node.modifier is not None else ())
            yield from selectors(node.expr, kept)
        case promql.Call():
            for argument in node.args:
                yield from selectors(argument, by, node.func.name)
        case promql.BinaryExpr():
            yield from selectors(node.lhs, by, rated)
            yield from selectors(node.rhs, by, rated)
        case promql.ParenExpr() | promql.UnaryExpr() | promql.SubqueryExpr():
            yield from selectors(node.expr, by, rated)
        case promql.MatrixSelector():
            yield node.vector_selector, by, rated
        case promql.VectorSelector():
            yield node, by, rated


def family_of(name: str) -> tuple[Family | None, str]:
    """And the suffix of a histogram's series."""
    if name in FAMILIES and FAMILIES[name].kind != "histogram":
        return FAMILIES[name], ""
    base, _, suffix = name.rpartition("_")
    family = FAMILIES.get(base)
    if family is not None and family.kind == "histogram" and suffix in ("bucket", "sum", "count"):
        return family, suffix
    return None, ""


def faults(expression: str) -> list[str]:
    found = []
    for selector, by, function in selectors(promql.parse(expression)):
        name = selector.name  # type: ignore[attr-defined]
        if name in NOT_OURS:
            continue
        family, suffix = family_of(name)
        if family is None:
            found.append(f"nobody exports {name}")
            continue
        labels = {*family.labels, *TARGET_LABELS, *(("le",) if suffix == "bucket" else ())}
        used = {matcher.name for matcher in selector.matchers.matchers} | by  # type: ignore[attr-defined]
        found += [f"{name} has no label {label}" for label in sorted(used - labels)]
        if suffix == "bucket" and "le" not in by:
            found.append(f"{name} is summed without le")
        if (family.kind == "counter" or suffix) and function not in ("rate", "increase", "irate"):
            found.append(f"{name} only grows: take its rate")
        if family.kind == "gauge" and function in ("rate", "increase", "irate"):
            found.append(f"{name} is a gauge: it has no rate")
    return found


EXPRESSIONS = list(expressions())


@pytest.mark.parametrize(("where", "expression"), EXPRESSIONS, ids=[where for where, _ in EXPRESSIONS])
def test_queried_metrics_are_exported(where: str, expression: str) -> None:
    """Every expression checked against the registries uses exported metrics correctly."""
    assert faults(expression) == []


@pytest.mark.parametrize(
    ("expression", "fault"),
    [
        ("crossdock_nothing", "nobody exports crossdock_nothing"),
        ("rate(crossdock_gateway_output_tokens[5m])", "nobody exports"),
        ("crossdock_gateway_time_to_first_token_seconds", "nobody exports"),
        ("crossdock_gateway_output_tokens_total", "only grows"),
        ("rate(crossdock_gateway_active_streams[5m])", "is a gauge"),
        ('crossdock_kv_blocks{kind="held"}', "no label kind"),
        ("sum by (user) (rate(crossdock_gateway_output_tokens_total[5m]))", "no label user"),
        ("histogram_quantile(0.9, sum(rate(crossdock_decode_step_seconds_bucket[5m])))", "without le"),
    ],
)
def test_wrong_expression_is_detected(expression: str, fault: str) -> None:
    """An expression with an unknown metric, label or function is reported."""
    assert any(fault in line for line in faults(expression)), faults(expression)


def test_panels_and_rules_are_well_formed() -> None:
    """Dashboard panels do not overlap, and each alert rule has a severity and a summary."""
    dashboard = json.loads((FOLDER / "grafana-dashboard.json").read_text(encoding="utf-8"))
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        at = panel["gridPos"]
        sub_blocks = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not taken & sub_blocks and at["x"] + at["w"] <= 24, panel["title"]
        taken |= sub_blocks
    for group in yaml.safe_load((FOLDER / "alerts.yaml").read_text(encoding="utf-8"))["groups"]:
        for rule in group["rules"]:
            assert rule["labels"]["severity"] in ("warning", "critical") and rule["annotations"]["summary"]


def test_each_alert_has_its_runbook() -> None:
    """The runbook has a section for each alert, in the same order, which says what it means, how to see it, and what to do."""
    alerts = [where.split()[1] for where, _ in EXPRESSIONS if where.startswith("alert ")]
    page = (ROOT / "docs" / "runbook.md").read_text(encoding="utf-8")
    sections = page.split("\n## ")[1:]
    assert [section.partition("\n")[0] for section in sections] == alerts
    for section in sections:
        assert re.findall(r"^\*\*(.+?):\*\*", section, re.MULTILINE) == ["Means", "See it", "Do"], section[:40]
        for name in re.findall(r"`(crossdock_\w+)", section):
            assert name in FAMILIES or family_of(name)[0] is not None, name
