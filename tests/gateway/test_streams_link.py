"""The keeper of streams without a link to the coordinator, with a new one, with leaving clients, and over time."""

from dataclasses import replace

import pytest

from gateway.streams.final_messages import AGAIN_S, LastWords
from gateway.streams.keeper import StreamKeeper
from gateway.streams.types import ClientGone, Drain, FailKind, LinkDown, LinkUp, SendCancel, Shutdown, Tick, WorkerDown
from proto.errors import CancelReason, FinishReason, Interrupt, Reject
from proto.messages import Accepted, Cancel, Interrupted, Rejected
from tests.gateway.keeper_world import LIMITS, Bench, cancels, failures, submits, texts


def test_new_requests_wait_for_the_link() -> None:
    """New requests wait a bounded time for the link and then fail as unreachable."""
    bench = Bench(link=False)
    assert bench.open() == []
    bench.now += 9
    assert submits(bench.do(LinkUp(7))) == [("r", 1, [1, 2, 3], 0, 1, 0)]
    bench = Bench(link=False)
    bench.open()
    assert failures(bench.wait()) == [FailKind.UNREACHABLE]
    assert bench.now == 110


@pytest.mark.parametrize("link", [True, False])
def test_number_of_streams_is_bounded(link: bool) -> None:
    """A stream beyond the limit fails as overloaded, with a link or without."""
    bench = Bench(link=link)
    assert [failures(bench.open(name)) for name in "abcde"] == [[], [], [], [], [FailKind.OVERLOADED]]


def test_waiting_requests_also_await_workers() -> None:
    """After a restart of the coordinator the workers may come back a moment after the gateway."""
    bench = Bench(link=False)
    bench.open()
    bench.now += 1
    bench.do(LinkUp(7))
    assert bench.do(Rejected("r", 1, Reject.UNKNOWN_MODEL, "no worker")) == []
    assert submits(bench.wait()) == [("r", 1, [1, 2, 3], 0, 1, 0)]
    bench.now = 111
    assert failures(bench.do(Rejected("r", 1, Reject.NO_CAPACITY, "no worker"))) == [FailKind.REJECTED]


def test_unanswered_submission_is_sent_again() -> None:
    """A submission without an answer is cancelled and sent as a new attempt when the link is back."""
    bench = Bench()
    bench.open()
    assert bench.do(LinkDown()) == []
    up = bench.do(LinkUp(7))
    assert cancels(up) == [("r", 1, CancelReason.ABANDONED)], "it may have arrived, and run"
    assert submits(up) == [("r", 2, [1, 2, 3], 0, 1, 0)]


def test_unanswered_submission_waits_its_turn() -> None:
    """Its first attempt may have been among those that the loss of the link ended."""
    bench = Bench()
    bench.open()
    bench.do(LinkDown())
    bench.do(LinkUp(7))
    assert bench.do(Rejected("r", 2, Reject.RETRY_BUDGET, "too many", 5.0)) == []
    assert submits(bench.wait()) == [("r", 2, [1, 2, 3], 0, 1, 0)]
    bench.now += LIMITS.link_wait_s
    assert failures(bench.do(Rejected("r", 2, Reject.RETRY_BUDGET, "too many", 5.0))) == [FailKind.REJECTED]


def test_unanswered_submission_wait_is_bounded() -> None:
    """A submission without an answer fails if the link is not back after a bounded time."""
    bench = Bench()
    bench.open()
    bench.do(LinkDown())
    bench.now += LIMITS.link_wait_s + 1
    assert failures(bench.do(Tick())) == [FailKind.UNREACHABLE]


def test_new_coordinator_gets_time_to_settle() -> None:
    """New requests wait a moment for the workers of a coordinator that has just started."""
    bench = Bench()
    bench.keeper = StreamKeeper(replace(LIMITS, settle_s=3))
    bench.do(LinkUp(7))
    bench.open()
    began = bench.now
    assert bench.do(Rejected("r", 1, Reject.NO_CAPACITY, "no worker", retry_after_s=5)) == []
    assert submits(bench.wait()) == [("r", 1, [1, 2, 3], 0, 1, 0)]
    assert bench.now - began < 0.5, "they are on their way: it asks again soon"
    assert failures(bench.do(Rejected("r", 1, Reject.QUEUE_FULL, "full"))) == [FailKind.REJECTED]
    bench.open("late")
    bench.now += 4
    assert failures(bench.do(Rejected("late", 1, Reject.NO_CAPACITY, "no worker"))) == [FailKind.REJECTED]


