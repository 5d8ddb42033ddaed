"""The errors of the API: OpenAI's shape, one status and one code for each case."""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, Final, ParamSpec, TypeVar

from gateway.http.encoding import encode
from gateway.streams.types import FailKind, Failure
from proto.errors import Reject, WaitReason
from proto.messages import RateState, Waits

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable",
}

RATE_HEADERS = tuple(
    f"x-ratelimit-{what}-{kind}" for kind in ("requests", "tokens") for what in ("limit", "remaining", "reset")
)  # All of those that `rate_headers` makes


WAIT_HEADER: Final = "x-crossdock-wait"
_BECAUSE: Final = {
    "coordinator_unreachable": WaitReason.COLD_START,
    "gateway_overloaded": WaitReason.OTHER_TENANTS,
    "too_many_open_requests": WaitReason.OWN_QUEUE,
    "too_many_batches": WaitReason.OWN_QUEUE,
}  # of errors that are this gateway's own
UNSUPPORTED_ENCODING: Final = "unsupported_content_encoding"


class ApiError(Exception):
    """An answer that is not a success."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        param: str | None = None,
        retry_after_s: float | None = None,
        rates: RateState | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s
        self.rates = rates
        self.because = _BECAUSE.get(code)  # None: the code says it
        self.waits = Waits()  # until it was rejected
        self.overflow = ""  # The tokens of a prompt that is too long, and the model's context, in Anthropic's words

    @property
    def type(self) -> str:
        return _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")

    def body(self, request_id: str) -> dict[str, Any]:
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": {**error, "request_id": request_id}}

    def encoded(self, request_id: str) -> bytes:
        return encode(self.body(request_id))

    def headers(self) -> dict[str, str]:
        headers = rate_headers(self.rates)
        if self.status in (429, 503):
            headers[WAIT_HEADER] = wait_text(self.waits, self.because or self.code)
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        if self.code == UNSUPPORTED_ENCODING:
            headers["Accept-Encoding"] = "identity"
        if self.retry_after_s is not None:
            headers["Retry-After"] = str(max(1, math.ceil(self.retry_after_s)))
        elif (400 <= self.status < 500 and self.status != 408) or self.code == Reject.LOSES_WORKERS:
            # OpenAI's and Anthropic's clients know this header. Without it they retry after every 429 and 5xx.
            headers["x-should-retry"] = "false"
        return headers


P = ParamSpec("P")
T = TypeVar("T")


def bare_errors(work: Callable[P, T]) -> Callable[P, T]:
    """Wrap `work` so that an `ApiError` from it refers to none of its frames. The last error stays alive for a while, and
    would keep everything in those frames alive, such as a request body and the objects made from it."""

    @wraps(work)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return work(*args, **kwargs)
        except ApiError as error:
            del args, kwargs
            error.__context__ = None
            raise error.with_traceback(None) from None

    return run


def rate_headers(rates: RateState | None) -> dict[str, str]:
    """OpenAI's `x-ratelimit-*`, for the rates that are limited."""
    headers: dict[str, str] = {}
    if rates is None:
        return headers
    for kind, limit, remaining, reset_s in (
        ("requests", rates.limit_requests, rates.remaining_requests, rates.reset_requests_s),
        ("tokens", rates.limit_tokens, rates.remaining_tokens, rates.reset_tokens_s),
    ):
        if limit:
            headers[f"x-ratelimit-limit-{kind}"] = str(limit)
            headers[f"x-ratelimit-remaining-{kind}"] = str(remaining)
            headers[f"x-ratelimit-reset-{kind}"] = duration_text(reset_s)
    return headers


def wait_text(waits: Waits, because: str = "") -> str:
    """The value of `WAIT_HEADER`, a dictionary of RFC 8941: milliseconds by reason, and why the request was rejected."""
    parts = [f"{name}={getattr(waits, name):.1f}" for name in Waits.__struct_fields__]
    return ", ".join([*parts, f"reason={because}"] if because else parts)


def duration_text(seconds: float) -> str:
    """As OpenAI writes it: `20ms`, `1.5s`, `6m0s`, `1h0m30s`; rounded up to milliseconds."""
    total_ms = math.ceil(seconds * 1000)
    if total_ms < 1000:
        return f"{total_ms}ms"
    minutes, ms = divmod(total_ms, 60_000)
    hours, minutes = divmod(minutes, 60)
    text = f"{ms / 1000:.3f}".rstrip("0").rstrip(".") + "s"
    if hours or minutes:
        text = f"{minutes}m{text}"
    return f"{hours}h{text}" if hours else text


