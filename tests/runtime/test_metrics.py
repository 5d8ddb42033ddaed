"""Instruments, as Prometheus reads them; and which tenants have series of their own."""

from bisect import bisect_left

from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from runtime.metrics.instruments import OTHER, SERIES_MAX, STEP_S, Page, TenantLabels


def read(page: Page, prefix: str = "x") -> dict[str, float]:
    return {
        sample.name + "".join(f"/{value}" for _, value in sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(page.render().decode())
        for sample in family.samples
        if sample.name.startswith(prefix)
    }


@settings(deadline=None)  # the machine may be busy
@given(st.lists(st.one_of(st.floats(0, 20), st.sampled_from(STEP_S)), max_size=50))
def test_a_histogram_is_that_of_the_library(values: list[float]) -> None:
    page, registry = Page("gateway"), CollectorRegistry()
    ours = page.histogram("x_seconds", "x", STEP_S).of()
    theirs = Histogram("x_seconds", "x", buckets=STEP_S, registry=registry)
    for value in values:
        ours.observe(value)
        theirs.observe(value)
    expected = {
        sample.name + "".join(f"/{value}" for value in sample.labels.values()): sample.value
        for family in text_string_to_metric_families(generate_latest(registry).decode())
        for sample in family.samples
        if not sample.name.endswith("_created")
    }
    assert {_plain(name): value for name, value in read(page).items()} == {_plain(n): v for n, v in expected.items()}


def _plain(name: str) -> str:
    """Bounds are written 1 or 1.0."""
    base, slash, bound = name.partition("/")
    return base + slash + (str(float(bound)) if bound else "")


def test_labels_are_bounded_and_escaped() -> None:
    page = Page("gateway")
    count = page.counter("x", "x", "who")
    for number in range(2 * SERIES_MAX):
        count.inc(f"n{number}")
    found = read(page)
    assert len(found) <= SERIES_MAX + 1
    assert found[f"x_total/{OTHER}"] == SERIES_MAX and sum(found.values()) == 2 * SERIES_MAX
    odd = Page("gateway")
    odd.counter("x", "x", "why").inc('a"b\\c\nd')
    assert read(odd) == {'x_total/a"b\\c\nd': 1.0}


def test_tenants_with_most_service_have_their_own_series() -> None:
    page = Page("gateway")
    count = page.counter("x", "x", "tenant")
    tenants = TenantLabels(count, most=3)

    def serve(name: str, amount: float) -> None:
        tenants.served(name, amount)
        count.inc(tenants.label(name))

    for name in ("a", "b", "c", "big", "c"):
        serve(name, 1000.0 if name == "big" else 10.0)
    tenants.rank(100.0)
    assert read(page)[f"x_total/{OTHER}"] == 1.0, "it came when all places were taken"
    assert tenants.label("big") == "big" and sum(tenants.label(n) == n for n in "abc") == 2
    before = read(page)
    for _ in range(50):
        serve("a", 50.0)
        serve("d", 1.0)
    tenants.rank(120.0)
    assert tenants.label("d") == OTHER, "once a minute is enough"
    tenants.rank(161.0)
    after = read(page)
    assert all(after.get(name, value) >= value for name, value in before.items()), "no series ever falls"
    assert len([name for name in after if OTHER not in name]) <= 3


def test_a_bound_belongs_to_its_bucket() -> None:
    assert bisect_left(STEP_S, STEP_S[3]) == 3
