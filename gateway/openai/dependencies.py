"""The dependencies of the routes: this gateway, the request's tenant, and the resources that the request holds until it is
answered.

No route lets FastAPI read a body: FastAPI would read it before the key is checked, and without size limits.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Protocol, TypeVar

from fastapi import Depends, Request, Security
from fastapi.security import APIKeyHeader, HTTPAuthorizationCredentials, HTTPBearer
from pydantic import BaseModel
from starlette.responses import Response

from gateway.backend import ClientLeft
from gateway.http.body import Slots, owner_of
from gateway.http.encoding import encode
from gateway.http.errors import ApiError, bare_errors
from gateway.http.json_text import parse_json
from gateway.http.request_log import info_of
from gateway.openai.context import Gateway, gateway_of
from gateway.text.tokenizer import ModelTokenizer
from runtime.tenancy.tenants import DEFAULT_TENANT

_BEARER = HTTPBearer(auto_error=False, scheme_name="key", description="An API key of a tenant, where there are any.")
_X_API_KEY = APIKeyHeader(name="x-api-key", auto_error=False, scheme_name="x-api-key", description="As Anthropic's.")


async def _gateway(request: Request) -> Gateway:
    """A plain function would cost each request a thread."""
    return gateway_of(request)


GatewayDep = Annotated[Gateway, Depends(_gateway)]


async def _tenant(
    request: Request,
    gateway: GatewayDep,
    bearer: Annotated[HTTPAuthorizationCredentials | None, Security(_BEARER)],
    x_api_key: Annotated[str | None, Security(_X_API_KEY)],
) -> str:
    """The tenant of a request, by its key; `default` where there are no keys. Raises `ApiError` (401)."""
    if not gateway.keys.needed:
        tenant: str | None = DEFAULT_TENANT
    else:
        key = (bearer.credentials if bearer is not None else x_api_key or "").strip()
        if not key:
            message = "An API key is needed: send it as 'Authorization: Bearer KEY'."
            raise ApiError(401, message, code="missing_api_key")
        tenant = gateway.keys.tenant_of(key.encode("latin-1", "replace"))
    if tenant is None:
        raise ApiError(401, "The API key is not valid.", code="invalid_api_key")
    info_of(request.scope).tenant = tenant
    return tenant


TenantDep = Annotated[str, Depends(_tenant)]


async def _held() -> AsyncIterator[AsyncExitStack]:
    """Closed once the response has been sent, or could not be."""
    async with AsyncExitStack() as stack:
        yield stack


class OfModel(Protocol):
    """A request that may name a model."""

    @property
    def model(self) -> str | None: ...


Q = TypeVar("Q", bound=OfModel)


@dataclass(frozen=True)
class Call:
    """One POST request, which makes a model or its tokenizer work."""

    request: Request
    gateway: Gateway
    tenant: str
    owner: str
    """The owner whose share of bounded resources the request uses: the tenant, or the client's address if there are no
    keys."""
    held: AsyncExitStack
    """Contexts entered here are closed after the response was sent or sending failed."""

    async def slots(self) -> Slots:
        """A place among the requests that this gateway has open at once. Raises `ApiError` (429, 503)."""
        return await self.held.enter_async_context(self.gateway.intake.place(self.owner))

    async def tokenized(self, read: Callable[[Any], Q], work: Callable[[Q, ModelTokenizer], BaseModel]) -> Response:
        """Read the body, turn its JSON into a request with `read`, and answer with the result of `work`. `read` and `work` run
        on a tokenizer thread. Raises `ApiError`."""
        await self.slots()
        try:
            async with self.gateway.intake.body(self.request, self.owner) as body:
                answered = partial(self._answered, read, work, body)
                content = await self.gateway.threads.run(self.owner, len(body), answered)
        except ClientLeft:
            raise ApiError(408, "The client left.", code="request_timeout") from None
        return Response(content, media_type="application/json")

    @bare_errors
    def _answered(self, read: Callable[[Any], Q], work: Callable[[Q, ModelTokenizer], BaseModel], body: bytes) -> bytes:
        asked = read(parse_json(body))
        answer = work(asked, self.gateway.model(asked.model).tokenizer)
        return encode({name: value for name, value in answer if value is not None})


async def _call(
    request: Request, gateway: GatewayDep, tenant: TenantDep, held: Annotated[AsyncExitStack, Depends(_held)]
) -> Call:
    owner = owner_of(tenant if gateway.keys.needed else "", request.client.host if request.client else None)
    return Call(request, gateway, tenant, owner, held)


CallDep = Annotated[Call, Depends(_call)]
