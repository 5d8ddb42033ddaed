"""POST /v1/responses; GET and DELETE /v1/responses/{response_id}."""

from typing import Any, Final

import msgspec
from starlette.responses import Response

from gateway.http.encoding import JsonResponse, encode
from gateway.http.errors import ApiError
from gateway.http.json_text import parse_json
from gateway.openai.answers import Head
from gateway.openai.call import Call, route
from gateway.openai.context import Gateway
from gateway.openai.generate import NotFetched, generate
from gateway.openai.prepare import Prepared
from gateway.openai.request_types import ChatRequest, validate
from gateway.openai.routes_generate import ChatApi
from gateway.response_store import KeptResponse
from gateway.responses.answer import ResponsesAnswer, echoed
from gateway.responses.convert import NAMES, Item, as_chat, input_items
from gateway.responses.tools import namespaces, places
from gateway.responses.types import NEUTRAL_ONLY, ResponsesRequest
from gateway.text.tokenizer import ModelTokenizer
from runtime.process import clock

_PREVIOUS: Final = "previous_response_id"


async def create_response(call: Call) -> Response:
    return await generate(call, ResponsesApi(call.gateway, call.tenant))


async def get_response(call: Call) -> Response:
    response_id = call.request.path_params["response_id"]
    kept = await _find(call.gateway, call.tenant, response_id, "response_id")
    return Response(kept.response, media_type="application/json")


async def delete_response(call: Call) -> Response:
    response_id = call.request.path_params["response_id"]
    gateway, table = call.gateway, call.gateway.response_table
    if table is not None:
        was_kept = await table.delete(call.tenant, response_id)
    else:
        was_kept = gateway.responses.delete(call.tenant, response_id)
    if not was_kept:
        raise _not_kept(gateway, response_id, "response_id")
    return JsonResponse({"id": response_id, "object": "response", "deleted": True})


async def _find(gateway: Gateway, tenant: str, response_id: str, param: str) -> KeptResponse:
    """Raises `ApiError` (404, 503)."""
    if gateway.response_table is not None:
        kept = await gateway.response_table.get(tenant, response_id)
    else:
        kept = gateway.responses.get(tenant, response_id, clock.now())
    if kept is None:
        raise _not_kept(gateway, response_id, param)
    return kept


def _not_kept(gateway: Gateway, response_id: str, param: str) -> ApiError:
    where, why = " in this gateway's memory", "has expired, or another gateway made it"
    if gateway.response_table is not None:
        where, why = "", "or has expired"
    message = (
        f"There is no response {response_id[:100]!r}{where}: it was not stored, {why}."
        " Send the conversation's items as 'input' instead."
    )
    return ApiError(404, message, code="response_not_found", param=param)


class ResponsesApi(ChatApi):
    """One request of `/v1/responses`, which is handled as a chat request. Keeps what the later steps need."""

    name, id_prefix, keeps_body = "responses", "resp", True

    def __init__(self, gateway: Gateway, tenant: str) -> None:
        self.gateway, self.tenant = gateway, tenant
        self.asked: dict[str, msgspec.Raw] = {}  # The fields of the request that the response repeats
        self.namespaces: dict[str, Item] = {}  # the model's name of a function → its `name` and `namespace`
        self.items = b""  # JSON: the conversation's items, the request's own included. Empty: they are not to be kept.
        self._previous_id = ""
        self._previous_items: bytes | None = None
        self._unsettled: tuple[str, bytes, bytes] | None = None  # what goes to the database

    def parse(self, content: Any) -> ChatRequest:
        request = validate(ResponsesRequest, content, NEUTRAL_ONLY)
        before: list[Item] = []
        if request.previous_response_id is not None:
            before = parse_json(self._items_of(request.previous_response_id))
        items = [*before, *input_items(request)]
        chat = as_chat(request, items)
        self.asked, self.namespaces = echoed(request), namespaces(request.tools)
        self.field_names = places(request.tools) | NAMES
        if request.store is not False:
            self.items = msgspec.json.encode(items)
        return chat

    def _items_of(self, response_id: str) -> bytes:
        """Raises `ApiError`, and `NotFetched` where the database has it."""
        if self.gateway.response_table is None:
            kept = self.gateway.responses.get(self.tenant, response_id, clock.now())
            if kept is None:
                raise _not_kept(self.gateway, response_id, _PREVIOUS)
            return kept.items
        items, self._previous_items = self._previous_items, None
        if items is None:
            self._previous_id = response_id
            raise NotFetched
        return items

    async def fetch(self) -> int:
        kept = await _find(self.gateway, self.tenant, self._previous_id, _PREVIOUS)
        self._previous_items = kept.items
        return len(kept.items)

    def answer(self, prepared: Prepared, tokenizer: ModelTokenizer, head: Head) -> ResponsesAnswer:
        asked, names = self.asked, self.namespaces
        return ResponsesAnswer(
            prepared, tokenizer, head, asked=asked, namespaces=names, keep=self._keep, settle=self._settle
        )

    def _keep(self, response: dict[str, Any]) -> None:
        if not self.items:
            return
        lists = (self.items, msgspec.json.encode(response["output"]))
        conversation = b"[" + b",".join(one[1:-1] for one in lists if len(one) > 2) + b"]"
        whole = encode(response)
        if self.gateway.response_table is None:
            self.gateway.responses.put(self.tenant, response["id"], conversation, whole, clock.now())
        else:
            self._unsettled = response["id"], conversation, whole

    async def _settle(self) -> None:
        """The client may go on from the response, at any gateway, as soon as it has its end."""
        if self._unsettled is not None and self.gateway.response_table is not None:
            await self.gateway.response_table.put(self.tenant, *self._unsettled)


ROUTES: Final = (
    route("POST", "/v1/responses", create_response),
    route("GET", "/v1/responses/{response_id}", get_response),
    route("DELETE", "/v1/responses/{response_id}", delete_response),
)
