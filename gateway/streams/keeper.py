"""The keeper of streams: from a prompt to its last token, through whatever happens to the processes in between. Pure.

Rules:
- A token is delivered once, in order, whichever worker or attempt it came from. Tokens that were delivered before are dropped.
  A gap ends the attempt, which is then resumed. Tokens that overtake the attempt's first one wait a moment for it.
- An attempt that is cut short is resumed with the prompt and the tokens already delivered, after a short delay and a bounded
  number of times. Several choices that have begun are resumed one by one, since their texts differ.
- Without a link to the coordinator, streams that run go on, and new ones wait a bounded time in bounded number.
- Every stream ends exactly once: `Ended`, unless the client itself went away.
"""

from gateway.streams.final_messages import LastWords, answer_names
from gateway.streams.state import Stream, StreamChoice, StreamDeadlines, StreamPhase, Submission
from gateway.streams.types import (
    Action,
    Admitted,
    ClientGone,
    Drain,
    Ended,
    Event,
    FailKind,
    Failure,
    LinkDown,
    LinkUp,
    Noticed,
    Open,
    SendCancel,
    Shutdown,
    StreamLimits,
    Tick,
    TokensReceived,
    Why,
    Work,
    WorkerDown,
)
from proto.errors import CancelReason, Interrupt
from proto.messages import Accepted, Interrupted, RateState, Rejected, TokenItem

UNCOUNTED_REASONS = (None, Interrupt.DRAINED, Interrupt.PREEMPTED)
SHUTTING_DOWN = Failure(FailKind.SHUTTING_DOWN, "this gateway is shutting down")


