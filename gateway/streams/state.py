"""The keeper's record of a live answer. Pure data."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from heapq import heapify, heappop, heappush
from zlib import crc32

from msgspec import structs

from gateway.streams.liveness import Liveness
from gateway.streams.types import Deliver, Finish, SendSubmit, StreamLimits, TextSink, Work
from gateway.text.block_hashes import BlockNames
from proto.codec import pack_tokens
from proto.errors import CancelReason, Reject
from proto.messages import Cancel, Submit, TokenItem

_RETRY_S = (0.25, 2.0)
_DEADLINES_SPARE = 64
_PASSING = (Reject.NO_CAPACITY, Reject.UNKNOWN_MODEL, Reject.RETRY_BUDGET)
_PASSING_RESUME = (*_PASSING, Reject.QUEUE_FULL, Reject.SHED, Reject.STORAGE)


class StreamPhase(Enum):
    PENDING = "pending"  # It will be sent at `not_before`, or when the link is up
    SENT = "sent"
    RUNNING = "running"  # Accepted, or tokens have come


@dataclass(eq=False)
class StreamChoice:
    index: int
    sink: TextSink
    tokens: list[int] = field(default_factory=list)
    done: bool = False
    first: int = 0  # Number of the first token that the current attempt brings

    def take(self, item: TokenItem, skip: int, stream: "Stream") -> Deliver:
        """Turn an item's tokens from number `skip` on into text, and end the choice where they say so."""
        fresh, logprobs = item.tokens[skip:], item.logprobs[skip:]
        finish = None if item.finish is None else Finish(item.finish.value)
        text, used, finish, stop = self.read(fresh, finish, stream.work.submit.sampling.max_tokens)
        cached = self.found_cached(item)
        self.tokens.extend(fresh[:used])
        return Deliver(stream.id, self.index, text, fresh[:used], logprobs[:used], finish, stop, cached)

    def read(
        self, fresh: tuple[int, ...], finish: Finish | None, max_tokens: int
    ) -> tuple[str, int, Finish | None, str]:
        """Returns (text, number of tokens that belong to the answer, finish reason, stop string). A stop string, or
        `max_tokens` of the whole answer, may end the choice before the last of these tokens."""
        room = max_tokens - len(self.tokens)
        if len(fresh) > room or (finish is None and len(fresh) == room):
            fresh, finish = fresh[:room], Finish.LENGTH
        texts: list[str] = []
        used, stop = len(fresh), ""
        for count, token in enumerate(fresh[:-1] if finish is Finish.STOP else fresh, 1):  # a stop token is not text
            piece = self.sink.push(token)
            texts.append(piece.text)
            if stop := piece.stop:
                used = count
                break
        if finish is not None and not stop:
            piece = self.sink.finish()
            texts.append(piece.text)
            stop = piece.stop
        return "".join(texts), used, Finish.STOP if stop else finish, stop

    def found_cached(self, item: TokenItem) -> int:
        """Returns the prompt tokens that were cached before the request, not by an earlier attempt."""
        return item.cached_tokens if item.attempt == 1 and not self.tokens else 0


