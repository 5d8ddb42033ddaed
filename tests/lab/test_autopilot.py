"""When the autopilot changes a worker's role, and when it does not."""

from collections.abc import Sequence
from dataclasses import replace

import msgspec
import pytest

from coordinator.events import PeerDown, PeerUp
from coordinator.reporting.status import status
from lab.advise import Slo, Traffic, Workers
from lab.autopilot import (
    Autopilot,
    AutopilotRules,
    AutopilotWorker,
    Decision,
    Observation,
    latest,
    observation_of,
    of_longer,
)
from lab.profile import Curve, DecodeCost, HostCost, PrefillCost, Profile, ProfileCapacity, TransferCost
from proto.drain import FlipRequest
from proto.limits import PROTOCOL_VERSION
from proto.messages import Hello, Role
from proto.status import TrafficStatus
from tests.coordinator.world import Harness, worker_hello
from tests.lab.driving import Phase, drive

PROFILE = Profile(
    PrefillCost(Curve((1.0, 4096.0), (10.0, 400.0))),
    DecodeCost(Curve((1.0, 16.0, 64.0), (40.0, 44.0, 90.0))),
    ProfileCapacity(4096, 256, 256),
    ProfileCapacity(4096, 256, 64),
    TransferCost(3.0, 1e9, 0.0),
    HostCost(1.0),
    step_tokens=4096,
)
SLO = Slo(4000, 60)
PROMPTS = Traffic(8.0, [6000] * 48, [20] * 48)
ANSWERS = Traffic(6.0, [300] * 48, [400] * 48)
MODEST = Traffic(1.0, [3000] * 48, [100] * 48)


def seats(prefill: int, decode: int, *, draining: str = "") -> list[AutopilotWorker]:
    roles = [Role.PREFILL] * prefill + [Role.DECODE] * decode
    return [AutopilotWorker(f"w{at}", role, 10 - at, f"w{at}" == draining) for at, role in enumerate(roles)]


def looks(pilot: Autopilot, seen: Sequence[Observation], begin: float = 0.0) -> list[Decision]:
    return [pilot.decide(one, begin + 2.0 * at) for at, one in enumerate(seen)]


def test_least_busy_worker_changes_role() -> None:
    """The least busy worker of the other role changes, once the need was seen twice."""
    first, second = looks(Autopilot(PROFILE, AutopilotRules(SLO)), [Observation(seats(2, 6), PROMPTS)] * 2)
    assert not first.workers and "to be seen again first" in first.reason
    assert (second.workers, second.role) == (("w7",), Role.PREFILL)
    assert second.present == Workers(2, 6) and second.wanted.prefill > 4 and second.gain > 1
    assert "8 requests/s of 6000 + 20 tokens on 2P6D: 2% keep the SLO" in second.reason
    assert second.needed is not None and second.needed.prefill >= 5 and second.needed.decode == 1


def test_mixed_workers_are_left_alone() -> None:
    """Mixed workers count in the ratio and never change their role."""
    halves = [AutopilotWorker(f"a-{role}", role, 0, is_mixed=True) for role in (Role.PREFILL, Role.DECODE)]
    _, second = looks(Autopilot(PROFILE, AutopilotRules(SLO)), [Observation([*seats(1, 5), *halves], PROMPTS)] * 2)
    assert second.present == Workers(1, 5, 1) and second.wanted.mixed == 1
    assert second.workers == ("w5",), "the least busy one is half of a mixed worker"
    (alone,) = looks(Autopilot(PROFILE, AutopilotRules(SLO)), [Observation(halves, PROMPTS)])
    assert not alone.workers and "1M has no others of both roles" in alone.reason


@pytest.mark.parametrize(("ratio", "count"), [((16, 48), 8), ((23, 41), 3), ((60, 4), 0)])
def test_eighth_of_workers_changes_at_once(ratio: tuple[int, int], count: int) -> None:
    """Up to an eighth of many workers change their role at once."""
    prompts = replace(PROMPTS, requests_per_s=64.0)
    second = looks(Autopilot(PROFILE, AutopilotRules(SLO, gain_min=0.01)), [Observation(seats(*ratio), prompts)] * 2)[1]
    assert len(second.workers) == count, second


