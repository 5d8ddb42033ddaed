"""A coordinator that did not run for a while acts on nothing that it believed before."""

from coordinator.core import Core
from coordinator.events import Limits, PeerUp, Send, Tick
from coordinator.recovery.stall_detector import StallDetector, StallGuard
from proto import limits
from proto.messages import Hello, Role

LIMIT_S = 1.75
GATEWAY = PeerUp(5, Hello(limits.PROTOCOL_VERSION, Role.GATEWAY, 5, "gateway", model="m"))


def test_only_long_pauses_are_absences() -> None:
    """A pause counts as an absence only if it is longer than the limit, and then counts for good."""
    stall_detector = StallDetector(LIMIT_S)
    assert not stall_detector.look(50.0) and not stall_detector.look(100.0), "nobody was there yet"
    stall_detector.begin(100.0)
    assert not stall_detector.look(101.0) and not stall_detector.look(102.75)
    assert stall_detector.look(105.0) and stall_detector.away_s == 2.25
    assert stall_detector.look(105.1) and stall_detector.away_s == 2.25


def test_nothing_is_done_after_absence() -> None:
    """Events after an absence cause no actions, and no deadline is left."""
    stall_detector = StallDetector(LIMIT_S)
    present = StallGuard(Core(Limits()), stall_detector)
    stall_detector.begin(0.0)
    assert any(isinstance(action, Send) for action in present.handle(GATEWAY, 1.0))
    assert list(present.handle(GATEWAY, 4.0)) == [] and list(present.handle(Tick(), 4.1)) == []
    assert present.next_deadline() is None
