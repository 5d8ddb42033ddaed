"""POST /tokenize and /detokenize, GET /tokenizer_info. The first two count as open requests of the gateway, and wait for a turn
on its tokenizer threads."""

from functools import partial
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from gateway.http.errors import bad_value
from gateway.openai.dependencies import CallDep, GatewayDep, TenantDep
from gateway.openai.forms import Chat
from gateway.openai.openapi import TOKENIZED, body_of, refusals
from gateway.openai.prepare import encoded
from gateway.openai.request_types import ChatRequest, validate
from gateway.text.tokenizer import ModelTokenizer
from gateway.vllm.types import DetokenizeAnswer, DetokenizeRequest, TokenizeAnswer, TokenizeRequest, TokenizerInfo

router = APIRouter(tags=["Tokens"])


@router.post(
    "/tokenize",
    summary="The tokens of a text or a conversation.",
    response_model=TokenizeAnswer,
    responses=refusals(*TOKENIZED),
    openapi_extra=body_of(TokenizeRequest),
)
async def tokenize(call: CallDep) -> Response:
    return await call.tokenized(partial(validate, TokenizeRequest, neutral={}), _tokenize)


@router.post(
    "/detokenize",
    summary="The text of tokens, special ones included.",
    response_model=DetokenizeAnswer,
    responses=refusals(*TOKENIZED),
    openapi_extra=body_of(DetokenizeRequest),
)
async def detokenize(call: CallDep) -> Response:
    return await call.tokenized(partial(validate, DetokenizeRequest, neutral={}), _detokenize)


@router.get(
    "/tokenizer_info",
    summary="The special tokens and the chat template.",
    response_model=TokenizerInfo,
    responses=refusals(401, 404),
)
async def tokenizer_info(gateway: GatewayDep, _tenant: TenantDep, model: str | None = None) -> dict[str, Any]:
    """lm-eval's remote tokenizer asks for them."""
    return gateway.model(model).tokenizer.info()


def _tokenize(asked: TokenizeRequest, tokenizer: ModelTokenizer) -> TokenizeAnswer:
    if (asked.prompt is None) == (asked.messages is None):
        raise bad_value("prompt", "Send either 'prompt' or 'messages'.", "missing_required_parameter")
    if asked.messages is not None:
        # As /v1/chat/completions would show it to the model.
        chat = Chat.of(ChatRequest(model=asked.model or "-", messages=asked.messages), tokenizer.template)
        text, special, param = chat.rendered(tokenizer), False, "messages"
    else:
        text, special, param = asked.prompt or "", True, "prompt"
    if asked.add_special_tokens is not None:
        special = asked.add_special_tokens
    tokens = encoded(text, tokenizer, param, special=special)
    names = [tokenizer.token_name(token) for token in tokens] if asked.return_token_strs else None
    return TokenizeAnswer(
        count=len(tokens), max_model_len=tokenizer.facts.context_tokens, tokens=tokens, token_strs=names
    )


def _detokenize(asked: DetokenizeRequest, tokenizer: ModelTokenizer) -> DetokenizeAnswer:
    if asked.tokens and max(asked.tokens) >= tokenizer.ids_end:
        message = f"A token id is out of range: ids go from 0 to {tokenizer.ids_end - 1}."
        raise bad_value("tokens", message)
    return DetokenizeAnswer(prompt=tokenizer.decode_all(asked.tokens))