class StreamKeeper:
    def __init__(self, limits: StreamLimits | None = None) -> None:
        self.limits = limits or StreamLimits()
        self.streams: dict[str, Stream] = {}
        self.submissions: dict[str, Submission] = {}
        self.link_up = False
        self._coordinator_incarnation = 0
        self._settled_at = 0.0
        self._draining = False
        self._last_words = LastWords(self.limits.last_words_max)
        self._now = 0.0
        self._deadlines = StreamDeadlines(self.streams)
        self._out: list[Action] = []

    # --- the interface ----------------------------------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> list[Action]:
        self._out, self._now = [], now
        match event:
            case TokensReceived(items, decoder, pool):
                for item in items:
                    self._item(item, decoder, pool, now)
            case Open(work):
                self._open(work, now)
            case Accepted(request_id, attempt, rates):
                if (submission := self._current(request_id, attempt)) is not None:
                    self._mark_running(submission, rates)
            case Rejected():
                self._rejected(event, now)
            case Interrupted():
                self._interrupted(event, now)
            case ClientGone(stream_id):
                if (stream := self.streams.get(stream_id)) is not None:
                    self._forget(stream, CancelReason.DISCONNECTED)
            case LinkUp(incarnation):
                self._link_is_up(incarnation, now)
            case LinkDown():
                self._link_is_down(now)
            case WorkerDown(incarnation):
                self._worker_is_down(incarnation, now)
            case Drain():
                self._draining = True
            case Shutdown():
                for stream in list(self.streams.values()):
                    self._fail(stream, SHUTTING_DOWN)
            case Tick():
                self._tick(now)
        return self._out

    def next_deadline(self) -> float | None:
        return self._deadlines.next()

    # --- opening ----------------------------------------------------------------------------------------------------

    def _open(self, work: Work, now: float) -> None:
        assert work.stream_id not in self.streams and work.prompt and work.submit.choices >= 1
        if self._draining or len(self.streams) >= self.limits.streams_max:
            overloaded = Failure(FailKind.OVERLOADED, f"{self.limits.streams_max} requests are being served already")
            self._out.append(Ended(work.stream_id, SHUTTING_DOWN if self._draining else overloaded))
            return
        choices = [StreamChoice(index, work.make_text()) for index in range(work.submit.choices)]
        stream = Stream(work, now, now, choices)
        self.streams[stream.id] = stream
        self._add(Submission(stream, work.submit, list(choices), names=work.names, not_before=now), now)

    def _add(self, submission: Submission, now: float) -> None:
        submission.stream.submissions.append(submission)
        self.submissions[submission.request_id] = submission
        if submission.is_new:
            submission.wait_until = None if self.link_up else now + self.limits.link_wait_s
        self._send_if_due(submission, now)
        self._schedule(submission.stream)

    def _send_if_due(self, submission: Submission, now: float) -> None:
        if submission.phase is not StreamPhase.PENDING or not self.link_up or now < submission.not_before:
            return
        if submission.resuming and len(submission.choices) > 1 and submission.has_begun:
            self._split(submission, now)
            return
        if submission.resuming:
            submission.begin_next()
            self._out.append(Noticed(Why.RESUMED, submission.request_id))
        submission.sent_to(self._coordinator_incarnation, now)
        self._last_words.take_back(submission.request_id)
        self._out.append(submission.message(now))

    # --- answers of the coordinator ---------------------------------------------------------------------------------

    def _current(self, request_id: str, attempt: int) -> Submission | None:
        """The submission that an answer is about, unless the answer is late."""
        submission = self.submissions.get(request_id)
        if submission is None or submission.attempt != attempt or submission.phase is StreamPhase.PENDING:
            return None
        return submission

    def _mark_running(self, submission: Submission, rates: RateState | None = None) -> None:
        if not submission.resuming:
            submission.phase = StreamPhase.RUNNING
        if not submission.stream.admitted:
            submission.stream.admitted = True
            waited_s = submission.sent_at - submission.stream.opened_at
            self._out.append(Admitted(submission.stream.id, rates, waited_s))

    def _rejected(self, event: Rejected, now: float) -> None:
        submission = self._current(event.request_id, event.attempt)
        if submission is None:
            self._out += map(SendCancel, self._last_words.about(event.request_id))  # it may have had all of it
        elif event.reason in submission.retried and now < submission.patient_until(self._settled_at, self.limits):
            submission.put_off(now + submission.retry_s(event.retry_after_s, settling=now < self._settled_at))
            self._schedule(submission.stream)
        else:
            if submission.is_new:
                self._drop(submission)  # else `_fail` cancels it: an earlier attempt's row may be open
            self._fail(submission.stream, Failure(FailKind.REJECTED, event.message, event))

    def _interrupted(self, event: Interrupted, now: float) -> None:
        submission = self._current(event.request_id, event.attempt)
        if submission is None:
            self._out += map(SendCancel, self._last_words.about(event.request_id))  # it does not come back
        elif event.reason is Interrupt.GRAMMAR:
            self._fail(submission.stream, Failure(FailKind.GRAMMAR, event.message))
        else:
            self._mark_running(submission)  # what is interrupted had been accepted
            self._resume(submission, event.reason, f"{event.reason}: {event.message}", now)

    def _resume(self, submission: Submission, reason: Interrupt | None, why: str, now: float) -> None:
        """Submit the unfinished choices again, at once after a drain, else after a delay. `reason` None: the link was lost."""
        uncounted = reason in UNCOUNTED_REASONS and submission.uncounted < self.limits.uncounted_max
        submission.uncounted += uncounted
        submission.reset_tries(now, self.limits)
        if not uncounted and submission.tries >= self.limits.attempts_max:
            message = f"interrupted {submission.tries} times, at last by {why}"
            self._fail(submission.stream, Failure(FailKind.INTERRUPTED, message))
            return
        at_once = reason is Interrupt.DRAINED
        submission.interrupted(now, 0.0 if at_once else submission.backoff_s(self.limits))
        if at_once:
            self._send_if_due(submission, now)
        self._schedule(submission.stream)

    def _split(self, submission: Submission, now: float) -> None:
        """Resume each unfinished choice by itself, and cancel the whole, for which the coordinator need not wait."""
        self._cancel(submission, CancelReason.ABANDONED)
        self._drop(submission)
        for choice in submission.choices:
            if not choice.done:
                self._add(submission.part(choice, now), now)

    # --- tokens -------------------------------------------------------------------------------------------------------

    def _item(self, item: TokenItem, decoder: int, pool: str, now: float) -> None:
        submission = self.submissions.get(item.request_id)
        choice = submission.choice_of(item) if submission is not None else None
        if submission is None or choice is None:
            self._out.append(Noticed(Why.STALE_TOKENS, item.request_id))
            return
        have, end = len(choice.tokens), item.index + len(item.tokens)
        if choice.done or end < have or (end == have and item.finish is None):
            self._out.append(Noticed(Why.DUPLICATE_TOKENS, item.request_id))
            return
        if item.index > have and submission.overtakes(choice, decoder):
            submission.liveness.early.keep(item, decoder, now)
            self._schedule(submission.stream)
            return
        if item.index > have or submission.lacks_logprobs(item):
            self._broken(submission, f"token {have} of choice {choice.index} expected, {item.index} came", now)
            return
        submission.stream.progress_at = now
        if submission.liveness.heard(decoder, now):
            self._schedule(submission.stream)
        self._mark_running(submission)
        submission.stay_in(pool)
        self._take(submission, choice, item, have - item.index)
        for later, its_decoder in submission.liveness.early.take(item.choice):
            self._item(later, its_decoder, pool, now)

    def _broken(self, submission: Submission, why: str, now: float) -> None:
        if submission.phase is StreamPhase.PENDING:
            return  # it is being resumed already
        self._out.append(Noticed(Why.BROKEN_STREAM, submission.request_id, why))
        self._cancel(submission, CancelReason.ABANDONED)
        self._resume(submission, Interrupt.DECODE_LOST, f"a broken stream: {why}", now)

    def _take(self, submission: Submission, choice: StreamChoice, item: TokenItem, skip: int) -> None:
        self._out.append(delivered := choice.take(item, skip, submission.stream))
        if delivered.finish is not None:
            choice.done = True
            submission.ended_early |= item.finish is None or submission.phase is StreamPhase.PENDING
            self._settle(submission)

    def _settle(self, submission: Submission) -> None:
        """Close what has nothing left to do."""
        if not all(choice.done for choice in submission.choices):
            return
        self._cancel(submission, CancelReason.STOP_STRING if submission.ended_early else CancelReason.ANSWERED)
        self._drop(submission)
        stream = submission.stream
        if all(choice.done for choice in stream.choices):
            del self.streams[stream.id]
            self._out.append(Ended(stream.id))

    # --- the link -----------------------------------------------------------------------------------------------------

    def _link_is_up(self, incarnation: int, now: float) -> None:
        same = incarnation == self._coordinator_incarnation
        self.link_up, self._coordinator_incarnation = True, incarnation
        if not same:
            self._settled_at = now + self.limits.settle_s
        self._out += map(SendCancel, self._last_words.again(now))
        for submission in list(self.submissions.values()):
            if self.submissions.get(submission.request_id) is not submission:
                continue  # its stream failed with an earlier one's
            if submission.phase is StreamPhase.PENDING:
                self._send_if_due(submission, now)
            elif same or not submission.liveness.got_tokens:
                # The same coordinator cancelled all we had when it lost us. A new one does not know what was queued.
                self._cancel(submission, CancelReason.ABANDONED)
                self._resume(submission, None, "the loss of the coordinator's link", now)
            else:
                self._doubt(submission, now)
            self._schedule(submission.stream)

    def _link_is_down(self, now: float) -> None:
        self.link_up = False
        self._last_words.lost(now)
        for submission in self.submissions.values():
            if submission.phase is StreamPhase.SENT:
                # It may or may not have arrived. The next attempt has a new number, so it cannot be taken for this one.
                self._cancel(submission, CancelReason.ABANDONED)
                submission.lost_before_answer(now, self.limits.uncounted_max)
            if submission.phase is StreamPhase.PENDING and submission.wait_until is None:
                submission.wait_until = now + self.limits.link_wait_s
            self._schedule(submission.stream)

    def _worker_is_down(self, incarnation: int, now: float) -> None:
        """Put all running streams in doubt: tokens of any may be lost with the connection. The next token of a stream shows
        that it lives."""
        for submission in self.submissions.values():
            if submission.phase is StreamPhase.RUNNING:
                submission.liveness.cut(incarnation, now)
                self._doubt(submission, now)
                self._schedule(submission.stream)

    def _doubt(self, submission: Submission, now: float) -> None:
        known = self.link_up and submission.liveness.coordinator == self._coordinator_incarnation
        submission.liveness.doubt(now, self.limits, known=known)

    # --- time ---------------------------------------------------------------------------------------------------------

    def _schedule(self, stream: Stream) -> None:
        """Have `_tick` check the stream at its deadline or earlier. A check before the deadline schedules the next."""
        if stream.id not in self.streams:
            return
        self._deadlines.set(stream, stream.deadline(self.limits, self.link_up, self._coordinator_incarnation))

    def _tick(self, now: float) -> None:
        while (stream := self._deadlines.pop_due(now)) is not None:
            self._check(stream, now)
            self._schedule(stream)

    def _check(self, stream: Stream, now: float) -> None:
        if now >= stream.progress_at + self.limits.idle_s:
            self._fail(stream, Failure(FailKind.IDLE, f"no token for {self.limits.idle_s:g} s"))
            return
        for submission in list(stream.submissions):
            if stream.id not in self.streams:
                return
            pending = submission.phase is StreamPhase.PENDING
            if pending and self.link_up:
                self._send_if_due(submission, now)
            elif pending and submission.waits_in_vain(now):
                self._fail(stream, Failure(FailKind.UNREACHABLE, "the coordinator cannot be reached"))
                return
            elif not pending and now >= submission.liveness.early.late_at(self.limits.first_token_wait_s):
                self._broken(submission, "its first token did not come", now)
            elif pending or not self.link_up:
                continue
            elif now >= submission.liveness.silent_at(self.limits, self._coordinator_incarnation):
                if submission.liveness.may_live(now, self._coordinator_incarnation):
                    submission.liveness.asked(now, self.limits)  # the answer to a repeated Submit says whether it lives
                    self._out.append(submission.message(now))
                else:
                    self._broken(submission, "silent since a connection was lost", now)

    # --- ends ---------------------------------------------------------------------------------------------------------

    def _cancel(self, submission: Submission, reason: CancelReason) -> None:
        if not submission.sent:
            return
        word = submission.last_word(reason)
        self._last_words.add(word, self._now)
        if self.link_up and reason is not CancelReason.ANSWERED:
            self._out.append(SendCancel(word))

    def _drop(self, submission: Submission) -> None:
        self._out += answer_names(submission)
        del self.submissions[submission.request_id]
        submission.stream.submissions.remove(submission)

    def _forget(self, stream: Stream, reason: CancelReason) -> None:
        for submission in list(stream.submissions):
            self._cancel(submission, reason)
            self._drop(submission)
        del self.streams[stream.id]

    def _fail(self, stream: Stream, failure: Failure) -> None:
        self._forget(stream, CancelReason.ABANDONED)
        self._out.append(Ended(stream.id, failure))
