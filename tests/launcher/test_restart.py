"""When a dead role is started again, and when it is given up."""

import itertools

from launcher.restart import (
    LAST_DELAY_S,
    QUICK_FAILURES_MAX,
    STABLE_AFTER_S,
    STARTUP_FAILURES_MAX,
    RestartPolicy,
)
from runtime.exits import HOPELESS_EXITS, HUNG_EXIT


def _die(policy: RestartPolicy, lived_s: float = 0.1, uniform: float = 0.0, started_up: bool = True) -> float | None:
    return policy.on_exit(lived_s=lived_s, exit_code=1, started_up=started_up, uniform=uniform)


def test_delays_double_then_the_role_is_given_up() -> None:
    policy = RestartPolicy()
    delays = [_die(policy) for _ in range(QUICK_FAILURES_MAX)]
    assert delays[-1] is None
    kept = [delay for delay in delays[:-1] if delay is not None]
    assert len(kept) == QUICK_FAILURES_MAX - 1
    assert all(later == 2 * earlier for earlier, later in itertools.pairwise(kept))


def test_a_life_long_enough_starts_the_count_anew() -> None:
    policy = RestartPolicy()
    first = _die(policy)
    for _ in range(20):
        assert _die(policy, lived_s=STABLE_AFTER_S) == first


def test_jitter_is_upward_by_at_most_half() -> None:
    low, high = _die(RestartPolicy(), uniform=0.0), _die(RestartPolicy(), uniform=0.999)
    assert low is not None
    assert high is not None
    assert low < high <= 1.5 * low <= 1.5 * LAST_DELAY_S


def test_before_the_first_ready_patience_is_short() -> None:
    policy = RestartPolicy()
    delays = [_die(policy, started_up=False) for _ in range(STARTUP_FAILURES_MAX)]
    assert delays[-1] is None
    assert None not in delays[:-1]


def test_wrong_settings_are_not_tried_again() -> None:
    for exit_code in HOPELESS_EXITS:
        assert RestartPolicy().on_exit(lived_s=99.0, exit_code=exit_code, started_up=True, uniform=0.0) is None


def test_a_worker_that_hung_is_started_again() -> None:
    assert RestartPolicy().on_exit(lived_s=1.0, exit_code=HUNG_EXIT, started_up=True, uniform=0.0) is not None
