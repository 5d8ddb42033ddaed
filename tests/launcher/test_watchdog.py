"""When a child that hangs is killed: by what it said and when, without a clock."""

from launcher.local.watchdog import WATCHDOG_S, Watchdog


def looked(dog: Watchdog, begin: float, end: float) -> float | None:
    """The first verdict of looks at every pause from `begin` to `end`."""
    now = begin
    while now <= end:
        if (silent_s := dog.silent_s(now)) is not None:
            return silent_s
        now += dog.look_every_s
    return None


def ready(timeout_s: float = 10.0) -> Watchdog:
    dog = Watchdog(timeout_s)
    dog.started(0.0)
    dog.heard("READY=1", 0.0)
    return dog


def test_silent_child_is_overdue() -> None:
    """A child that says nothing is overdue when its time is over."""
    dog = ready()
    assert looked(dog, 0.0, 10.0) is None
    silent_s = looked(dog, 10.0, 12.0)
    assert silent_s is not None and 10.0 < silent_s <= 11.0


def test_speaking_child_is_not_overdue() -> None:
    """A child that keeps sending its watchdog message is never overdue."""
    dog = ready()
    for second in range(0, 100, 3):
        dog.heard("WATCHDOG=1", float(second))
        assert looked(dog, float(second), second + 2.0) is None


def test_loading_and_stopping_are_not_timed() -> None:
    """A child that is loading or stopping is never overdue."""
    dog = Watchdog(10.0)
    dog.started(0.0)
    dog.heard("WATCHDOG=1", 0.0)
    assert looked(dog, 0.0, 1000.0) is None, "it is not ready"
    dog = ready()
    dog.heard("STOPPING=1", 1.0)
    assert looked(dog, 1.0, 1000.0) is None


def test_restart_resets_the_watchdog() -> None:
    """The watchdog begins anew with each incarnation of a child."""
    dog = ready()
    dog.heard("STOPPING=1", 1.0)
    dog.started(5.0)
    assert dog.ready_for_s(6.0) == 0.0 and looked(dog, 5.0, 100.0) is None
    dog.heard("READY=1", 100.0)
    dog.heard("READY=1", 103.0)
    assert dog.ready_for_s(105.0) == 5.0
    assert looked(dog, 103.0, 120.0) is not None


def test_own_pause_is_not_silence() -> None:
    """Time for which the watching process itself stood still does not count as silence."""
    dog = ready()
    assert looked(dog, 0.0, 5.0) is None
    assert looked(dog, 100.0, 110.0) is None
    assert looked(dog, 110.0, 112.0) is not None


def test_zero_time_disables_the_watchdog() -> None:
    """A watchdog time of zero turns the watchdog off."""
    assert ready(0.0).silent_s(1e9) is None


def test_every_role_has_a_watchdog() -> None:
    """Every role has a watchdog time of at least 10 s."""
    assert set(WATCHDOG_S) == {"coordinator", "gateway", "prefill", "decode", "mixed"}
    # Tests of faults stop processes for up to 4 s, and a heartbeat may be lost for 3.5 of them.
    assert all(timeout_s >= 10.0 for timeout_s in WATCHDOG_S.values())