def bad_value(param: str | None, message: str, code: str = "invalid_value") -> ApiError:
    return ApiError(400, message, code=code, param=param)


def too_long(param: str, context: int, prompt: int, completion: int = 0, *, at_least: bool = False) -> ApiError:
    """The error for a prompt of `prompt` tokens, or more if `at_least`. Its words are OpenAI's: LiteLLM and agents look for
    them, not for the code."""
    more = "at least " if at_least else ""
    message = (
        f"This model's maximum context length is {context} tokens. However, you requested {more}{prompt + completion} tokens"
        f" ({more}{prompt} in the {param}, {completion} in the completion). Please reduce the length of the {param} or"
        " completion."
    )
    error = ApiError(400, message, code="context_length_exceeded", param=param)
    error.overflow = f"{prompt} tokens > {context} maximum"
    return error


def model_not_found(model: str, served: Sequence[str]) -> ApiError:
    message = f"The model {model[:200]!r} is not served here; served is {', '.join(map(repr, served))}."
    return ApiError(404, message, code="model_not_found", param="model")


_RETRY_AFTER_S = 5.0
_OF_REJECT: dict[Reject, tuple[int, str]] = {
    Reject.TOO_LONG: (400, "context_length_exceeded"),
    Reject.TOO_LARGE: (400, "context_length_exceeded"),
    Reject.QUEUE_FULL: (429, "queue_full"),
    Reject.NO_CAPACITY: (503, "no_capacity"),
    Reject.UNKNOWN_MODEL: (503, "no_capacity"),  # this gateway serves the model, but no worker has come up for it
    Reject.RETRY_BUDGET: (503, "recovering"),
    Reject.EXPIRED: (503, "queue_timeout"),
    Reject.STORAGE: (503, "storage_unavailable"),
    Reject.SHUTTING_DOWN: (503, "shutting_down"),
    Reject.QUOTA: (429, "rate_limit_exceeded"),
    Reject.UNKNOWN_TENANT: (503, "unknown_tenant"),  # as while only the gateway has read a new tenants file
    Reject.DEADLINE: (429, "deadline_infeasible"),
    Reject.SHED: (429, "overloaded"),
    Reject.PRIORITY_CLASS: (403, "priority_class_not_allowed"),
    Reject.LOSES_WORKERS: (500, "loses_workers"),
}
_OF_KIND: dict[FailKind, int] = {
    FailKind.UNREACHABLE: 503,
    FailKind.OVERLOADED: 503,
    FailKind.INTERRUPTED: 500,
    FailKind.GRAMMAR: 500,
    FailKind.IDLE: 503,
    FailKind.SHUTTING_DOWN: 503,
}


def of_failure(failure: Failure) -> ApiError:
    """Returns the error that the client sees for a stream's failure. It is sent as a status before the first byte, and as an
    event after it."""
    retry: float | None = _RETRY_AFTER_S
    if failure.reject is not None:
        status, code = _OF_REJECT.get(failure.reject.reason, (500, failure.reject.reason.value))
        # The cause of a 429 without a time does not pass by itself. After a 503, another gateway or a later try may succeed.
        retry = max(failure.reject.retry_after_s, 1.0) if failure.reject.retry_after_s or status == 503 else None
    else:
        status, code = _OF_KIND[failure.kind], failure.kind.value
    words = "The request failed" if status >= 500 else "The request was refused"
    if code == "context_length_exceeded":
        words = "The request exceeds the model's maximum context limit"  # LiteLLM looks for these words
    message = f"{words}: {failure.message}."
    error = ApiError(status, message, code=code, retry_after_s=retry if status in (429, 503) else None)
    if failure.reject is not None:
        error.rates, error.because, error.waits = failure.reject.rates, failure.reject.because, failure.reject.waits
    return error


Names = Mapping[str, str]  # regular expressions of the chat core's parameters → prefixes of the API's own


@contextmanager
def renamed(names: Names) -> Iterator[None]:
    """Has an `ApiError` name the client's own parameter. The first of `names` that matches counts."""
    try:
        yield
    except ApiError as error:
        param = error.param or ""
        for pattern, own in names.items():
            changed, found = re.subn(rf"^{pattern}(?![A-Za-z0-9_])", own, param)
            if found:
                error.param, error.message = changed, error.message.replace(f"'{param}'", f"'{changed}'")
                break
        raise
