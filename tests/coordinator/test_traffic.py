"""What the coordinator tells of the last requests."""

import pytest

from coordinator.events import PeerUp
from coordinator.reporting.status import status
from proto.limits import PROTOCOL_VERSION
from proto.messages import Finished, Hello, Role, StatusRequest, StepDone
from proto.progress import DecodeProgress, Joined
from proto.status import AutopilotReport, AutopilotStatus, StatusReport
from scheduler.workers import traffic
from scheduler.workers.traffic import RecentTraffic, expected_lengths
from tests.coordinator.test_draining import decoding
from tests.coordinator.world import Harness, submit


def test_sample_stands_for_skipped_requests() -> None:
    """A sampled request stands for those that came between it and the last one."""
    seen = RecentTraffic()
    for number in range(40):
        seen.arrived(submit(f"r{number}", 10), number / 32)  # 32 a second, of which 8 are looked at
    report = seen.report("m", lambda name: 0, 7, 2.0)
    assert sum(report.stands_for) == 37 and len(report.ages_ms) == 10 and report.waiting_tokens == 7
    assert report.ages_ms[0] == 2000.0 and set(report.stands_for[1:]) == {4}


def test_traffic_sample_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traffic, "SAMPLE_MAX", 3)
    seen = RecentTraffic()
    for number in range(10):
        seen.arrived(submit(f"r{number}"), float(number))
    assert seen.report("m", lambda name: 0, 0, 10.0).ages_ms == (3000.0, 2000.0, 1000.0)


def test_running_answers_expect_longer_lengths() -> None:
    """A running answer is expected to be as long as ended answers that were longer than it."""
    expect = expected_lengths([10, 10, 100, 100], [True] * 4)
    assert expect(0) == 55 and expect(10) == 100 and expect(50) == 100
    assert expect(200) == 251, "longer than any: nothing is known of it"


def test_running_answers_count_their_length() -> None:
    """Traffic has turned to long answers, of which none has ended."""
    expect = expected_lengths([2, 2, 80, 90, 100], [True, True, False, False, False])
    assert 55 <= expect(0) <= 65 and expect(50) == 100


def test_status_reports_prompt_and_answer_lengths() -> None:
    """The status tells prompt and answer lengths as far as they are known, once for all attempts."""
    h = Harness.make()
    decoding(h, submit("a", 30, max_tokens=100))
    own = h.core.cluster.requests["a"].decode_incarnation
    h.receive(own, DecodeProgress(0, 10, 0, (Joined("a", 1, 0),)))
    h.receive(own, DecodeProgress(12, 10, 0))
    (seen,) = status(h.core.state).traffic
    assert (seen.model, seen.prompt_tokens, seen.stands_for) == ("m", (30,), (1,))
    assert 12 <= seen.output_tokens[0] <= 20
    h.receive(own, Finished("a", 1, 40, 40))
    (seen,) = status(h.core.state).traffic
    assert seen.output_tokens == (40,)
    h.receive(1, submit("a", 30, attempt=2, resumed=1))
    assert len(status(h.core.state).traffic[0].ages_ms) == 1, "another attempt is no other request"


def test_status_reports_time_per_token() -> None:
    """The status tells the time per token of running and ended answers."""
    h = Harness.make()
    h.now = 10.0
    decoding(h, submit("a", 30, max_tokens=100))
    own = h.core.cluster.requests["a"].decode_incarnation
    h.receive(own, DecodeProgress(0, 10, 0, (Joined("a", 1, 0),)))
    h.now = 10.5
    h.receive(own, DecodeProgress(12, 10, 0))
    (seen,) = status(h.core.state).traffic
    assert 500 / 12 <= seen.tpot_ms[0] <= 500 / 9
    h.now = 12.0
    h.receive(own, Finished("a", 1, 41, 41))
    (seen,) = status(h.core.state).traffic
    assert seen.tpot_ms[0] == pytest.approx(2000 / 40)


def test_waiting_requests_count_their_wait() -> None:
    """A waiting request counts with its wait, one that ended without a token with nothing."""
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


def test_autopilot_report_needs_served_model() -> None:
    """The coordinator keeps an autopilot's report only for a model that it serves."""
    h = Harness.make()
    h.post(PeerUp(5, Hello(PROTOCOL_VERSION, Role.OBSERVER, 5, "autopilot")))
    for model in ("m", "no such model"):
        h.receive(5, AutopilotReport(AutopilotStatus(model, "on", "1P3D", "2P2D", "long prompts")))
    h.now += 2.0
    h.receive(5, StatusRequest())
    first, _, last = (one for one in h.take(StatusReport, 5) if isinstance(one, StatusReport))
    assert [one.model for one in last.autopilots] == ["m"] and last.autopilots[0].age_ms == 2000.0
    assert first.workers, "it is answered with what it decides by"


def test_empty_step_is_no_measurement() -> None:
    """An empty step is not kept as a measured step."""
    h = Harness.make()
    h.receive(10, StepDone(0, (), 0.0, 0))
    assert all(not worker.steps for worker in status(h.core.state).workers)
