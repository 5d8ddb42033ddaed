"""POST /v1/messages and /v1/messages/count_tokens."""

from functools import partial
from typing import Any, Final

from fastapi import APIRouter
from starlette.responses import Response

from gateway.anthropic.answer import MessagesAnswer
from gateway.anthropic.convert import NAMES, as_chat
from gateway.anthropic.types import NEUTRAL_ONLY, CountRequest, MessagesRequest
from gateway.backend import ClientLeft
from gateway.http.body import parse_json
from gateway.http.errors import ApiError
from gateway.openai.answer_types import AnthropicMessage, MessageEvent, TokenCount
from gateway.openai.dependencies import CallDep
from gateway.openai.generate import Endpoint, generate
from gateway.openai.openapi import body_of, refusals, streamed
from gateway.openai.prepare import Prepared, Rules, prepare_chat
from gateway.openai.renamed import renamed
from gateway.openai.request_types import ChatRequest, validate
from gateway.text.tokenizer import ModelTokenizer

router = APIRouter(tags=["Anthropic"])
PREFIX: Final = "/v1/messages"


def _read(cls: type[CountRequest], content: Any) -> ChatRequest:
    """Raises `ApiError`."""
    with renamed(NAMES):
        return as_chat(validate(cls, content, NEUTRAL_ONLY))


def _prepare(request: ChatRequest, tokenizer: ModelTokenizer, rules: Rules) -> Prepared:
    with renamed(NAMES):
        return prepare_chat(request, tokenizer, rules)


_MESSAGES: Final = Endpoint("messages", "msg", partial(_read, MessagesRequest), _prepare, MessagesAnswer)


@router.post(
    PREFIX,
    summary="Answer a conversation, in Anthropic's form.",
    response_model=AnthropicMessage,
    responses=streamed(MessageEvent),
    openapi_extra=body_of(MessagesRequest),
)
async def create_message(call: CallDep) -> Response:
    return await generate(call, _MESSAGES)


@router.post(
    f"{PREFIX}/count_tokens",
    summary="The tokens that a conversation has.",
    response_model=TokenCount,
    responses=refusals(400, 401, 404, 408, 413, 415, 429, 503),
    openapi_extra=body_of(CountRequest),
)
async def count_tokens(call: CallDep) -> TokenCount:
    gateway = call.gateway
    await call.slots()
    try:
        async with gateway.intake.body(call.request, call.owner) as body:
            chat = _read(CountRequest, parse_json(body))
            served = gateway.model(chat.model)
            work = partial(_prepare, chat, served.tokenizer, served.rules)
            prepared = await gateway.threads.run(call.owner, len(body), work)
    except ClientLeft:
        raise ApiError(408, "The client left.", code="request_timeout") from None
    return TokenCount(input_tokens=len(prepared.prompts[0]))
