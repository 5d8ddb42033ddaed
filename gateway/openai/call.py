"""The routes' common part: finds the gateway and the tenant of a request, and holds its resources until it is
answered."""

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from gateway.http.body import Slots, owner_of
from gateway.http.encoding import JsonResponse
from gateway.http.errors import ApiError, bare_errors
from gateway.http.json_text import parse_json
from gateway.http.request_log import info_of
from gateway.openai.context import Gateway
from gateway.text.tokenizer import ModelTokenizer
from runtime.tenancy.tenants import DEFAULT_TENANT

CLIENT_LEFT = 499  # the status in the access log of a response that nobody reads


T = TypeVar("T")


@dataclass(frozen=True)
class Call:
    """One request, and what its answer needs."""

    request: Request
    gateway: Gateway
    tenant: str  # Empty if the route needs no key
    owner: str  # whose share of bounded resources it uses: the tenant's, or the address's if there are no keys
    held: AsyncExitStack  # Contexts entered here are closed after the response was sent or sending failed

    async def slots(self) -> Slots:
        """A place among the requests that this gateway has open at once. Raises `ApiError` (429, 503)."""
        return await self.held.enter_async_context(self.gateway.intake.place(self.owner))

    async def tokenized(self, read: Callable[[Any], Any], work: Callable[[Any, ModelTokenizer], Any]) -> Response:
        """Turn the body's JSON into a request with `read`, and answer with the result of `work`, for the model that the request
        may name. Both run on a tokenizer thread. Raises `ApiError` and `ClientDisconnect`."""

        def answered(content: Any) -> Response:
            asked = read(content)
            return JsonResponse(work(asked, self.gateway.model(asked.model).tokenizer))

        return await self.parsed(answered)

    async def parsed(self, work: Callable[[Any], T]) -> T:
        """The result of `work` on the body's JSON, from a tokenizer thread. Raises `ApiError` and `ClientDisconnect`."""
        await self.slots()
        async with self.gateway.intake.body(self.request, self.owner) as body:
            return await self.gateway.threads.run(self.owner, len(body), partial(_parsed, work, body))


@bare_errors
def _parsed(work: Callable[[Any], T], body: bytes) -> T:
    return work(parse_json(body))


@dataclass(frozen=True)
class Endpoint:
    """An ASGI app that answers with `handler`, then releases what the call holds."""

    handler: Callable[[Call], Awaitable[Response]]
    needs_key: bool

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive, send)
        gateway: Gateway = request.app.state.gateway
        tenant = await _tenant(request, gateway) if self.needs_key else ""
        owner = owner_of(tenant if gateway.keys.needed else "", request.client.host if request.client else None)
        async with AsyncExitStack() as held:
            try:
                response = await self.handler(Call(request, gateway, tenant, owner, held))
            except ClientDisconnect:
                info_of(scope).error = "disconnected"
                response = Response(status_code=CLIENT_LEFT)
            await response(scope, receive, send)


async def _tenant(request: Request, gateway: Gateway) -> str:
    """The tenant of a request, by its key or token; `default` where neither is needed. Raises `ApiError` (401, 503)."""
    tenant: str | None = DEFAULT_TENANT
    if gateway.keys.needed:
        scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
        has_bearer = bearer and scheme.lower() == "bearer"
        key = (bearer if has_bearer else request.headers.get("x-api-key", "")).strip()
        if not key:
            message = "An API key is needed: send it as 'Authorization: Bearer KEY'."
            raise ApiError(401, message, code="missing_api_key")
        tenant = gateway.keys.tenant_of(key.encode("latin-1", "replace"))
        if tenant is None and gateway.token_tenants is not None:
            tenant = await gateway.token_tenants.tenant_of(key, gateway.keys.tenants)
    if tenant is None:
        raise ApiError(401, "The API key is not valid.", code="invalid_api_key")
    info_of(request.scope).tenant = tenant
    return tenant


def route(method: str, path: str, handler: Callable[[Call], Awaitable[Response]], *, needs_key: bool = True) -> Route:
    return Route(path, Endpoint(handler, needs_key), methods=[method], name=handler.__name__)
