"""What a client is told when a request is refused or fails: OpenAI's shape, one status and one code for each case."""

import math
from typing import Any

import msgspec

from gateway.stream_types import FailKind, Failure
from proto.errors import Reject

_TYPES = {
    401: "authentication_error",
    404: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable",
}


class ApiError(Exception):
    """An answer that is not a success."""

    def __init__(
        self, status: int, message: str, *, code: str, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s

    @property
    def type(self) -> str:
        return _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def encoded(self) -> bytes:
        return msgspec.json.encode(self.body())

    def headers(self) -> dict[str, str]:
        if self.status == 401:
            return {"WWW-Authenticate": "Bearer"}
        if self.retry_after_s is None:
            return {}
        return {"Retry-After": str(max(1, math.ceil(self.retry_after_s)))}


def bad_value(param: str | None, message: str, code: str = "invalid_value") -> ApiError:
    return ApiError(400, message, code=code, param=param)


def too_long(message: str, param: str | None = None) -> ApiError:
    return ApiError(400, message, code="context_length_exceeded", param=param)


def model_not_found(model: str) -> ApiError:
    return ApiError(404, f"The model {model[:200]!r} is not served here.", code="model_not_found", param="model")


_RETRY_AFTER_S = 5.0
_OF_REJECT: dict[Reject, tuple[int, str]] = {
    Reject.TOO_LONG: (400, "context_length_exceeded"),
    Reject.TOO_LARGE: (400, "context_length_exceeded"),
    Reject.QUEUE_FULL: (429, "queue_full"),
    Reject.NO_CAPACITY: (503, "no_capacity"),
    Reject.UNKNOWN_MODEL: (503, "no_capacity"),  # this gateway serves the model, but no worker has come up for it
    Reject.EXPIRED: (503, "queue_timeout"),
    Reject.SHUTTING_DOWN: (503, "shutting_down"),
}
_OF_KIND: dict[FailKind, int] = {
    FailKind.UNREACHABLE: 503,
    FailKind.OVERLOADED: 503,
    FailKind.INTERRUPTED: 500,
    FailKind.IDLE: 503,
    FailKind.SHUTTING_DOWN: 503,
}


def of_failure(failure: Failure) -> ApiError:
    """A stream's failure as the client sees it, as a status before the first byte and as an event after it."""
    if failure.reject is not None:
        status, code = _OF_REJECT.get(failure.reject.reason, (500, failure.reject.reason.value))
        retry = max(failure.reject.retry_after_s, 1.0)
    else:
        status, code, retry = _OF_KIND[failure.kind], failure.kind.value, _RETRY_AFTER_S
    message = (
        f"The request failed: {failure.message}." if status >= 500 else f"The request was refused: {failure.message}."
    )
    return ApiError(status, message, code=code, retry_after_s=retry if status in (429, 503) else None)
