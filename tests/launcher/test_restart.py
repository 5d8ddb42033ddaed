"""When a process that ended is started again, and when it is given up."""

import itertools

import pytest

from launcher.local.restart import FIRST_DELAY_S, LAST_DELAY_S, RESET_EVERY_S, STARTUP_FAILURES_MAX, RestartPolicy
from runtime.process.exits import HOPELESS_EXITS, HUNG_EXIT


def _die(policy: RestartPolicy, ready_s: float = 0.0, uniform: float = 0.0, started_up: bool = True) -> float | None:
    return policy.on_exit(ready_s=ready_s, exit_code=1, started_up=started_up, uniform=uniform)


@pytest.mark.parametrize("exit_code", [1, HUNG_EXIT, -9, *HOPELESS_EXITS])
def test_pauses_grow_to_ten_seconds(exit_code: int) -> None:
    """Pauses double up to ten seconds and no role is given up once the cluster was ready."""
    policy = RestartPolicy()
    found = [policy.on_exit(ready_s=0.0, exit_code=exit_code, started_up=True, uniform=0.5) for _ in range(1000)]
    delays = [delay for delay in found if delay is not None]
    assert len(delays) == 1000
    assert all(later == 2 * earlier or later == LAST_DELAY_S for earlier, later in itertools.pairwise(delays))
    assert delays[0] >= FIRST_DELAY_S and delays[-1] == LAST_DELAY_S == 10.0


def test_long_readiness_resets_the_pause() -> None:
    """Half a minute of readiness resets the pause after earlier failures."""
    policy = RestartPolicy()
    for _ in range(100):
        _die(policy)
    delay_s = _die(policy, ready_s=30.0)
    assert delay_s is not None and delay_s < 1.0
    assert _die(RestartPolicy(), ready_s=1e9) == FIRST_DELAY_S


def test_spaced_kills_do_not_add_up() -> None:
    """As where somebody kills workers at random, every few seconds, for hours."""
    policy = RestartPolicy()
    delays = [_die(policy, ready_s=RESET_EVERY_S) for _ in range(10_000)]
    assert set(delays) == {FIRST_DELAY_S}


def test_quick_crashes_lengthen_the_pause() -> None:
    """A role that crashes soon after each start waits longer each time, up to the last pause."""
    policy = RestartPolicy()
    delays = [delay for _ in range(40) if (delay := _die(policy, ready_s=0.5)) is not None]
    assert all(later > earlier or later == LAST_DELAY_S for earlier, later in itertools.pairwise(delays))
    assert delays[-1] == LAST_DELAY_S


def test_jitter_lengthens_by_at_most_half() -> None:
    """Jitter only lengthens a pause, by at most half."""
    low, high = _die(RestartPolicy(), uniform=0.0), _die(RestartPolicy(), uniform=0.999)
    assert low is not None
    assert high is not None
    assert low < high <= 1.5 * low


def test_startup_failures_are_limited() -> None:
    """A role that never was ready is given up at the limit of startup failures."""
    policy = RestartPolicy()
    delays = [_die(policy, started_up=False) for _ in range(STARTUP_FAILURES_MAX)]
    assert delays[-1] is None
    assert None not in delays[:-1]


def test_hopeless_exit_before_ready_ends_it() -> None:
    """A cluster that was never ready does not restart a role that ended with a hopeless status."""
    for exit_code in HOPELESS_EXITS:
        assert RestartPolicy().on_exit(ready_s=99.0, exit_code=exit_code, started_up=False, uniform=0.0) is None


def test_requested_exit_is_no_failure() -> None:
    """A role that ends with status 0 is started again after the first pause and counts no failure."""
    policy = RestartPolicy()
    found = {policy.on_exit(ready_s=0.0, exit_code=0, started_up=True, uniform=0.0) for _ in range(20)}
    assert found == {FIRST_DELAY_S} and policy.failures == 0