def test_returning_link_costs_no_try() -> None:
    """Attempts that end with the link do not count towards the limit of tries."""
    bench = Bench()
    bench.open()
    for coordinator in range(7, 7 + 4 * LIMITS.attempts_max):
        bench.do(LinkDown())
        assert failures(bench.do(LinkUp(coordinator))) == []
        bench.wait()
        bench.do(Accepted("r", bench.keeper.submissions["r"].attempt))
    submission = bench.keeper.submissions["r"]
    assert submission.attempt > 2 * LIMITS.attempts_max and submission.tries == 1
    assert submission.message(bench.now).submit.drained_attempts == submission.attempt - 1


def test_stream_silent_after_worker_loss_resumes() -> None:
    """A stream that stays silent after its worker's connection ended is resumed."""
    bench = Bench()
    for name in ("dead", "alive"):
        bench.open(name)
        bench.do(Accepted(name, 1))
        bench.tokens(0, 5, name=name)
    bench.do(WorkerDown(20))
    bench.tokens(1, 6, name="alive")
    bench.now += LIMITS.stall_s + 1
    assert cancels(bench.do(Tick())) == [("dead", 1, CancelReason.ABANDONED)]
    assert submits(bench.wait()) == [("dead", 2, [1, 2, 3, 5], 1, 1, 0)]


def test_second_loss_does_not_delay_resume() -> None:
    """A second lost connection does not put off the resume of a silent stream."""
    bench = Bench()
    bench.open()
    bench.do(Accepted("r", 1))
    bench.tokens(0, 5)
    bench.do(WorkerDown(20))
    bench.now += LIMITS.stall_s - 1
    bench.do(WorkerDown(20))
    bench.now += 2
    assert cancels(bench.do(Tick())) == [("r", 1, CancelReason.ABANDONED)]


def test_stream_without_tokens_asks_coordinator() -> None:
    """It may as well be waiting for its turn, and then a new attempt would put it at the end of the queue."""
    bench = Bench()
    bench.open()
    bench.do(Accepted("r", 1))
    bench.do(WorkerDown(20))
    for _ in range(2):
        bench.now += LIMITS.stall_s + 1
        asked = bench.do(Tick())
        assert submits(asked) == [("r", 1, [1, 2, 3], 0, 1, 0)] and not cancels(asked)
        bench.do(Accepted("r", 1))
    bench.do(Interrupted("r", 1, Interrupt.GATEWAY_LINK_LOST))
    assert submits(bench.wait()) == [("r", 2, [1, 2, 3], 0, 1, 0)]
    bench.tokens(0, 5, attempt=2)
    bench.now += LIMITS.stall_s + 1
    asked = bench.do(Tick())
    assert submits(asked) == [("r", 2, [1, 2, 3, 5], 1, 1, 0)] and not cancels(asked), "nothing speaks against it"


def test_streams_survive_a_new_coordinator() -> None:
    """Running streams go on without the link and under a new coordinator; queued ones are resumed."""
    bench = Bench()
    bench.open("runs")
    bench.tokens(0, 5, name="runs")
    bench.open("queued")
    bench.do(Accepted("queued", 1))
    bench.do(LinkDown())
    assert texts(bench.tokens(1, 6, name="runs")) == ["6 "]
    up = bench.do(LinkUp(8))
    assert cancels(up) == [("queued", 1, CancelReason.ABANDONED)]
    assert submits(bench.wait()) == [("queued", 2, [1, 2, 3], 0, 1, 0)]
    for index in range(2, 5):
        bench.now += LIMITS.stall_s - 1
        assert texts(bench.tokens(index, 7, name="runs")) == ["7 "] and cancels(bench.do(Tick())) == []


