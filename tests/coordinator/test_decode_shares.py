"""Who has the sequences of decode workers: tenants and classes by their weights, while others wait."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.cluster.figures import figures
from lab.cluster.run import play
from lab.cluster.workload import Goal, LoadRequest, LoadStepTimes, WorkerSpec, Workload
from proto.parts import Capacity
from runtime.tenancy.tenants import from_tables
from scheduler.fairness.held_shares import HeldShares, HeldStream
from tests.helpers import first

PREFILL = WorkerSpec("prefill", ("prefill",), Capacity(1 << 20, 16, 4096, 1 << 20), LoadStepTimes(65536.0, 0.002))
SEQS = 64


def decode(seqs: int = SEQS, blocks: int = 1 << 20, name: str = "decode-0") -> WorkerSpec:
    return WorkerSpec(name, ("decode",), Capacity(blocks, 16, seqs, 1 << 20), LoadStepTimes(decode_step_s=0.02))


def asks(
    tenant: str, output_tokens: int, times: list[float], priority_class: str = ""
) -> list[tuple[float, LoadRequest]]:
    ask = LoadRequest(tenant, tenant, priority_class, 256, output_tokens, output_tokens, 0.0, Goal(), 0)
    return [(at_s, ask) for at_s in times]


def played(
    arrivals: list[tuple[float, LoadRequest]], *workers: WorkerSpec, seed: int = 1, **tenants: Any
) -> dict[str, Any]:
    workload = Workload(
        (PREFILL, *(workers or (decode(),))), tuple(sorted(arrivals, key=lambda one: one[0])),
        duration_s=60.0, seed=seed, tenants=from_tables({"tenants": {"long": {}, "short": {}}, **tenants}),
    )  # fmt: skip
    return figures(play(workload))


def every(seconds: float, begin: float = 0.0) -> list[float]:
    return [begin + seconds * number for number in range(int((60.0 - begin) / seconds))]


@pytest.mark.parametrize("seed", first(1, range(1, 6)))
def test_long_answers_leave_room_for_short(seed: int) -> None:
    """The fair order counts tokens: with long answers alone before, both get about the same of them."""
    arrivals = asks("long", 3000, [0.01 * number for number in range(200)]) + asks("short", 200, every(0.2, 10.0))
    found = played(arrivals, seed=seed)
    assert found["traffic"]["short"]["ttft_ms"]["p99"] <= 2000, found["traffic"]["short"]


@pytest.mark.parametrize(
    "workers", first(1, [((decode(32, name="decode-0"), decode(32, name="decode-1")),), ((decode(),),)])
)
def test_light_tenant_finds_room(workers: tuple[WorkerSpec, ...]) -> None:
    """A light tenant finds room beside long answers, at the cost of one interruption at a time."""
    light = asks("short", 20, every(1.0, 5.0))
    alone = played(light, *workers)["traffic"]["short"]["ttft_ms"]["p99"]
    beside = played(light + asks("long", 3000, every(0.5)), *workers)["traffic"]
    assert beside["short"]["ttft_ms"]["p99"] <= 2 * alone + 100, beside
    assert beside["long"]["interruptions"] <= len(light), "one at a time"


def test_room_in_blocks_is_shared() -> None:
    """Room is shared also where blocks, not sequences, run short."""
    small = decode(4096, blocks=40 * 204)  # 40 long answers
    light = asks("short", 20, every(1.0, 5.0))
    found = played(light + asks("long", 3000, every(0.5)), small)["traffic"]
    assert found["short"]["ttft_ms"]["p99"] <= 500, found


@pytest.mark.parametrize("every_s", first(1, [0.03, 0.06]))
def test_busy_tenants_share_equally(every_s: float) -> None:
    """Two tenants that always want more have half of the decode service each."""
    arrivals = asks("long", 3000, [0.01 * number for number in range(200)]) + asks("short", 100, every(every_s))
    found = played(arrivals)
    assert found["traffic"]["short"]["decode_share"] == pytest.approx(0.5, abs=0.05), found["traffic"]
    assert found["traffic"]["long"]["interruptions"] <= 40, "what is near enough stays as it is"


def test_stream_makes_room_at_most_thrice() -> None:
    """A stream is interrupted at most three times to make room for others."""
    light = asks("short", 20, every(1.0, 2.0))
    found = played(light + asks("long", 3000, [0.0, 0.1]), decode(2))["traffic"]
    assert 3 <= found["long"]["interruptions"] <= 6, found


def test_classes_share_by_their_weights() -> None:
    """Priority classes share decode service by their weights."""
    tables = {"priority_classes": {"interactive": {"weight": 9}, "batch": {"weight": 1}}}
    arrivals = asks("long", 3000, every(0.5), "batch") + asks("short", 200, every(0.05, 1.0), "interactive")
    tenants = {name: {"priority_classes": ["interactive", "batch"]} for name in ("long", "short")}
    found = played(arrivals, **tables, tenants=tenants)  # type: ignore[arg-type]
    assert found["traffic"]["short"]["decode_share"] >= 0.8, found["traffic"]


def test_stream_yields_only_if_fairer() -> None:
    """A stream gives way only to another tenant, and only if that does not turn the tables."""
    shares = HeldShares({"a/y": 3.0})

    def gives_way(name: str) -> list[str]:
        found = shares.who_gives_way(("a", name, ""), lambda worker: 10, lambda worker, key: True)
        return [key[0] for _, (key,), _ in found]

    shares.add(("a", "x", ""), 7, ("1", 1), HeldStream(10))
    assert gives_way("x") == []
    assert gives_way("y") == [], "its only stream"
    shares.add(("a", "x", ""), 7, ("2", 1), HeldStream(15))
    assert gives_way("x") == []
    assert gives_way("y") == ["2"], "newest first, and no more together"
    assert gives_way("z") == ["2"], "10 would stay"
    shares.add(("a", "y", ""), 7, ("3", 1), HeldStream(45))
    assert gives_way("y") == [], "55 / 3 would be there"
    shares.remove(("a", "x", ""), 7, ("1", 1))
    assert gives_way("x") == []


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from("xyz"), st.integers(1, 50)), max_size=40), st.data())
def test_giving_way_does_not_oscillate(held: list[tuple[str, str, int]], data: st.DataObject) -> None:
    """Moving units one by one ends, and then nobody holds more for its weight than another who wants more by a unit."""
    shares, weights = HeldShares(), {"c/a": 2.0, "c/b/x": 3.0}
    shares.reweigh(weights)
    owner: dict[tuple[str, int], tuple[str, str, str]] = {}
    for number, (organisation, user, count) in enumerate(held):
        for unit in range(count):
            key = (f"{number}-{unit}", 1)
            owner[key] = ("c", organisation, user)
            shares.add(owner[key], 1, key, HeldStream(1))
    wants = data.draw(
        st.lists(st.sampled_from(sorted(set(owner.values()) | {("c", "d", "z")})), min_size=1, max_size=4)
    )
    for number in range(10 * len(owner) + 10):
        moved = False
        for path in wants:
            gives = next(shares.who_gives_way(path, lambda _: 1, lambda *_: True), None)
            if gives is not None:
                moved = True
                (key,) = gives[1]
                shares.remove(owner.pop(key), 1, key)
                owner[(f"new-{number}-{path}", 1)] = path
                shares.add(path, 1, (f"new-{number}-{path}", 1), HeldStream(1))
        if not moved:
            return
    raise AssertionError("it goes back and forth")