@dataclass(eq=False)
class Submission:
    """The request that the coordinator knows by one id: all choices of a stream, or one that is resumed by itself."""

    stream: "Stream"
    submit: Submit  # The message of the current attempt, as of its start
    choices: list[StreamChoice]
    uncounted: int = 0  # attempts cut short by a drain, a lost coordinator or preemption: they are no tries
    steadied: int = 0  # How often the count of tries was restarted because an attempt had gone well for long
    tries_before: int = 0  # Tries up to the last attempt that brought enough tokens
    phase: StreamPhase = StreamPhase.PENDING
    sent: bool = False
    resuming: bool = False  # the next send is a new attempt; until then, late tokens of the old one are accepted
    not_before: float = 0.0
    wait_until: float | None = None  # until then, a new request waits for the coordinator's link
    interrupted_at: float = 0.0
    sent_at: float = 0.0  # when its current attempt was sent
    liveness: Liveness = field(default_factory=Liveness)
    names: BlockNames | None = None  # Names of the blocks of the last attempt that was submitted by this id
    ended_early: bool = False  # a choice ended in the gateway, while its worker goes on

    @property
    def request_id(self) -> str:
        return self.submit.request_id

    @property
    def attempt(self) -> int:
        return self.submit.attempt

    @property
    def is_new(self) -> bool:
        """Whether the client has not been promised anything yet. Its wait is bounded, and a rejection may end it."""
        return not self.stream.admitted

    @property
    def retried(self) -> tuple[Reject, ...]:
        """Rejections after which a retry may succeed. An unknown model means that no worker was up yet."""
        return _PASSING if self.is_new else _PASSING_RESUME

    @property
    def tries(self) -> int:
        return self.attempt - self.uncounted - self.tries_before

    @property
    def has_begun(self) -> bool:
        return any(choice.tokens for choice in self.choices)

    def choice_of(self, item: TokenItem) -> StreamChoice | None:
        """The choice that these tokens belong to; None where they belong to another attempt."""
        number = item.choice - self.choices[0].index
        if self.attempt != item.attempt or not self.sent or not 0 <= number < len(self.choices):
            return None
        return self.choices[number]

    def overtakes(self, choice: StreamChoice, decoder: int) -> bool:
        """Returns whether tokens of a decode worker that leave a gap may just have overtaken the attempt's first token."""
        return bool(decoder) and self.phase is not StreamPhase.PENDING and len(choice.tokens) == choice.first

    def lacks_logprobs(self, item: TokenItem) -> bool:
        """Whether log probabilities are missing, of the tokens themselves or of the prompt's, which come before them."""
        scores = self.stream.work.prompt_scores
        lacks_prompts = scores is not None and not scores.complete
        return lacks_prompts or (self.submit.sampling.logprobs >= 0 and len(item.logprobs) != len(item.tokens))

    def part(self, choice: StreamChoice, now: float) -> "Submission":
        """One of several choices, to be resumed by itself."""
        request_id = f"{self.stream.id}.c{choice.index}"
        return Submission(
            self.stream,
            structs.replace(self.submit, request_id=request_id, choices=1, first_choice=choice.index),
            [choice],
            uncounted=self.uncounted,
            steadied=self.steadied,
            tries_before=self.tries_before,
            sent=True,
            resuming=True,
            not_before=now,
            interrupted_at=self.interrupted_at,
        )

    def patient_until(self, settled_at: float, limits: StreamLimits) -> float:
        """Returns the time until which a rejection in `retried` is retried."""
        if self.is_new:
            # Workers may be on their way back: to a coordinator that has just started, or after a moment of silence.
            return max(self.wait_until or 0.0, settled_at)
        return self.interrupted_at + limits.resume_wait_s

    def put_off(self, not_before: float) -> None:
        """Wait until `not_before` after a rejection. An attempt that had been accepted is spent."""
        self.resuming |= self.phase is StreamPhase.RUNNING
        self.phase, self.not_before = StreamPhase.PENDING, not_before

    def reset_tries(self, now: float, limits: StreamLimits) -> None:
        """Restart the count of tries if the attempt has brought `progress_tokens`, or, `uncounted_max` times at most, has gone
        well for `steady_s`."""
        brought = sum(len(choice.tokens) - choice.first for choice in self.choices)
        steady = 0.0 < self.interrupted_at <= now - limits.steady_s and self.steadied < limits.uncounted_max
        if brought >= limits.progress_tokens or steady:
            self.steadied += brought < limits.progress_tokens
            self.tries_before += self.tries

    def interrupted(self, now: float, backoff_s: float) -> None:
        """Plan the next attempt for `backoff_s` seconds from now."""
        self.phase, self.resuming = StreamPhase.PENDING, True
        self.interrupted_at, self.not_before = now, now + backoff_s
        self.liveness.stall_at = None

    def lost_before_answer(self, now: float, uncounted_max: int) -> None:
        """The link went down before the coordinator answered."""
        self.uncounted += self.uncounted < uncounted_max
        self.phase, self.resuming = StreamPhase.PENDING, True
        self.not_before = self.interrupted_at = now
        self.wait_until = None

    def waits_in_vain(self, now: float) -> bool:
        return self.is_new and self.wait_until is not None and now >= self.wait_until

    @property
    def _delivered(self) -> list[int]:
        """The tokens behind which an attempt goes on: several choices begin together."""
        return self.choices[0].tokens if len(self.choices) == 1 else []

    def stay_in(self, pool: str) -> None:
        """Have later attempts run on workers of the revision that the tokens so far come from."""
        if pool != self.submit.pool:
            self.submit = structs.replace(self.submit, pool=pool)

    def begin_next(self) -> None:
        """Make the next attempt's message. The blocks of the last attempt may still be where it ran."""
        last, work, tokens = self.submit, self.stream.work, self._delivered
        before, self.names = self.names, work.names
        packed = work.prompt + pack_tokens(tokens)
        count = len(packed) // 4
        if work.names is not None and tokens:
            kept = before and before.of_kept(self.request_id, last.attempt, last.prompt_tokens, count)
            self.names = kept or work.names.extended(packed)
        hashes = self.names.hashes if self.names is not None else b""
        self.submit = structs.replace(last, attempt=last.attempt + 1, prompt_tokens=count, block_hashes=hashes)
        self.resuming = False

    def message(self, now: float) -> SendSubmit:
        """Returns the message for the current attempt: the prompt and, if the submission has a single choice, the tokens
        already delivered. If several choices have begun, the message only asks about an attempt that the coordinator knows."""
        tokens, sampling = self._delivered, self.submit.sampling
        blob = self.stream.work.prompt + pack_tokens(tokens)
        submit = structs.replace(
            self.submit,
            prompt_tokens=len(blob) // 4,
            resumed_tokens=len(tokens),
            sampling=structs.replace(sampling, prompt_logprobs=-1) if tokens else sampling,
            deadline_ms=self._deadline_ms(now),
            drained_attempts=self.uncounted,
        )
        return SendSubmit(submit, blob)

    def last_word(self, reason: CancelReason) -> Cancel:
        output_tokens = sum(len(choice.tokens) for choice in self.choices)
        return Cancel(self.request_id, self.attempt, reason, output_tokens)

    def _deadline_ms(self, now: float) -> float:
        """The time that is left of the stream's deadline; a stream whose first token is out has met it."""
        deadline_ms = self.stream.work.submit.deadline_ms
        if not deadline_ms or any(choice.tokens for choice in self.stream.choices):
            return 0.0
        return max(1.0, deadline_ms - 1000.0 * (now - self.stream.opened_at))

    def backoff_s(self, limits: StreamLimits) -> float:
        """Returns the delay before the next attempt in seconds. It doubles with each try."""
        delay_s: float = min(limits.resume_delay_s * 2 ** (self.tries - 1), limits.resume_delay_s_max)
        return delay_s * self.jitter()

    def retry_s(self, retry_after_s: float, *, settling: bool) -> float:
        """Returns the delay in seconds before a rejected attempt is retried. `settling`: the coordinator has just started, and
        its workers may be about to reconnect."""
        return (_RETRY_S[0] if settling else min(max(retry_after_s, _RETRY_S[0]), _RETRY_S[1])) * self.jitter()

    def sent_to(self, coordinator: int, now: float) -> None:
        """Note that the current attempt is sent to `coordinator`, and reset what belongs to the last one."""
        self.phase, self.sent, self.sent_at = StreamPhase.SENT, True, now
        self.liveness = Liveness(coordinator, now)
        for choice in self.choices:
            choice.first = len(choice.tokens)

    def jitter(self) -> float:
        """Returns 0.5 to 1.5, always the same for an attempt. It is a hash, since a pure core has no random numbers."""
        return 0.5 + (crc32(f"{self.request_id}/{self.attempt}".encode()) % 1000) / 1000