@pytest.mark.parametrize(
    ("seen", "why"),
    [
        (Observation(seats(2, 6), PROMPTS, is_changing=True), "is changing its role"),
        (Observation(seats(7, 1), PROMPTS), ""),
        (Observation(seats(2, 6), MODEST), ""),
        (Observation(seats(2, 6), None), "too few requests"),
        (Observation(seats(2, 0), PROMPTS), "lacks a role"),
    ],
)
def test_autopilot_stays_without_need(seen: Observation, why: str) -> None:
    """The autopilot changes nothing when a change is under way, not needed or not possible."""
    decisions = looks(Autopilot(PROFILE, AutopilotRules(SLO)), [seen] * 5)
    assert not any(one.workers for one in decisions) and why in decisions[-1].reason


def test_loss_pauses_the_autopilot() -> None:
    """The autopilot changes nothing for a while after a worker was lost."""
    pilot = Autopilot(PROFILE, AutopilotRules(SLO))
    before, after = Observation(seats(2, 6), PROMPTS, lost=3), Observation(seats(2, 6), PROMPTS, lost=4)
    decisions = looks(pilot, [before, *[after] * 15])
    assert not any(one.workers for one in decisions) and "a worker was lost" in decisions[-1].reason
    assert looks(pilot, [after], 40.0)[0].workers


def test_draining_worker_is_not_counted() -> None:
    """A draining worker does not count in the ratio and stops no change."""
    _, second = looks(Autopilot(PROFILE, AutopilotRules(SLO)), [Observation(seats(2, 6, draining="w7"), PROMPTS)] * 2)
    assert (second.workers, second.present) == (("w6",), Workers(2, 5)), "the least busy one is on its way out"


def test_rare_losses_pause_no_large_fleet() -> None:
    """A few losses in a large fleet do not pause the autopilot, and many do."""
    prompts = replace(PROMPTS, requests_per_s=500.0)
    seen = [Observation(seats(125, 375), prompts, lost=lost) for lost in (0, 7, 15)]
    first, second, third = looks(Autopilot(PROFILE, AutopilotRules(SLO)), seen)
    assert not first.workers and len(second.workers) == 62, "an eighth of them, which follows within a minute"
    assert not third.workers and "15 workers were lost less than 30 s ago" in third.reason


def test_other_models_are_ignored() -> None:
    """Role changes and losses of other models do not stop the autopilot."""
    h = Harness.make(prefill=2, decode=6)
    other = msgspec.structs.replace(worker_hello(Role.PREFILL, 50), model="other")
    for incarnation in (50, 51):
        name = f"other-{incarnation}"
        h.post(PeerUp(incarnation, msgspec.structs.replace(other, incarnation=incarnation, name=name)))
    h.post(PeerUp(5, Hello(PROTOCOL_VERSION, Role.OBSERVER, 5, "flip-1")))
    h.receive(5, FlipRequest("other-50", Role.DECODE, 0.0, True))
    h.post(PeerDown(51, "killed"))
    report = status(h.core.state)
    seen, there = (observation_of(report, model) for model in ("m", "other"))
    assert (seen.is_changing, seen.lost) == (False, 0) and (there.is_changing, there.lost) == (True, 1)


def test_reversal_waits_for_the_dwell() -> None:
    """A change in the other direction waits until the dwell time is over."""
    pilot = Autopilot(PROFILE, AutopilotRules(SLO, dwell_s=60.0))
    assert looks(pilot, [Observation(seats(2, 6), PROMPTS)] * 2)[1].workers
    turned = Observation(seats(5, 3), ANSWERS)
    back = looks(pilot, [turned] * 20, 4.0)
    assert not any(one.workers for one in back) and "in the other direction" in back[-1].reason
    assert looks(pilot, [turned] * 2, 70.0)[1].role is Role.DECODE


