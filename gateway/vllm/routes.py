"""POST /tokenize and /detokenize, GET /tokenizer_info. The first two count as open requests of the gateway, and wait for a turn
on its tokenizer threads."""

from functools import partial
from typing import Annotated, Any, Final

from pydantic import Field
from starlette.responses import Response

from gateway.http.bounds import MaxItems, Text
from gateway.http.encoding import JsonResponse
from gateway.http.errors import bad_value
from gateway.openai.call import Call, route
from gateway.openai.forms import Chat
from gateway.openai.prepare import encoded
from gateway.openai.request_types import MESSAGES_MAX, ChatMessage, ChatRequest, RequestType, validate
from gateway.text.tokenizer import ModelTokenizer
from proto import limits


class TokenizeRequest(RequestType):
    """Either `prompt` or `messages`."""

    model: Annotated[str, Field(min_length=1, max_length=limits.MAX_TEXT_CHARS)] | None = None
    prompt: Text | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1), MaxItems(MESSAGES_MAX)] | None = None
    add_special_tokens: bool | None = None
    """Null: true for a prompt, false for messages, whose template has them."""
    return_token_strs: bool | None = None


class DetokenizeRequest(RequestType):
    model: Annotated[str, Field(min_length=1, max_length=limits.MAX_TEXT_CHARS)] | None = None
    tokens: Annotated[list[Annotated[int, Field(ge=0)]], MaxItems(limits.MAX_CONTEXT_TOKENS)]


async def tokenize(call: Call) -> Response:
    return await call.tokenized(partial(validate, TokenizeRequest, neutral={}), _tokenize)


async def detokenize(call: Call) -> Response:
    return await call.tokenized(partial(validate, DetokenizeRequest, neutral={}), _detokenize)


async def tokenizer_info(call: Call) -> Response:
    """lm-eval's remote tokenizer asks for them."""
    return JsonResponse(call.gateway.model(call.request.query_params.get("model")).tokenizer.info())


def _tokenize(asked: TokenizeRequest, tokenizer: ModelTokenizer) -> dict[str, Any]:
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
    answer = {"count": len(tokens), "max_model_len": tokenizer.facts.context_tokens, "tokens": tokens}
    if asked.return_token_strs:
        answer["token_strs"] = [tokenizer.token_name(token) for token in tokens]
    return answer


def _detokenize(asked: DetokenizeRequest, tokenizer: ModelTokenizer) -> dict[str, Any]:
    if asked.tokens and max(asked.tokens) >= tokenizer.ids_end:
        message = f"A token id is out of range: ids go from 0 to {tokenizer.ids_end - 1}."
        raise bad_value("tokens", message)
    return {"prompt": tokenizer.decode_all(asked.tokens)}


ROUTES: Final = (
    route("POST", "/tokenize", tokenize),
    route("POST", "/detokenize", detokenize),
    route("GET", "/tokenizer_info", tokenizer_info),
)