def test_silence_under_new_coordinator_resumes() -> None:
    """A stream that stays silent under a new coordinator is resumed after the stall limit."""
    bench = Bench()
    bench.open()
    bench.tokens(0, 5)
    bench.do(LinkDown())
    bench.do(LinkUp(8))
    assert cancels(bench.wait()) == [("r", 1, CancelReason.ABANDONED)]
    assert bench.now == 100 + LIMITS.stall_s
    assert submits(bench.wait()) == [("r", 2, [1, 2, 3, 5], 1, 1, 0)]


FIRST = 0
"""The decoder of first tokens: a prefill worker sends them."""


@pytest.mark.parametrize("decoder", [20, FIRST])
@pytest.mark.parametrize("order", ["worker, coordinator", "coordinator, worker", "worker after the restart"])
def test_stream_lost_with_coordinator_resumes(order: str, decoder: int) -> None:
    """Nobody can tell: not the coordinator that knew of it, nor the next, which does not."""
    bench = Bench()
    bench.open()
    bench.tokens(0, 5, decoder=decoder)
    for what in order.split(", "):
        bench.do(WorkerDown(20) if what == "worker" else LinkDown())
        bench.now += LIMITS.gone_s
    resumed = bench.do(LinkUp(8))
    back_at = bench.now
    if order == "worker after the restart":
        bench.do(WorkerDown(20))
        back_at += LIMITS.gone_s
    resumed += bench.wait()
    assert cancels(resumed) == [("r", 1, CancelReason.ABANDONED)] and bench.now == back_at
    assert submits(bench.wait()) == [("r", 2, [1, 2, 3, 5], 1, 1, 0)]


def test_stream_of_live_worker_is_kept() -> None:
    """A stream is not taken for lost when another worker is, or when its own connects again."""
    bench = Bench()
    bench.open()
    bench.tokens(0, 5)
    bench.do(LinkDown())
    bench.do(WorkerDown(21))
    bench.do(LinkUp(8))
    bench.now += LIMITS.stall_s - 1
    assert bench.do(Tick()) == []
    # A connection that was broken only: its worker connects again, and goes on.
    bench.do(WorkerDown(20))
    bench.tokens(1, 6)
    bench.now += LIMITS.gone_s
    assert bench.do(Tick()) == []


def test_coordinator_is_asked_before_giving_up() -> None:
    """A coordinator that knows of a stream is asked about it before the attempt is abandoned."""
    bench = Bench()
    bench.open()
    bench.tokens(0, 5)
    bench.do(LinkDown())
    bench.do(LinkUp(8))
    bench.interrupt()
    bench.wait()
    bench.tokens(1, 6, attempt=2)
    cut_at = bench.now
    bench.do(WorkerDown(20))
    asked = bench.wait()
    assert submits(asked) == [("r", 2, [1, 2, 3, 5, 6], 2, 1, 0)] and not cancels(asked)
    assert bench.now == cut_at + LIMITS.gone_s
    bench.do(Accepted("r", 2))
    assert cancels(bench.wait()) == [("r", 2, CancelReason.ABANDONED)]
    assert bench.now == cut_at + LIMITS.stall_s


def test_end_lost_with_connection_is_resumed() -> None:
    """Its worker was stopped for as long as the gateway waits, and not for as long as the coordinator does: it went on, and
    all that was left of the stream was sent where nobody read any more."""
    bench = Bench()
    bench.open()
    bench.do(Accepted("r", 1))
    bench.tokens(0, 5)
    bench.do(WorkerDown(20))
    assert submits(bench.wait()) == [("r", 1, [1, 2, 3, 5], 1, 1, 0)]
    bench.do(Interrupted("r", 1, Interrupt.GATEWAY_LINK_LOST))
    assert submits(bench.wait()) == [("r", 2, [1, 2, 3, 5], 1, 1, 0)]
    assert bench.now < 100 + LIMITS.gone_s + 1, "not only when it is taken for lost"


