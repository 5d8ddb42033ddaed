"""What a decode worker tells the coordinator of its batch."""

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from decode_worker.batch import StepOutcome
from decode_worker.progress import REPORT_S, ProgressReport, shortage
from engine.kv.allocator import OutOfBlocks
from proto.progress import DecodeProgress, Joined
from tests.workers.test_batch import World, reserve

HORIZON = 8


def test_progress_names_each_join_once() -> None:
    """Each attempt is reported once, with the step after which it joined, and not with every step."""
    w = World()
    report = ProgressReport(w.table)
    w.run(reserve("a", 6, max_tokens=50))
    w.batch.plan(w.stuck.append)
    assert report.due(1.0) == DecodeProgress(1, 60 - 2, 0, (Joined("a", 1, 0),))
    w.run(reserve("b", 3, choices=2, max_tokens=50))
    w.step()
    w.batch.plan(w.stuck.append)
    assert report.due(1.0 + REPORT_S / 2) is None, "not with every step"
    w.step()
    w.run(reserve("c", 3, max_tokens=50))
    w.batch.plan(w.stuck.append)
    said = report.due(1.0 + REPORT_S)
    assert said is not None
    assert (said.steps, said.joined) == (3, (Joined("b", 1, 1), Joined("c", 1, 2)))
    w.step()
    w.batch.plan(w.stuck.append)
    said = report.due(2.0)
    assert said is not None and said.joined == () and said.free_blocks == w.table.allocator.free_count


def test_progress_times_consecutive_steps() -> None:
    """Progress reports time only steps that follow each other directly, not those after a pause."""
    w = World()
    report = ProgressReport(w.table)
    w.run(reserve("a", 6, max_tokens=50))
    w.batch.plan(w.stuck.append)
    report.stepped(StepOutcome(1, 7), 1.0)  # nothing is known of when it began
    report.stepped(StepOutcome(1, 8), 1.02)
    report.stepped(StepOutcome(2, 20), 1.05)
    said = report.due(1.05)
    assert said is not None
    assert (said.timed_steps, said.timed_sequences, said.timed_kv_tokens) == (2, 3, 28)
    assert 49.9 < said.timed_ms < 50.1
    report.paused()
    report.stepped(StepOutcome(1, 9), 9.0)
    said = report.due(9.0)
    assert said is not None and said.timed_steps == 0 and said.timed_ms == 0.0, "said once; and a pause is no step"
    w.batch.abandon()
    report.stepped(StepOutcome(1, 9), 9.1)  # nothing runs any more
    report.stepped(StepOutcome(1, 9), 20.0)
    said = report.due(20.0)
    assert said is not None and said.timed_steps == 1 and 99 < said.timed_ms < 101


def test_step_reports_sequences_and_kv_read() -> None:
    w = World()
    w.run(reserve("a", 6, max_tokens=50))
    w.run(reserve("b", 3, max_tokens=50))
    plan = w.batch.plan(w.stuck.append)
    assert plan is not None
    outcome = w.batch.apply([(1, None)] * 2)
    assert (outcome.sequences, outcome.kv_tokens) == (2, 7 + 4)


def test_expected_prompt_counts_its_blocks() -> None:
    """A reservation counts with all blocks of its prompt in the shortage."""
    w = World(pool=5)
    w.run(reserve("a", 4, max_tokens=2))
    w.batch.plan(w.stuck.append)
    w.table.reserve(reserve("b", 12))
    assert shortage(w.table, HORIZON) == 0
    w.table.reserve(reserve("c", 5))
    assert shortage(w.table, HORIZON) == 2


@settings(max_examples=300, deadline=None)
@given(
    st.integers(4, 40),
    st.lists(st.tuples(st.integers(1, 12), st.integers(2, 20), st.sampled_from([1, 1, 1, 2])), min_size=1, max_size=8),
)
def test_shortage_is_predicted_exactly(pool: int, attempts: list[tuple[int, int, int]]) -> None:
    """A shortage is predicted if and only if a sequence would find no block within the horizon."""
    w = World(pool=pool)
    try:
        for number, (tokens, max_tokens, choices) in enumerate(attempts):
            w.run(reserve(f"r{number}", tokens, max_tokens=max_tokens, choices=choices))
            w.step()
    except (AssertionError, OutOfBlocks):  # no block for the next prompt
        assume(False)
    w.batch.plan(w.stuck.append)
    assume(not w.stuck and w.batch.in_flight)
    missing = shortage(w.table, HORIZON)
    for _ in range(HORIZON + 1):
        w.step()
    if missing == 0:
        assert not w.stuck
    elif all(choices == 1 for _, _, choices in attempts):
        # Blocks that choices share come back with the last of them; the forecast leaves them out.
        assert w.stuck
