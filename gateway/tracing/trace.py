"""The times of one request, gathered while it is answered. Pure; times are this gateway's monotonic seconds."""

from dataclasses import dataclass, field

from gateway.http.request_log import RequestInfo
from gateway.tracing.context import TraceContext
from proto.messages import AttemptTimes


@dataclass(eq=False)
class TracedAttempt:
    """One attempt at one of the request's prompts, or at one choice of it that was resumed by itself."""

    request_id: str
    number: int
    submitted_at: float  # for the last time, if it was rejected before and came again
    rejected: bool = False
    first_at: float | None = None  # its first tokens
    second_at: float | None = None
    last_at: float | None = None
    times: AttemptTimes | None = None  # the coordinator's, which come after its end

    def delivered(self, now: float) -> None:
        if self.first_at is None:
            self.first_at = now
        elif self.second_at is None:
            self.second_at = now
        self.last_at = now


@dataclass(eq=False)
class Trace:
    context: TraceContext
    info: RequestInfo
    operation: str  # gen_ai.operation.name
    model: str = ""
    tokenize_at: float | None = None  # when the body was there
    opened_at: float | None = None  # when its streams were opened
    first_sent_at: float | None = None  # when the first token was written to the client's connection
    ended_at: float | None = None
    finish_reasons: list[str] = field(default_factory=list)
    attempts: list[TracedAttempt] = field(default_factory=list)

    def first_token_sent(self, now: float) -> None:
        if self.first_sent_at is None and self.info.first_token_at is not None:
            self.first_sent_at = now

    @property
    def ttft_s(self) -> float | None:
        first = self.first_sent_at or self.info.first_token_at
        return None if first is None else first - self.info.started_at

    @property
    def complete(self) -> bool:
        return all(attempt.times is not None for attempt in self.attempts)

    @property
    def notable(self) -> bool:
        """Whether it failed, was resumed, or was slower than its target for the first token."""
        failed = self.info.status >= 500 or self.info.status == 429
        failed_later = self.info.status == 200 and self.info.error not in ("", "disconnected")
        if failed or failed_later or any(attempt.number > 1 for attempt in self.attempts):
            return True
        targets = [attempt.times.target_ms for attempt in self.attempts if attempt.times is not None]
        target_ms = min((target for target in targets if target), default=0.0)
        return bool(target_ms) and self.ttft_s is not None and 1000 * self.ttft_s > target_ms

    def attempt(self, request_id: str, number: int) -> TracedAttempt | None:
        return next((a for a in self.attempts if a.request_id == request_id and a.number == number), None)

    def latest(self, request_id: str) -> TracedAttempt | None:
        return next((a for a in reversed(self.attempts) if a.request_id == request_id), None)
