"""When a process that ended is started again, and when it is given up."""

import itertools

import pytest

from launcher.local.restart import FIRST_DELAY_S, LAST_DELAY_S, RESET_EVERY_S, STARTUP_FAILURES_MAX, RestartPolicy
from runtime.process.exits import HOPELESS_EXITS, HUNG_EXIT


def _die(policy: RestartPolicy, ready_s: float = 0.0, uniform: float = 0.0, started_up: bool = True) -> float | None:
    return policy.on_exit(ready_s=ready_s, exit_code=1, started_up=started_up, uniform=uniform)


@pytest.mark.parametrize("exit_code", [1, HUNG_EXIT, -9, *HOPELESS_EXITS])
def test_after_the_first_readiness_pauses_grow_to_ten_seconds_and_nothing_is_given_up(exit_code: int) -> None:
    policy = RestartPolicy()
    found = [policy.on_exit(ready_s=0.0, exit_code=exit_code, started_up=True, uniform=0.5) for _ in range(1000)]
    delays = [delay for delay in found if delay is not None]
    assert len(delays) == 1000
    assert all(later == 2 * earlier or later == LAST_DELAY_S for earlier, later in itertools.pairwise(delays))
    assert delays[0] >= FIRST_DELAY_S and delays[-1] == LAST_DELAY_S == 10.0


def test_half_a_minute_of_readiness_forgives_what_was_before() -> None:
    policy = RestartPolicy()
    for _ in range(100):
        _die(policy)
    delay_s = _die(policy, ready_s=30.0)
    assert delay_s is not None and delay_s < 1.0
    assert _die(RestartPolicy(), ready_s=1e9) == FIRST_DELAY_S


def test_kills_of_a_worker_that_serves_in_between_do_not_add_up() -> None:
    """As where somebody kills workers at random, every few seconds, for hours."""
    policy = RestartPolicy()
    delays = [_die(policy, ready_s=RESET_EVERY_S) for _ in range(10_000)]
    assert set(delays) == {FIRST_DELAY_S}


def test_one_that_crashes_soon_after_each_start_waits_longer_each_time() -> None:
    policy = RestartPolicy()
    delays = [delay for _ in range(40) if (delay := _die(policy, ready_s=0.5)) is not None]
    assert all(later > earlier or later == LAST_DELAY_S for earlier, later in itertools.pairwise(delays))
    assert delays[-1] == LAST_DELAY_S


def test_jitter_is_upward_by_at_most_half() -> None:
    low, high = _die(RestartPolicy(), uniform=0.0), _die(RestartPolicy(), uniform=0.999)
    assert low is not None
    assert high is not None
    assert low < high <= 1.5 * low


def test_before_the_first_ready_patience_is_short() -> None:
    policy = RestartPolicy()
    delays = [_die(policy, started_up=False) for _ in range(STARTUP_FAILURES_MAX)]
    assert delays[-1] is None
    assert None not in delays[:-1]


def test_a_cluster_that_was_never_ready_does_not_try_wrong_settings_again() -> None:
    for exit_code in HOPELESS_EXITS:
        assert RestartPolicy().on_exit(ready_s=99.0, exit_code=exit_code, started_up=False, uniform=0.0) is None


def test_one_that_was_asked_to_end_has_not_failed() -> None:
    policy = RestartPolicy()
    found = {policy.on_exit(ready_s=0.0, exit_code=0, started_up=True, uniform=0.0) for _ in range(20)}
    assert found == {FIRST_DELAY_S} and policy.failures == 0