def test_unaffected_streams_are_not_asked_about() -> None:
    """The coordinator is not asked about streams heard again or served by another worker."""
    bench = Bench()
    for name in ("back", "elsewhere", "waits"):
        bench.open(name)
        bench.do(Accepted(name, 1))
    bench.tokens(0, 5, name="back")
    bench.tokens(0, 5, name="elsewhere", decoder=21)
    bench.do(WorkerDown(20))
    bench.tokens(1, 6, name="back")
    bench.now += LIMITS.stall_s - 0.1
    assert submits(bench.do(Tick())) == []


def test_same_coordinator_resumes_at_once() -> None:
    """A stream is resumed soon, not after the stall limit, if the same coordinator comes back."""
    bench = Bench()
    bench.open()
    bench.tokens(0, 5)
    bench.do(LinkDown())
    bench.do(LinkUp(7))
    assert submits(bench.wait()) == [("r", 2, [1, 2, 3, 5], 1, 1, 0)]
    assert bench.now < 101


def test_cancels_are_sent_when_link_returns() -> None:
    """A cancel made while the link is down is sent when it is back."""
    bench = Bench()
    bench.open()
    bench.do(Accepted("r", 1))
    bench.do(LinkDown())
    assert bench.do(ClientGone("r")) == []
    assert cancels(bench.do(LinkUp(8))) == [("r", 1, CancelReason.DISCONNECTED)]


def test_last_words_repeated_after_link_loss() -> None:
    """With how far each answer had got: its worker may be lost, too."""
    bench = Bench()
    for name in ("early", "left", "resumed", "whole"):
        bench.open(name, choices=2 if name == "left" else 1)
    bench.tokens(0, 5, 6, name="early", finish=FinishReason.STOP)
    bench.now += AGAIN_S + 1
    bench.tokens(0, 5, name="left", choice=0)
    bench.tokens(0, 5, 6, name="left", choice=1)
    for name in ("resumed", "whole"):
        bench.tokens(0, 5, name=name)
    bench.do(ClientGone("left"))
    bench.do(LinkDown())
    bench.tokens(1, 6, 7, name="whole", finish=FinishReason.STOP)
    for incarnation in (8, 9, 10):
        said = {action.cancel for action in bench.do(LinkUp(incarnation)) if isinstance(action, SendCancel)}
        left = Cancel("left", 1, CancelReason.DISCONNECTED, 3)
        assert said == {left, Cancel("whole", 1, CancelReason.ANSWERED, 3)}, "each may fall before it has them on disk"
        bench.now += AGAIN_S - 1
        bench.tokens(0, 5, name="resumed")
        bench.do(LinkDown())
    bench.now += 1
    bench.do(LinkUp(11))
    bench.now += AGAIN_S + 1
    bench.do(LinkDown())
    assert not [c for c in cancels(bench.do(LinkUp(12))) if c[0] != "resumed"], "it has had time to"


def test_last_words_are_kept_briefly() -> None:
    """A gateway does not grow with the number of its requests; while there is no coordinator, all since are kept."""
    words = LastWords(10)
    for second in range(200):
        words.add(Cancel(f"r{second}", 1, CancelReason.ANSWERED, 1), float(20 * second))
        assert len(words._words) <= 4
    words.lost(4000.0)
    for number in range(3):
        words.add(Cancel(f"late{number}", 1, CancelReason.ANSWERED, 1), 5000.0 + number)
    assert len(words._words) == 6 and words.about("r197") and not words.about("r196")
    assert [word.request_id for word in words.again(5010.0)] == ["late0", "late1", "late2"]
    for number in range(20):
        words.add(Cancel(f"last{number}", 1, CancelReason.ANSWERED, 1), 5020.0)
    assert len(words._words) == 10, "and never more than so many"


def test_abandoned_attempt_is_not_repeated() -> None:
    """Or the coordinator would take the whole request for over."""
    bench = Bench()
    bench.open()
    bench.do(LinkDown())
    assert cancels(bench.do(LinkUp(7))) == [("r", 1, CancelReason.ABANDONED)]
    bench.tokens(0, 5, attempt=2)
    bench.do(LinkDown())
    assert cancels(bench.do(LinkUp(8))) == []


