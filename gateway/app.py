"""The HTTP application: its routes, and error handlers that give every error the same form."""

from typing import Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import ASGIApp, Scope

from gateway.anthropic import routes
from gateway.anthropic.answer import error_body
from gateway.batches import routes as routes_batches
from gateway.batches.store import BatchService
from gateway.http.encoding import encode
from gateway.http.errors import RATE_HEADERS, WAIT_HEADER, ApiError
from gateway.http.reach import Reach
from gateway.http.request_log import REQUEST_ID_HEADER, RequestLog, info_of
from gateway.openai import routes_generate, routes_info
from gateway.openai.context import Gateway
from gateway.responses import routes as routes_responses
from gateway.streams.types import FailKind
from gateway.vllm import routes as routes_vllm
from runtime.process import log
from runtime.storage.errors import StorageError

ROUTES: Final = (
    *routes_generate.ROUTES,
    *routes_responses.ROUTES,
    *routes.ROUTES,
    *routes_vllm.ROUTES,
    *routes_batches.ROUTES,
    *routes_info.ROUTES,
)
_NO_IDS: Final = frozenset({"/v1/responses/input_tokens", "/v1/responses/compact"})  # no ids, as they look


def create_app(gateway: Gateway, batches: BatchService | None = None) -> ASGIApp:
    handlers = {
        ApiError: _api_error,
        StorageError: _store_failed,
        HTTPException: _http_error,
        Exception: _internal_error,
    }
    app = Starlette(routes=ROUTES, exception_handlers=handlers)
    app.router.redirect_slashes = False
    app.state.gateway = gateway
    app.state.batches = batches
    if gateway.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=gateway.cors_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=[REQUEST_ID_HEADER, "Retry-After", WAIT_HEADER, *RATE_HEADERS],
        )
    paths = [route.path.replace(":path", "") for route in ROUTES]
    reach = Reach(
        app,
        lambda error, scope: _response(error, Request(scope)),
        keys_needed=lambda: gateway.keys.needed,
        allowed_hosts=gateway.allowed_hosts,
        origins=gateway.cors_origins,
        trusted_proxies=gateway.trusted_proxies,
    )
    return RequestLog(reach, paths, enabled=gateway.access_log)


def _allowed(scope: Scope) -> str:
    """Returns the methods that are allowed at the request's path, in the form of the `Allow` header."""
    asked = {**scope, "method": "OPTIONS"}
    found = set[str]()
    for route in ROUTES:
        if route.matches(asked)[0] is not Match.NONE:
            found |= route.methods or set()
    return ", ".join(sorted(found | {"OPTIONS"} | ({"HEAD"} if "GET" in found else set())))


def _response(error: ApiError, request: Request) -> Response:
    info = info_of(request.scope)
    info.error = error.code
    headers = error.headers()
    if error.status == 408 or error.code == FailKind.SHUTTING_DOWN:
        headers["Connection"] = "close"
    # The server discards the rest of an unread body in all other cases. Closing would reset the connection while the client is
    # still sending, and the client would lose this answer.
    if request.url.path.startswith(routes.PREFIX):
        content = encode(error_body(error, info.request_id))
    else:
        content = error.encoded(info.request_id)
    return Response(content, error.status, media_type="application/json", headers=headers)


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _response(error, request)


async def _store_failed(request: Request, error: Exception) -> Response:
    log.get("crossdock.batches").error("cannot use the store of batches", error=str(error))
    message = "Files and batches cannot be used now."
    return _response(ApiError(503, message, code="batch_store_failed", retry_after_s=5.0), request)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 405 and request.method == "OPTIONS":
        return Response(status_code=204, headers={"Allow": _allowed(request.scope)})
    status = 404 if request.url.path in _NO_IDS else error.status_code
    code = {404: "not_found", 405: "method_not_allowed"}.get(status, "http_error")
    message = {
        404: f"There is nothing at {request.url.path[:200]}. The API is below /v1.",
        405: f"{request.method[:20]} is not allowed at {request.url.path[:200]}.",
    }.get(status, str(error.detail)[:300])
    response = _response(ApiError(status, message, code=code), request)
    if status == 405:
        response.headers["Allow"] = _allowed(request.scope)
    return response


async def _internal_error(request: Request, _error: Exception) -> Response:
    return _response(ApiError(500, "The gateway failed.", code="internal_error"), request)
