"""The test of the tests: each planted bug is found within a bounded number of seeds, and without one nothing is."""

import pytest

from tests.world import planted_flips, planted_service, planted_suffixes, planted_workers
from tests.world.run import run_seed

BUGS = planted_service.BUGS | planted_workers.BUGS | planted_suffixes.BUGS | planted_flips.BUGS

SEEDS = 400
"""Most are found within the first ten."""
FOUND_BY = {
    "what_was_cached_in_the_old_role_is_found_and_written_to": 27,
    "a_worker_that_changes_its_role_gets_more": 22,
    "two_leave_a_role_at_once": 121,
    "a_turn_that_is_not_answered_never_ends": 16,
    "one_block_more_counts_as_fetched": 114,
    "what_was_lent_is_never_given_back": 102,
    "what_is_fetched_is_sent_from_the_first_block_on": 102,
    "the_last_token_of_an_answer_counts_as_computed": 54,
    "a_released_suffix_frees_blocks_under_a_running_step": 128,
    "a_step_that_hangs_is_waited_for": 23,
    "nobody_looks_when_a_pair_may_be_tried_again": 126,
    "a_pair_that_was_left_out_is_never_tried_again": 39,
    "a_budget_once_spent_is_never_there_again": 113,
    "all_that_was_interrupted_comes_back_at_once": 113,
    "a_worker_that_is_drained_gets_more": 19,
    "a_cancel_forgets_the_decode_side": 55,
    "silence_after_a_lost_connection_is_waited_out": 26,
    "retries_have_no_bound": 113,
    "tokens_are_not_told_apart_by_index": 18,
    "a_gateway_names_what_was_never_an_answer": 501,
    "a_client_that_leaves_is_not_cancelled": 1012,
    "a_released_prompt_frees_what_is_being_fetched": 67,
    "the_end_of_a_session_frees_blocks_that_are_held": 103,
    "a_worker_changes_its_role_with_streams_on_it": 103,
    "a_worker_takes_no_more_suspects_once_one_was_tried_there": 2024,
    "a_worker_that_lost_its_coordinator_waits_for_ever_to_change": 130,
    "a_probe_without_a_verdict_is_never_over": 324,
    "a_process_that_was_stopped_takes_its_step_for_hung": 193,
    "blocks_count_as_free_when_a_release_is_sent": 188,
    "chunks_need_not_continue_what_is_computed": 77,
    "nobody_says_that_a_worker_is_drained": 58,
    "one_role_of_a_mixed_worker_goes_before_the_other": 758,
    "room_kept_for_a_request_outlives_it": 110,
    "tokens_of_any_attempt_are_taken": 116,
    "what_a_failed_step_has_left_is_kept": 1008,
}
"""Seeds to try first. Where one no longer finds its bug, the others are searched as well."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", BUGS)
def test_planted_bug_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each planted bug makes a seed fail within the searched range."""
    BUGS[name](monkeypatch)
    for seed in (FOUND_BY.get(name, 0), *range(SEEDS)):
        failure = run_seed(seed).failure
        if failure is not None:
            assert isinstance(failure, AssertionError | KeyError | IndexError), repr(failure)
            return
    raise AssertionError(f"{name} goes unnoticed in {SEEDS} seeds")


def test_planted_bugs_are_many_and_described() -> None:
    """There are at least 20 planted bugs, each with a docstring."""
    assert len(BUGS) >= 20 and all(patch.__doc__ for patch in BUGS.values())
    assert FOUND_BY.keys() <= BUGS.keys()
