"""Which transports are proposed: best first, those that broke left out for a growing, bounded time, never none."""

from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.transport_choice import PEERS_MAX, TransportChoice

THREE = ("shm", "nccl", "gloo")


def test_broken_transport_is_retried_later() -> None:
    """A broken transport is left out for a growing, bounded time, and then proposed again."""
    choice = TransportChoice(("shm", "gloo"), 1_000, 3_000)
    now = 0.0
    for period_s in (1.0, 2.0, 3.0, 3.0):
        assert choice.proposal(7, now) == ("shm", "gloo")
        choice.broke(7, "shm", "cut", now)
        assert choice.proposal(7, now) == ("gloo",) and choice.proposal(8, now) == ("shm", "gloo")
        assert "cut" in choice.why_not_better(7, "gloo", now)
        assert not choice.better_is_due(7, "gloo", now + period_s - 0.01)
        now += period_s
        assert choice.better_is_due(7, "gloo", now) and not choice.why_not_better(7, "gloo", now)
    choice.worked(7, "shm", now)
    choice.broke(7, "shm", "cut", now)
    assert choice.proposal(7, now + 2.9) == ("gloo",), "one good transfer does not clear the record"
    now += 6.0
    choice.worked(7, "shm", now)
    choice.broke(7, "shm", "cut", now)
    assert choice.proposal(7, now + 1.0) == ("shm", "gloo"), "but a while without trouble does"


@given(st.lists(st.tuples(st.sampled_from(THREE), st.integers(0, 3), st.floats(0, 10), st.booleans())))
def test_proposal_is_never_empty(history: list[tuple[str, int, float, bool]]) -> None:
    """The proposal is never empty, keeps the order of preference, and is complete after the longest exclusion."""
    choice, now = TransportChoice(THREE, 500, 4_000), 0.0
    for transport, peer, later_s, good in history:
        now += later_s
        (choice.worked(peer, transport, now) if good else choice.broke(peer, transport, "x", now))
        proposal = choice.proposal(peer, now)
        assert proposal and list(proposal) == sorted(proposal, key=THREE.index)
        assert choice.proposal(peer, now + 4.0) == THREE, "nothing is left out for longer than the bound"


def test_peer_records_are_bounded() -> None:
    """The oldest record is dropped once more than the maximum number of peers have one."""
    choice = TransportChoice(THREE, 500, 4_000)
    for peer in range(PEERS_MAX + 10):
        choice.broke(peer, "shm", "x", 0.0)
    assert choice.proposal(0, 0.0) == THREE and choice.proposal(PEERS_MAX, 0.0) == THREE[1:]