def test_interruption_of_whole_answer_is_denied() -> None:
    """Its worker was lost between its last tokens and its last word."""
    bench = Bench()
    bench.open()
    bench.tokens(0, 5, 6, finish=FinishReason.STOP)
    said = bench.interrupt()
    assert said == [SendCancel(Cancel("r", 1, CancelReason.ANSWERED, 2))]
    assert bench.interrupt("nobody's") == []


def test_leaving_client_cancels_silently() -> None:
    """A client that leaves has its request cancelled, and nothing more is delivered."""
    bench = Bench()
    bench.open(choices=2)
    bench.tokens(0, 5)
    gone = bench.do(ClientGone("r"))
    assert cancels(gone) == [("r", 1, CancelReason.DISCONNECTED)]
    assert len(gone) == 1
    assert bench.do(ClientGone("r")) == []
    assert texts(bench.tokens(1, 6)) == []


def test_unsent_request_is_not_cancelled() -> None:
    """No cancel is sent for a request that was never submitted."""
    bench = Bench(link=False)
    bench.open()
    bench.do(ClientGone("r"))
    assert bench.do(LinkUp(7)) == []


def test_idle_stream_fails_between_tokens() -> None:
    """A stream fails and is cancelled if no token comes within the idle limit."""
    bench = Bench()
    bench.open()
    bench.now += 100
    bench.tokens(0, 5)
    bench.now += 119
    assert failures(bench.do(Tick())) == []
    bench.now += 1
    failed = bench.do(Tick())
    assert failures(failed) == [FailKind.IDLE]
    assert cancels(failed) == [("r", 1, CancelReason.ABANDONED)]


def test_silent_stream_is_asked_about() -> None:
    """The coordinator is asked about a silent stream although no connection was lost."""
    bench = Bench()
    bench.open()
    assert [s[:2] for s in submits(bench.wait())] == [("r", 1)], (
        "not begun: after a quarter of the time after which it fails"
    )
    assert bench.now == 130
    bench.tokens(0, 5)
    for waits in range(3):
        assert [s[:2] for s in submits(bench.wait())] == [("r", 1)], waits
    assert bench.now == 145
    resumed = bench.do(Interrupted("r", 1, Interrupt.GATEWAY_LINK_LOST, "it has ended")) + bench.wait()
    assert submits(resumed) == [("r", 2, [1, 2, 3, 5], 1, 1, 0)]


def test_silent_stream_of_restart_resumes() -> None:
    """Its worker has told a coordinator that it failed which does not know whose it is."""
    bench = Bench()
    bench.open()
    bench.tokens(0, 5)
    bench.do(LinkDown())
    bench.do(LinkUp(8))
    bench.tokens(1, 6)
    assert cancels(bench.wait()) == [("r", 1, CancelReason.ABANDONED)] and bench.now == 100 + LIMITS.stall_s
    assert submits(bench.wait()) == [("r", 2, [1, 2, 3, 5, 6], 2, 1, 0)]


def test_draining_gateway_finishes_its_streams() -> None:
    """A draining gateway refuses new streams, lets open ones run and ends the rest at shutdown."""
    bench = Bench()
    bench.open("a")
    bench.tokens(0, 5, name="a")
    bench.open("b")
    assert bench.do(Drain()) == []
    assert failures(bench.open("c")) == [FailKind.SHUTTING_DOWN]
    bench.tokens(1, 6, name="a", finish=FinishReason.STOP)
    assert failures(bench.do(Shutdown())) == [FailKind.SHUTTING_DOWN], "the one that had not ended by itself"


def test_timers_of_ended_streams_are_forgotten() -> None:
    """Timers of ended streams do not pile up."""
    bench = Bench()
    for number in range(1000):
        bench.open(f"r{number}")
        bench.tokens(0, 0, name=f"r{number}", finish=FinishReason.STOP)
    assert len(bench.keeper._deadlines) < 200
    assert bench.keeper.next_deadline() is None
