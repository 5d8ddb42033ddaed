"""The keeper of streams, event by event: tokens, resumes, rejections, ends."""

import pytest

from gateway.streams.types import (
    Admitted,
    Deliver,
    Ended,
    FailKind,
    Finish,
    LinkDown,
    LinkUp,
    Noticed,
    Open,
    SendCancel,
    SendSubmit,
    TokensReceived,
    Why,
)
from proto.errors import CancelReason, FinishReason, Interrupt, Reject
from proto.messages import Accepted, Cancel, Interrupted, Rejected, TokenItem
from proto.sampling import Sampling
from tests.gateway.keeper_world import LIMITS, Bench, cancels, failures, submits, texts, work


def test_stream_runs_from_submit_to_end() -> None:
    """A stream is submitted, accepted, delivered and ended, and leaves nothing behind."""
    bench = Bench()
    assert submits(bench.open()) == [("r", 1, [1, 2, 3], 0, 1, 0)]
    assert bench.do(Accepted("r", 1)) == [Admitted("r")]
    assert texts(bench.tokens(0, 5, 6)) == ["5 6 "]
    last = bench.tokens(2, 7, 0, finish=FinishReason.STOP)
    assert last == [Deliver("r", 0, "7 ", (7, 0), (), Finish.STOP), Ended("r")]
    assert bench.keeper.next_deadline() is None
    assert not bench.keeper.streams
    assert not bench.keeper.submissions


def test_tokens_may_overtake_acceptance() -> None:
    """Tokens that come before the acceptance admit the stream."""
    bench = Bench()
    bench.open()
    assert bench.tokens(0, 5)[0] == Admitted("r")
    assert bench.do(Accepted("r", 1)) == []


def test_duplicate_tokens_are_dropped() -> None:
    """Tokens that come twice are delivered once, and overlaps are cut."""
    bench = Bench()
    bench.open()
    assert texts(bench.tokens(0, 5, 6)) == ["5 6 "]
    assert texts(bench.tokens(0, 5, 6)) == []
    assert texts(bench.tokens(1, 6, 7)) == ["7 "]


def test_gap_in_tokens_resumes_the_stream() -> None:
    """A gap in the tokens ends the attempt, and the next continues after those that came."""
    bench = Bench()
    bench.open()
    bench.tokens(0, 5, 6)
    assert cancels(bench.tokens(3, 8)) == [("r", 1, CancelReason.ABANDONED)]
    assert texts(bench.tokens(4, 9)) == []
    assert submits(bench.wait()) == [("r", 2, [1, 2, 3, 5, 6], 2, 1, 0)]
    assert texts(bench.tokens(2, 7, attempt=1)) == []
    assert texts(bench.tokens(2, 7, attempt=2)) == ["7 "]


def test_tokens_wait_for_the_first_one() -> None:
    """Tokens that overtake the first token are delivered after it."""
    bench = Bench()
    bench.open(choices=2)
    assert bench.tokens(1, 6) == bench.tokens(2, 7) == bench.tokens(1, 16, choice=1) == []
    assert texts(bench.tokens(0, 5, decoder=0)) == ["5 ", "6 ", "7 "]
    assert texts(bench.tokens(0, 15, choice=1, decoder=0)) == ["15 ", "16 "]
    assert texts(bench.tokens(3, 8)) == ["8 "]
    assert bench.wait() == [], "nothing waits for a first token any more"


def test_second_gap_breaks_resumed_attempt() -> None:
    """Tokens wait for the first one of a resumed attempt, too, and a second gap ends it."""
    bench = Bench()
    bench.open()
    bench.tokens(0, 5, decoder=0)
    bench.interrupt()
    bench.wait()
    assert bench.tokens(2, 7, attempt=2) == bench.tokens(4, 9, attempt=2) == []
    late = bench.tokens(1, 6, attempt=2, decoder=0)
    assert texts(late) == ["6 ", "7 "] and cancels(late) == [("r", 2, CancelReason.ABANDONED)]
    assert submits(bench.wait()) == [("r", 3, [1, 2, 3, 5, 6, 7], 3, 1, 0)]


