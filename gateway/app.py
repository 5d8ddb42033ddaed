"""The HTTP application: routes, keys, and one shape for every error."""

from fastapi import FastAPI, Request
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.http.errors import ApiError
from gateway.http.request_log import RequestInfo, RequestLog, info_of
from gateway.openai import openapi, routes_generate, routes_info
from gateway.openai.context import Gateway
from gateway.streams.types import FailKind
from gateway.tenancy import KeyRing
from runtime.tenancy.tenants import DEFAULT_TENANT

_GUARDED = "/v1"


def create_app(gateway: Gateway) -> ASGIApp:
    app = FastAPI(title="crossdock", docs_url=None, redoc_url=None, openapi_url="/openapi.json", redirect_slashes=False)
    app.state.gateway = gateway
    app.openapi = openapi.document  # type: ignore[method-assign]
    app.include_router(routes_info.router)
    app.include_router(routes_generate.router)
    app.add_middleware(KeyGuard, keys=gateway.keys)
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _internal_error)
    routes = (*routes_info.router.routes, *routes_generate.router.routes)
    paths = [route.path.replace(":path", "") for route in routes if isinstance(route, Route)]
    return RequestLog(app, paths, enabled=gateway.access_log)


class KeyGuard:
    """Lets requests below /v1 pass only with a key, where there are any, and notes whose it is in `request.state.tenant`."""

    def __init__(self, app: ASGIApp, keys: KeyRing) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith(_GUARDED):
            try:
                tenant = self._tenant(Headers(scope=scope).get("authorization", ""))
            except ApiError as error:
                await _response(error, info_of(scope))(scope, receive, send)
                return
            scope["state"]["tenant"] = info_of(scope).tenant = tenant
        await self._app(scope, receive, send)

    def _tenant(self, authorization: str) -> str:
        if not self._keys.needed:
            return DEFAULT_TENANT
        scheme, _, key = authorization.partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            message = "An API key is needed: send it as 'Authorization: Bearer KEY'."
            raise ApiError(401, message, code="missing_api_key")
        tenant = self._keys.tenant_of(key.strip().encode("latin-1", "replace"))
        if tenant is None:
            raise ApiError(401, "The API key is not valid.", code="invalid_api_key")
        return tenant


def _response(error: ApiError, info: RequestInfo) -> Response:
    info.error = error.code
    headers = error.headers()
    if error.status == 408 or error.code == FailKind.SHUTTING_DOWN:
        headers["Connection"] = "close"
    # Elsewhere the rest of an unread body is left to the server, which throws it away: closing would reset the connection
    # under a client that is still sending, and this answer would be lost.
    return Response(error.encoded(info.request_id), error.status, media_type="application/json", headers=headers)


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _response(error, info_of(request.scope))


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "http_error")
    message = {
        404: f"There is nothing at {request.url.path[:200]}.",
        405: f"{request.method[:20]} is not allowed at {request.url.path[:200]}.",
    }.get(error.status_code, str(error.detail)[:300])
    response = _response(ApiError(error.status_code, message, code=code), info_of(request.scope))
    response.headers.update(error.headers or {})
    return response


async def _internal_error(request: Request, _error: Exception) -> Response:
    return _response(ApiError(500, "The gateway failed.", code="internal_error"), info_of(request.scope))
