"""`crossdock policy compare`: goodput over what came, with an interval, beside a baseline."""

from launcher.admin.policy import compared
from proto.policy import ArmStatus, PolicyAnswer


def test_compare_counts_what_came() -> None:
    """A version that refuses half of what comes has half the goodput, and the baseline shows what is chance."""
    arms = (
        ArmStatus("active", 1000, 1000, 900, 1e6, 1e4),
        ArmStatus("baseline", 1000, 980, 890, 1e6, 1e4),
        ArmStatus("candidate", 1000, 500, 500, 1e5, 1e4),
    )
    table = compared(PolicyAnswer("", 1, 2, arms=arms), None)
    rows = {texts[0]: texts[1:] for texts, _ in table.rows}
    assert list(rows) == ["active", "baseline", "candidate"]
    assert [rows[arm][2] for arm in rows] == ["90.0%", "89.0%", "50.0%"]
    assert rows["candidate"][3] == "3.1%", "1.96 standard errors of half of a thousand"