@pytest.mark.parametrize("link", [True, False])
def test_missing_first_token_breaks_attempt(link: bool) -> None:
    """The attempt is broken if its first token does not come soon after later ones."""
    bench = Bench()
    bench.open()
    bench.do(Accepted("r", 1))
    bench.tokens(1, 6)
    if not link:
        bench.do(LinkDown())
    opened = bench.now
    noticed = [action.why for action in bench.wait() if isinstance(action, Noticed)]
    assert noticed == [Why.BROKEN_STREAM] and bench.now == opened + LIMITS.first_token_wait_s
    if not link:
        assert submits(bench.do(LinkUp(7))) == []
    assert submits(bench.wait()) == [("r", 2, [1, 2, 3], 0, 1, 0)]


def test_missing_logprobs_break_the_attempt() -> None:
    """Tokens without the log-probabilities that were asked for end the attempt."""
    bench = Bench()
    sampling = Sampling(max_tokens=5, logprobs=2)
    bench.do(Open(work(prompt=(1,), sampling=sampling)))
    assert cancels(bench.tokens(0, 5)) == [("r", 1, CancelReason.ABANDONED)]


def test_late_tokens_count_until_resume() -> None:
    """Tokens of an interrupted attempt are delivered until the resume is sent."""
    bench = Bench()
    bench.open()
    bench.tokens(0, 5)
    assert submits(bench.interrupt()) == []
    assert texts(bench.tokens(1, 6)) == ["6 "]
    assert submits(bench.wait()) == [("r", 2, [1, 2, 3, 5, 6], 2, 1, 0)]


def test_late_end_saves_the_resume() -> None:
    """The end of an interrupted attempt ends the stream if it comes before the resume is sent."""
    bench = Bench()
    bench.open()
    bench.tokens(0, 5)
    bench.interrupt()
    last = bench.tokens(1, 0, finish=FinishReason.STOP)
    assert last[-1] == Ended("r")
    assert cancels(last) == [("r", 1, CancelReason.STOP_STRING)]  # or the coordinator would wait for the resume


def test_resumes_name_the_revision_of_tokens() -> None:
    """Once a stream has tokens, each of its choices is resumed in the revision that they came from, and not before."""
    bench = Bench()
    bench.open(choices=2)
    bench.interrupt()
    assert [action.submit.pool for action in bench.wait() if isinstance(action, SendSubmit)] == [""]
    for choice in (0, 1):
        item = TokenItem("r", 2, choice, 0, (5,), None)
        bench.do(TokensReceived((item,), 0, "m@v2"))
    bench.interrupt(attempt=2)
    assert [action.submit.pool for action in bench.wait() if isinstance(action, SendSubmit)] == ["m@v2", "m@v2"]


def test_resumes_are_bounded_and_spaced() -> None:
    """Resumes come after growing pauses, and the stream fails after the last allowed one."""
    bench = Bench()
    bench.open()
    pauses = []
    for attempt in range(1, LIMITS.attempts_max):
        before = bench.now
        assert failures(bench.interrupt(attempt=attempt)) == []
        assert submits(bench.wait()) == [("r", attempt + 1, [1, 2, 3], 0, 1, 0)]
        pauses.append(bench.now - before)
    assert all(0.05 * 2**k <= pause <= 0.15 * 2**k + 1e-6 for k, pause in enumerate(pauses)), pauses
    assert failures(bench.interrupt(attempt=LIMITS.attempts_max)) == [FailKind.INTERRUPTED]


def test_attempts_with_progress_are_no_tries() -> None:
    """Attempts that bring enough tokens do not count towards the limit of tries."""
    bench = Bench()
    bench.open(max_tokens=1000)
    enough = LIMITS.progress_tokens
    for attempt in range(1, 3 * LIMITS.attempts_max):
        for index in range((attempt - 1) * enough, attempt * enough):
            bench.tokens(index, 5, attempt=attempt)
        assert failures(bench.interrupt(attempt=attempt)) == []
        assert len(submits(bench.wait())) == 1
    for attempt in range(3 * LIMITS.attempts_max, 4 * LIMITS.attempts_max - 1):
        bench.tokens((3 * LIMITS.attempts_max - 1) * enough + attempt - 3 * LIMITS.attempts_max, 5, attempt=attempt)
        assert failures(bench.interrupt(attempt=attempt)) == []
        bench.wait()
    assert failures(bench.interrupt(attempt=4 * LIMITS.attempts_max - 1)) == [FailKind.INTERRUPTED]


