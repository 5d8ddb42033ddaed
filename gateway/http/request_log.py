"""The id of each HTTP request, and one access log line for each. Neither prompts nor keys are logged."""

import re
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from runtime.process import clock, log

REQUEST_ID_HEADER: Final = "X-Request-Id"
SESSION_ID_HEADER = "X-Session-Id"
_ANTHROPIC_PATH: Final = "/v1/messages"  # Anthropic's clients read the id from a header of another name
_CLIENT_ID: Final = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
_QUIET_PATHS: Final = frozenset({"/", "/health", "/ready", "/metrics"})  # probed every few seconds: logged as debug

_log = log.get("crossdock.gateway.access")


def new_token() -> str:
    return secrets.token_hex(12)


@dataclass
class RequestInfo:
    """The fields of one request in the access log. Times are monotonic seconds."""

    client_id: str = ""  # The client's own `X-Request-Id`. It may not be unique, so nothing is looked up by it.
    token: str = field(default_factory=new_token)
    internal_id: str = ""  # Unique. For a generation request it is also the `id` of the answer.
    started_at: float = field(default_factory=clock.now)
    tenant: str = ""
    end_user: str = ""  # As the client names it, in `safety_identifier` or `user`
    session_id: str = ""  # The header `X-Session-Id`
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    first_token_at: float | None = None
    status: int = 0
    error: str = ""  # Code of the error that ended it, which may come after a 200
    trace_id: str = ""  # empty: it is not traced
    on_sent: Callable[[float], None] | None = None  # called when a piece of a streamed answer was sent
    on_end: Callable[[float], None] | None = None  # called once, after the access log

    def __post_init__(self) -> None:
        self.internal_id = self.internal_id or f"req-{self.token}"

    @property
    def request_id(self) -> str:
        """The id that the client is told."""
        return self.client_id or self.internal_id

    def delivered(self, tokens: int, now: float) -> None:
        if self.first_token_at is None:
            self.first_token_at = now
        self.output_tokens = (self.output_tokens or 0) + tokens


def info_of(scope: Scope) -> RequestInfo:
    """Raises KeyError outside of `RequestLog`."""
    info = scope["state"]["request_info"]
    assert isinstance(info, RequestInfo)
    return info


def client_request_id(value: str) -> str:
    """A client's `X-Request-Id` if it can be used, else an empty string."""
    return value if _CLIENT_ID.fullmatch(value) else ""


class RequestLog:
    """The outermost ASGI layer: gives each request its id, puts the id into the answer's headers, and writes the log line."""

    def __init__(self, app: ASGIApp, paths: Iterable[str], *, enabled: bool = True) -> None:
        """`paths`: the paths of the routes. Any other path is logged as `other`, since a client can put any text there."""
        self._app = app
        self._enabled = enabled
        self._paths = frozenset(paths)
        self._prefixes = {path.partition("{")[0]: path for path in self._paths if "{" in path}

    def _path(self, path: str) -> str:
        if path in self._paths:
            return path
        return next((route for prefix, route in self._prefixes.items() if path.startswith(prefix)), "other")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        info = RequestInfo(client_request_id(headers.get(REQUEST_ID_HEADER, "")))
        info.session_id = headers.get(SESSION_ID_HEADER, "")
        scope.setdefault("state", {})["request_info"] = info

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                info.status = message["status"]
                headers = MutableHeaders(scope=message)
                headers[REQUEST_ID_HEADER] = info.request_id
                if scope["path"].startswith(_ANTHROPIC_PATH):
                    headers["request-id"] = info.request_id
            await send(message)

        # A route that has GET answers HEAD as well; the server leaves the body out.
        inner = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope
        try:
            await self._app(inner, receive, send_with_id)
        finally:
            if self._enabled:
                emit = _log.debug if scope["path"] in _QUIET_PATHS else _log.info
                emit("request", **log_fields(scope["method"], self._path(scope["path"]), info, clock.now()))
            if info.on_end is not None:
                info.on_end(clock.now())


def log_fields(method: str, path: str, info: RequestInfo, now: float) -> dict[str, Any]:
    """The fields of the log line; those that are not known are left out."""
    fields: dict[str, Any] = {
        "method": method[:20],
        "path": path,
        "status": info.status,
        "tenant": info.tenant,
        "request_id": info.request_id,
        "internal_id": info.internal_id if info.client_id else "",
        "trace_id": info.trace_id,
        "end_user": info.end_user,
        "prompt_tokens": info.prompt_tokens,
        "output_tokens": info.output_tokens,
        "ttft_ms": _ms(info.first_token_at, info.started_at),
        "duration_ms": _ms(now, info.started_at),
        "error": info.error,
    }
    return {name: value for name, value in fields.items() if value not in ("", None)}


def _ms(at: float | None, since: float) -> float | None:
    return None if at is None else round(1000 * (at - since), 1)
