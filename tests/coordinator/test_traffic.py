"""What the coordinator tells of the last requests."""

import pytest

from coordinator.events import PeerUp
from coordinator.reporting.report import status
from coordinator.workers import traffic
from coordinator.workers.traffic import RecentTraffic, expected_lengths
from proto.limits import PROTOCOL_VERSION
from proto.messages import Finished, Hello, Role, StatusRequest, StepDone
from proto.progress import DecodeProgress, Joined
from proto.status import AutopilotReport, AutopilotStatus, StatusReport
from tests.coordinator.test_draining import decoding
from tests.coordinator.world import Harness, submit


def test_a_sample_stands_for_those_that_came_between() -> None:
    seen = RecentTraffic()
    for number in range(40):
        seen.arrived(submit(f"r{number}", 10), number / 32)  # 32 a second, of which 8 are looked at
    report = seen.report("m", lambda name: 0, 7, 2.0)
    assert sum(report.stands_for) == 37 and len(report.ages_ms) == 10 and report.waiting_tokens == 7
    assert report.ages_ms[0] == 2000.0 and set(report.stands_for[1:]) == {4}


def test_it_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traffic, "SAMPLE_MAX", 3)
    seen = RecentTraffic()
    for number in range(10):
        seen.arrived(submit(f"r{number}"), float(number))
    assert seen.report("m", lambda name: 0, 0, 10.0).ages_ms == (3000.0, 2000.0, 1000.0)


def test_what_goes_on_is_expected_to_be_as_long_as_what_ended_later() -> None:
    expect = expected_lengths([10, 10, 100, 100], [True] * 4)
    assert expect(0) == 55 and expect(10) == 100 and expect(50) == 100
    assert expect(200) == 251, "longer than any: nothing is known of it"


def test_answers_that_go_on_count_for_what_they_have() -> None:
    """Traffic has turned to long answers, of which none has ended."""
    expect = expected_lengths([2, 2, 80, 90, 100], [True, True, False, False, False])
    assert 55 <= expect(0) <= 65 and expect(50) == 100


def test_the_status_tells_prompts_and_answers_as_they_are_known() -> None:
    h = Harness.make()
    decoding(h, submit("a", 30, max_tokens=100))
    own = h.core.requests["a"].decode_incarnation
    h.receive(own, DecodeProgress(0, 10, 0, (Joined("a", 1, 0),)))
    h.receive(own, DecodeProgress(12, 10, 0))
    (seen,) = status(h.core).traffic
    assert (seen.model, seen.prompt_tokens, seen.stands_for) == ("m", (30,), (1,))
    assert 12 <= seen.output_tokens[0] <= 20
    h.receive(own, Finished("a", 1, 40, 40))
    (seen,) = status(h.core).traffic
    assert seen.output_tokens == (40,)
    h.receive(1, submit("a", 30, attempt=2, resumed=1))
    assert len(status(h.core).traffic[0].ages_ms) == 1, "another attempt is no other request"


def test_it_tells_how_long_requests_took_or_take() -> None:
    h = Harness.make()
    h.now = 10.0
    decoding(h, submit("a", 30, max_tokens=100))
    own = h.core.requests["a"].decode_incarnation
    h.receive(own, DecodeProgress(0, 10, 0, (Joined("a", 1, 0),)))
    h.now = 10.5
    h.receive(own, DecodeProgress(12, 10, 0))
    (seen,) = status(h.core).traffic
    assert 500 / 12 <= seen.tpot_ms[0] <= 500 / 9
    h.now = 12.0
    h.receive(own, Finished("a", 1, 41, 41))
    (seen,) = status(h.core).traffic
    assert seen.tpot_ms[0] == pytest.approx(2000 / 40)


def test_what_waits_counts_for_its_wait_and_what_ended_without_a_token_for_nothing() -> None:
    seen = RecentTraffic()
    for number, name in enumerate(("served", "waits", "rejected")):
        seen.arrived(submit(name, 10, max_tokens=20), float(number))
    seen.computed("served", 0, 0.25)
    report = seen.report("m", {"served": 5, "waits": 0}.get, 0, 3.0)
    assert report.ttft_ms == (250.0, 2000.0, 0.0) and report.tpot_ms == (550.0, 0.0, 0.0)
    seen.computed("served", 0, 2.0)
    seen.finished("served", 11, 2.25)
    report = seen.report("m", {"waits": 0}.get, 0, 3.0)
    assert report.ttft_ms[0] == 250.0, "the first token of the first attempt"
    assert report.tpot_ms[0] == 200.0


def test_the_coordinator_keeps_what_an_autopilot_says_of_a_model_that_it_serves() -> None:
    h = Harness.make()
    h.post(PeerUp(5, Hello(PROTOCOL_VERSION, Role.OBSERVER, 5, "autopilot")))
    for model in ("m", "no such model"):
        h.receive(5, AutopilotReport(AutopilotStatus(model, "on", "1P3D", "2P2D", "long prompts")))
    h.now += 2.0
    h.receive(5, StatusRequest())
    first, _, last = (one for one in h.take(StatusReport, 5) if isinstance(one, StatusReport))
    assert [one.model for one in last.autopilots] == ["m"] and last.autopilots[0].age_ms == 2000.0
    assert first.workers, "it is answered with what it decides by"


def test_steps_of_nothing_prove_nothing() -> None:
    h = Harness.make()
    h.receive(10, StepDone(0, (), 0.0, 0))
    assert all(not worker.steps for worker in status(h.core).workers)