def test_lost_hosts_never_use_up_attempts() -> None:
    """A stream is interrupted any number of times, seconds apart, though each attempt brings few tokens or none."""
    bench = Bench()
    bench.open()
    for attempt in range(1, 4 * LIMITS.attempts_max):
        assert failures(bench.interrupt(attempt=attempt)) == []
        assert len(submits(bench.wait())) == 1
        bench.now += 6.0
    for attempt in range(4 * LIMITS.attempts_max, 5 * LIMITS.attempts_max):
        assert failures(bench.interrupt(attempt=attempt)) == []
        bench.wait()
    assert failures(bench.interrupt(attempt=5 * LIMITS.attempts_max)) == [FailKind.INTERRUPTED]


def test_begun_choices_resume_one_by_one() -> None:
    """Choices of a request that has begun resume in submissions of their own."""
    bench = Bench()
    bench.open(choices=3)
    bench.tokens(0, 5, 6, choice=0)
    bench.tokens(0, 0, choice=1, finish=FinishReason.STOP)
    assert bench.interrupt() == []
    resumed = bench.wait()
    assert cancels(resumed) == [("r", 1, CancelReason.ABANDONED)]
    assert submits(resumed) == [("r.c0", 2, [1, 2, 3, 5, 6], 2, 1, 0), ("r.c2", 2, [1, 2, 3], 0, 1, 2)]
    assert texts(bench.tokens(2, 7, name="r.c0", attempt=2, choice=2)) == []
    bench.tokens(2, 0, name="r.c0", attempt=2, choice=0, finish=FinishReason.STOP)
    last = bench.tokens(0, 0, name="r.c2", attempt=2, choice=2, finish=FinishReason.STOP)
    assert last[-1] == Ended("r")


def test_unbegun_choices_resume_together() -> None:
    """Choices resume in one submission if none has a token yet."""
    bench = Bench()
    bench.open(choices=3)
    bench.interrupt()
    assert submits(bench.wait()) == [("r", 2, [1, 2, 3], 0, 3, 0)]


def test_stop_string_ends_and_cancels() -> None:
    """A stop string ends the choice, and the running attempt is cancelled."""
    bench = Bench()
    bench.open(stops=("6 ",))
    last = bench.tokens(0, 5, 6, 7)
    assert last[1:] == [Deliver("r", 0, "5 ", (5, 6), (), Finish.STOP, "6 "), last[2], Ended("r")]
    assert cancels(last) == [("r", 1, CancelReason.STOP_STRING)]
    assert texts(bench.tokens(3, 8)) == []


def test_other_choices_outlive_a_stop_string() -> None:
    """Other choices go on after a stop string, and the cancel is sent when all have ended."""
    bench = Bench()
    bench.open(choices=2, stops=("6 ",))
    assert cancels(bench.tokens(0, 6, choice=0)) == []
    assert texts(bench.tokens(1, 9, choice=0)) == []
    assert texts(bench.tokens(0, 5, choice=1)) == ["5 "]
    last = bench.tokens(1, 0, choice=1, finish=FinishReason.STOP)
    assert cancels(last) == [("r", 1, CancelReason.STOP_STRING)]
    assert last[-1] == Ended("r")


def test_ended_work_is_not_cancelled() -> None:
    """No cancel is sent for a stop string if the workers have ended by themselves."""
    bench = Bench()
    bench.open(stops=("6 ",))
    assert cancels(bench.tokens(0, 5, 6, finish=FinishReason.LENGTH)) == []


def test_tokens_beyond_the_limit_are_cut() -> None:
    """Tokens beyond max_tokens are not delivered, and the attempt is cancelled."""
    bench = Bench()
    bench.open(max_tokens=2)
    last = bench.tokens(0, 5, 6, 7)
    assert last[1] == Deliver("r", 0, "5 6 ", (5, 6), (), Finish.LENGTH)
    assert cancels(last)


@pytest.mark.parametrize("reason", [Reject.QUEUE_FULL, Reject.NO_CAPACITY, Reject.TOO_LONG, Reject.SHUTTING_DOWN])
def test_new_request_is_rejected_at_once(reason: Reject) -> None:
    """The rejection of a new request ends its stream at once."""
    bench = Bench()
    bench.open()
    rejection = Rejected("r", 1, reason, "because", 3.0)
    (ended,) = bench.do(rejection)
    assert isinstance(ended, Ended)
    assert ended.failure
    assert ended.failure.reject == rejection


