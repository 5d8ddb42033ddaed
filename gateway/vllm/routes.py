"""POST /tokenize and /detokenize. Both take a place among the gateway's requests and a turn on its tokenizer threads."""

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from fastapi import APIRouter
from pydantic import BaseModel

from gateway.backend import ClientLeft
from gateway.http.body import parse_json
from gateway.http.errors import ApiError, bad_value
from gateway.openai.dependencies import Call, CallDep
from gateway.openai.forms import Chat
from gateway.openai.openapi import body_of, refusals
from gateway.openai.request_types import ChatRequest, validate
from gateway.text.tokenizer import ModelTokenizer, TemplateError
from gateway.vllm.types import DetokenizeAnswer, DetokenizeRequest, TokenizeAnswer, TokenizeRequest

router = APIRouter(tags=["Tokens"])
_REFUSALS = refusals(400, 401, 404, 408, 413, 415, 429, 503)
R = TypeVar("R", TokenizeRequest, DetokenizeRequest)
A = TypeVar("A", bound=BaseModel)


@router.post(
    "/tokenize",
    summary="The tokens of a text or a conversation.",
    response_model=TokenizeAnswer,
    response_model_exclude_none=True,
    responses=_REFUSALS,
    openapi_extra=body_of(TokenizeRequest),
)
async def tokenize(call: CallDep) -> TokenizeAnswer:
    return await _answer(call, TokenizeRequest, _tokenize)


@router.post(
    "/detokenize",
    summary="The text of tokens, special ones included.",
    response_model=DetokenizeAnswer,
    responses=_REFUSALS,
    openapi_extra=body_of(DetokenizeRequest),
)
async def detokenize(call: CallDep) -> DetokenizeAnswer:
    return await _answer(call, DetokenizeRequest, _detokenize)


async def _answer(call: Call, cls: type[R], work: Callable[[R, ModelTokenizer], A]) -> A:
    """Raises `ApiError`."""
    gateway = call.gateway
    await call.slots()
    try:
        async with gateway.intake.body(call.request, call.owner) as body:
            asked = validate(cls, parse_json(body), neutral={})
            served = gateway.model(asked.model)
            return await gateway.threads.run(call.owner, len(body), partial(work, asked, served.tokenizer))
    except ClientLeft:
        raise ApiError(408, "The client left.", code="request_timeout") from None


def _tokenize(asked: TokenizeRequest, tokenizer: ModelTokenizer) -> TokenizeAnswer:
    if (asked.prompt is None) == (asked.messages is None):
        raise bad_value("prompt", "Send either 'prompt' or 'messages'.", "missing_required_parameter")
    if asked.messages is not None:
        text, special = _conversation(asked, tokenizer), False
    else:
        text, special = asked.prompt or "", True
    if asked.add_special_tokens is not None:
        special = asked.add_special_tokens
    tokens = tokenizer.encode(text, add_special_tokens=special)
    names = [tokenizer.token_name(token) for token in tokens] if asked.return_token_strs else None
    return TokenizeAnswer(
        count=len(tokens), max_model_len=tokenizer.facts.context_tokens, tokens=tokens, token_strs=names
    )


def _conversation(asked: TokenizeRequest, tokenizer: ModelTokenizer) -> str:
    """As /v1/chat/completions would show it to the model."""
    if not tokenizer.has_chat_template:
        raise bad_value("messages", "The model has no chat template: send 'prompt'.")
    assert asked.messages is not None
    chat = Chat.of(ChatRequest(model=asked.model or "-", messages=asked.messages), tokenizer.template)
    try:
        return tokenizer.apply_template(chat.messages, chat.described_tools, **chat.options)
    except TemplateError as error:
        raise bad_value("messages", f"{error}.") from None


def _detokenize(asked: DetokenizeRequest, tokenizer: ModelTokenizer) -> DetokenizeAnswer:
    if asked.tokens and max(asked.tokens) >= tokenizer.facts.vocab_size:
        message = f"A token id is out of range: ids go from 0 to {tokenizer.facts.vocab_size - 1}."
        raise bad_value("tokens", message)
    return DetokenizeAnswer(prompt=tokenizer.decode_all(asked.tokens))