@dataclass(eq=False)
class Stream:
    """One prompt's answer, over all its choices and attempts."""

    work: Work
    opened_at: float
    progress_at: float  # When it was opened or last got a token
    choices: list[StreamChoice] = field(default_factory=list)
    submissions: list[Submission] = field(default_factory=list)
    admitted: bool = False
    scheduled_at: float | None = None  # The time of its entry in the keeper's heap

    @property
    def id(self) -> str:
        return self.work.stream_id

    def deadline(self, limits: StreamLimits, link_up: bool, coordinator: int) -> float:
        """When it must be looked at next, if nothing happens before."""
        at = self.progress_at + limits.idle_s
        for submission in self.submissions:
            if submission.phase is StreamPhase.PENDING:
                if link_up:
                    at = min(at, submission.not_before)
                elif submission.is_new and submission.wait_until is not None:
                    at = min(at, submission.wait_until)
            else:
                at = min(at, submission.liveness.early.late_at(limits.first_token_wait_s))
                if link_up:
                    at = min(at, submission.liveness.silent_at(limits, coordinator))
        return at


class StreamDeadlines:
    """The time of the next check of each live stream, in a heap with lazy deletion. An entry is valid while its time equals its
    stream's `scheduled_at`."""

    def __init__(self, streams: Mapping[str, Stream]) -> None:
        """`streams`: by id, those that live; their owner changes it."""
        self._streams = streams
        self._heap: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def next(self) -> float | None:
        """The earliest deadline of a live stream."""
        while self._heap:
            at, stream_id = self._heap[0]
            stream = self._streams.get(stream_id)
            if stream is not None and stream.scheduled_at == at:
                return at
            heappop(self._heap)
        return None

    def set(self, stream: Stream, at: float) -> None:
        """Look at it then, or at an earlier time set before."""
        if stream.scheduled_at is not None and stream.scheduled_at <= at:
            return
        stream.scheduled_at = at
        if len(self._heap) > 4 * len(self._streams) + _DEADLINES_SPARE:
            self._heap = [(s.scheduled_at, s.id) for s in self._streams.values() if s.scheduled_at is not None]
            heapify(self._heap)
        else:
            heappush(self._heap, (at, stream.id))

    def pop_due(self, now: float) -> Stream | None:
        """The stream whose deadline is earliest, if that has passed; it has none any more."""
        at = self.next()
        if at is None or at > now:
            return None
        stream = self._streams[heappop(self._heap)[1]]
        stream.scheduled_at = None
        return stream