def test_short_burst_changes_nothing() -> None:
    """A fifth more than the present ratio can serve, in a sample of 48: that may be chance."""
    burst = Traffic(11.0, [6000] * 48, [20] * 48)
    usual = Traffic(8.0, [6000] * 400, [20] * 400)
    decisions = looks(Autopilot(PROFILE, AutopilotRules(SLO)), [Observation(seats(6, 2), burst, usual)] * 4)
    assert not any(one.workers for one in decisions)


def test_samples_are_latest_requests() -> None:
    """The short sample holds the latest 48 requests, and the long one those of a minute."""
    ages = tuple(float(1000 * age) for age in range(199, -1, -1))
    status = TrafficStatus("m", ages, (3,) * 200, (100,) * 200, (50,) * 200, (10,) * 200, 5)
    short, long = latest(status), of_longer(status)
    assert short is not None and long is not None
    assert len(short.prompt_tokens) == 48 and len(long.prompt_tokens) == 61
    assert short.requests_per_s == pytest.approx(3.0, rel=0.05) and short.hit_rate == 0.5
    assert short.waiting_tokens == 5 and latest(TrafficStatus("m", (), (), (), (), (), 0)) is None


TURNS = (Phase(40, 1.0, 6000, 20), Phase(100, 8.0, 6000, 20), Phase(80, 6.0, 300, 400))


def test_autopilot_follows_turning_traffic() -> None:
    """In short: `test_autopilot_comes_near_the_oracle` is the whole."""
    found = drive(TURNS, PROFILE, SLO, 2, 6, rules=AutopilotRules(SLO))
    assert found.goodput >= 0.6 * found.asked, found
    assert {way for at, way in found.flips if 40 <= at < 140} == {1}
    assert {way for at, way in found.flips if at >= 140} == {-1}


def test_steady_traffic_changes_nothing() -> None:
    """The autopilot changes no role while traffic stays the same."""
    assert not drive([Phase(100, 4.0, 4000, 150)], PROFILE, SLO, 4, 4, rules=AutopilotRules(SLO)).flips


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_autopilot_comes_near_the_oracle() -> None:
    """Eight workers. The oracle has the best fixed ratio of each phase from its first request on."""
    phases = [Phase(600, one.per_s, one.prompt_tokens, one.output_tokens) for one in TURNS]
    found = drive(phases, PROFILE, SLO, 2, 6, rules=AutopilotRules(SLO))
    oracle = sum(max(drive([one], PROFILE, SLO, p, 8 - p).goodput for p in (1, 2, 6, 7)) for one in phases)
    fixed = max(drive(phases, PROFILE, SLO, p, 8 - p).goodput for p in (2, 4, 6))
    assert found.goodput >= 0.95 * oracle and found.goodput >= 1.3 * fixed
    assert all(found.reversals(600 * at, 600 * (at + 1)) <= 1 for at in range(3))


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_large_fleet_follows_as_fast() -> None:
    """No oracle serves more than all requests that come."""
    phases = [Phase(600, 8 * one.per_s, one.prompt_tokens, one.output_tokens) for one in TURNS]
    found = drive(phases, PROFILE, SLO, 16, 48, rules=AutopilotRules(SLO))
    fixed = max(drive(phases, PROFILE, SLO, p, 64 - p).goodput for p in (16, 40, 44))
    assert found.goodput >= 0.95 * found.asked and found.goodput >= 1.3 * fixed
    assert all(found.reversals(600 * at, 600 * (at + 1)) <= 1 for at in range(3))


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("phase", "prefill"),
    [(Phase(3600, 6.0, 300, 400), 2), (Phase(3600, 4.0, 4000, 150), 4), (Phase(3600, 1.0, 3000, 100), 4)],
)
def test_steady_hour_changes_nothing(phase: Phase, prefill: int) -> None:
    """The autopilot changes no role in an hour of steady traffic."""
    assert not drive([phase], PROFILE, SLO, prefill, 8 - prefill, rules=AutopilotRules(SLO)).flips
