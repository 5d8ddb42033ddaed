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
from gateway.openai.generate import generate
from gateway.openai.prepare import Prepared
from gateway.openai.request_types import ChatRequest, validate
from gateway.openai.routes_generate import ChatApi
from gateway.responses.answer import ResponsesAnswer, echoed
from gateway.responses.convert import NAMES, Item, as_chat, input_items
from gateway.responses.tools import namespaces, places
from gateway.responses.types import NEUTRAL_ONLY, ResponsesRequest
from gateway.text.tokenizer import ModelTokenizer
from runtime.process import clock


async def create_response(call: Call) -> Response:
    return await generate(call, ResponsesApi(call.gateway, call.tenant))


async def get_response(call: Call) -> Response:
    response_id = call.request.path_params["response_id"]
    kept = call.gateway.responses.get(call.tenant, response_id, clock.now())
    if kept is None:
        raise _not_kept(response_id, "response_id")
    return Response(kept.response, media_type="application/json")


async def delete_response(call: Call) -> Response:
    response_id = call.request.path_params["response_id"]
    if not call.gateway.responses.delete(call.tenant, response_id):
        raise _not_kept(response_id, "response_id")
    return JsonResponse({"id": response_id, "object": "response", "deleted": True})


def _not_kept(response_id: str, param: str) -> ApiError:
    message = (
        f"There is no response {response_id[:100]!r} in this gateway's memory: it was not stored, has expired, or another"
        " gateway made it. Send the conversation's items as 'input' instead."
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

    def parse(self, content: Any) -> ChatRequest:
        request = validate(ResponsesRequest, content, NEUTRAL_ONLY)
        before: list[Item] = []
        if request.previous_response_id is not None:
            kept = self.gateway.responses.get(self.tenant, request.previous_response_id, clock.now())
            if kept is None:
                raise _not_kept(request.previous_response_id, "previous_response_id")
            before = parse_json(kept.items)
        items = [*before, *input_items(request)]
        chat = as_chat(request, items)
        self.asked, self.namespaces = echoed(request), namespaces(request.tools)
        self.field_names = places(request.tools) | NAMES
        if request.store is not False:
            self.items = msgspec.json.encode(items)
        return chat

    def answer(self, prepared: Prepared, tokenizer: ModelTokenizer, head: Head) -> ResponsesAnswer:
        return ResponsesAnswer(prepared, tokenizer, head, asked=self.asked, namespaces=self.namespaces, keep=self._keep)

    def _keep(self, response: dict[str, Any]) -> None:
        if not self.items:
            return
        lists = (self.items, msgspec.json.encode(response["output"]))
        conversation = b"[" + b",".join(one[1:-1] for one in lists if len(one) > 2) + b"]"
        whole = encode(response)
        self.gateway.responses.put(self.tenant, response["id"], conversation, whole, clock.now())


ROUTES: Final = (
    route("POST", "/v1/responses", create_response),
    route("GET", "/v1/responses/{response_id}", get_response),
    route("DELETE", "/v1/responses/{response_id}", delete_response),
)