def test_resume_retries_on_a_full_queue() -> None:
    """A resume that meets a full queue is sent again for a bounded time."""
    bench = Bench()
    bench.open()
    bench.interrupt()
    bench.wait()
    started, tries = bench.now, 0
    while not failures(bench.do(Rejected("r", 2, Reject.QUEUE_FULL, "full", 9.0))):
        assert submits(bench.wait()) == [("r", 2, [1, 2, 3], 0, 1, 0)]
        tries += 1
    assert tries > 5
    assert LIMITS.resume_wait_s - 1 <= bench.now - started <= LIMITS.resume_wait_s + 4


@pytest.mark.parametrize("accepted", [False, True])
def test_rejected_resume_cancels_the_request(accepted: bool) -> None:
    """The coordinator may be another one by now, with an open row of it and nobody else to say how far it got."""
    bench = Bench()
    bench.open()
    if accepted:
        bench.tokens(0, 5, 6)
        bench.interrupt()
        bench.wait()
    end = bench.do(Rejected("r", 1 + accepted, Reject.TOO_LONG, "too long"))
    assert failures(end) == [FailKind.REJECTED]
    said = [action.cancel for action in end if isinstance(action, SendCancel)]
    assert said == ([Cancel("r", 2, CancelReason.ABANDONED, 2)] if accepted else [])


def test_late_coordinator_answers_are_ignored() -> None:
    """The coordinator's answers about other attempts or unknown requests change nothing."""
    bench = Bench()
    bench.open()
    bench.tokens(0, 5)
    bench.interrupt()
    bench.wait()
    for late in (
        Accepted("r", 1),
        Rejected("r", 1, Reject.QUEUE_FULL, ""),
        Interrupted("r", 1, Interrupt.PREFILL_LOST),
        Accepted("other", 1),
        Interrupted("r", 3, Interrupt.PREFILL_LOST),
    ):
        assert bench.do(late) == []


def drain(bench: Bench, attempt: int) -> list[tuple[str, int, list[int], int, int, int]]:
    return submits(bench.do(Interrupted("r", attempt, Interrupt.DRAINED, "decode-0 is drained")))


def test_drained_stream_resumes_without_a_try() -> None:
    """A stream that a drain cuts short resumes at once, and the attempt does not count as a try."""
    bench = Bench()
    bench.open()
    bench.tokens(0, 5)
    for attempt in range(1, 40):
        assert drain(bench, attempt) == [("r", attempt + 1, [1, 2, 3, 5], 1, 1, 0)]
        assert drain(bench, attempt) == [], "said twice, it counts once"
    assert bench.keeper.submissions["r"].message(bench.now).submit.drained_attempts == 39
    for attempt in range(40, 40 + bench.keeper.limits.attempts_max - 1):
        bench.do(Interrupted("r", attempt, Interrupt.DECODE_LOST))
        assert submits(bench.wait()) == [("r", attempt + 1, [1, 2, 3, 5], 1, 1, 0)]
    failed = bench.do(Interrupted("r", 40 + bench.keeper.limits.attempts_max - 1, Interrupt.DECODE_LOST))
    assert failures(failed) == [FailKind.INTERRUPTED]


def test_drained_choices_resume_one_by_one() -> None:
    """Choices that a drain cuts short resume at once in submissions of their own."""
    bench = Bench()
    bench.open(choices=2)
    bench.tokens(0, 5, choice=0)
    assert drain(bench, 1) == [("r.c0", 2, [1, 2, 3, 5], 1, 1, 0), ("r.c1", 2, [1, 2, 3], 0, 1, 1)]
    assert {submission.uncounted for submission in bench.keeper.submissions.values()} == {1}


def test_expired_resume_fails_the_stream() -> None:
    """A resumed stream fails if the coordinator says that it waited too long in the queue."""
    bench = Bench()
    bench.open()
    bench.tokens(0, 5, 6)
    bench.interrupt()
    bench.wait()
    end = bench.do(Rejected("r", 2, Reject.EXPIRED, "waited 600 s in the queue"))
    assert failures(end) == [FailKind.REJECTED]
