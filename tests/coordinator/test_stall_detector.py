"""A coordinator that did not run for a while acts on nothing that it believed before."""

from coordinator.events import PeerUp, Send, Tick
from coordinator.main import Coordinator
from coordinator.recovery.stall_detector import StallDetector
from proto import limits
from proto.messages import Hello, Role
from runtime.settings.roles import CoordinatorSettings

LIMIT_S = 1.75
GATEWAY = PeerUp(5, Hello(limits.PROTOCOL_VERSION, Role.GATEWAY, 5, "gateway", model="m"))


def test_only_long_pauses_are_absences() -> None:
    """A pause counts as an absence only if it is longer than the limit, and then counts for good."""
    stall_detector = StallDetector(LIMIT_S)
    assert not stall_detector.was_away(50.0) and not stall_detector.was_away(100.0), "nobody was there yet"
    stall_detector.begin(100.0)
    assert not stall_detector.was_away(101.0) and not stall_detector.was_away(102.75)
    assert stall_detector.was_away(105.0) and stall_detector.away_s == 2.25
    assert stall_detector.was_away(105.1) and stall_detector.away_s == 2.25


def test_nothing_is_done_after_absence() -> None:
    """Events after an absence cause no actions, and no deadline is left."""
    coordinator = Coordinator(CoordinatorSettings(bind="tcp://127.0.0.1:0", metrics="off"))
    coordinator.stall_detector = StallDetector(LIMIT_S)
    coordinator.stall_detector.begin(0.0)
    assert any(isinstance(action, Send) for action in coordinator.handle(GATEWAY, 1.0))
    assert list(coordinator.handle(GATEWAY, 4.0)) == [] and list(coordinator.handle(Tick(), 4.1)) == []
    assert coordinator.next_deadline() is None
