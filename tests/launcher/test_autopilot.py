"""What `crossdock autopilot` does with step times that it hears of, and what it says of that."""

from prometheus_client import generate_latest

from launcher.admin.autopilot import Seen, learn, registry_of
from proto.messages import Role
from proto.status import AutopilotReport
from runtime.process import log
from tests.tuning.profiles import GPU
from tests.tuning.test_autopilot import ANSWERS, SLO, seats
from tests.tuning.test_learned import production, report_of, times
from tuning.accuracy import Accuracy
from tuning.autopilot import Autopilot, AutopilotRules, Observation
from tuning.learned import Learner


def test_learned_step_times_are_reported() -> None:
    """The autopilot predicts with the step times it has learned and names the correction in its report."""
    pilot, accuracy, learner, seen = (
        Autopilot(GPU, AutopilotRules(SLO)),
        Accuracy(GPU, SLO),
        Learner(GPU),
        Seen(model="m"),
    )
    true = GPU.scaled(1.0, 1.5)
    learn(learner, pilot, accuracy, report_of(production(true, Role.DECODE, 400)), seen, log.get("test"))
    assert times(pilot.profile, Role.DECODE)[2] > 1.3 * times(GPU, Role.DECODE)[2]
    seen.decision = pilot.decide(Observation(seats(2, 2), ANSWERS), 0.0)
    said = seen.question("advise")
    assert isinstance(said, AutopilotReport) and said.status.learned.startswith("decode steps take 1.50 times")
    (line,) = [
        line
        for line in generate_latest(registry_of(seen)).decode().splitlines()
        if line.startswith("crossdock_autopilot_step_time_ratio{")
    ]
    name, _, value = line.partition(" ")
    assert 'role="decode"' in name and 1.45 < float(value) < 1.55


def test_correction_is_news_when_it_changes() -> None:
    """A correction of the profile counts as news once, and again after its factor has changed enough."""
    seen = Seen()
    assert not seen.is_correction_news(), "nothing is known"
    for factor, is_news in ((1.18, True), (1.19, False), (1.16, False), (1.3, True), (1.3, False)):
        seen.factors = {Role.DECODE: factor}
        assert seen.is_correction_news() is is_news, factor
    seen.factors = {Role.DECODE: 1.3, Role.PREFILL: 1.0}
    assert seen.is_correction_news()
