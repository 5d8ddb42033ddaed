"""POST /v1/messages and /v1/messages/count_tokens."""

from typing import Any, Final

from starlette.responses import Response

from gateway.anthropic.answer import MessagesAnswer
from gateway.anthropic.convert import NAMES, as_chat
from gateway.anthropic.types import NEUTRAL_ONLY, CountRequest, MessagesRequest
from gateway.http.errors import renamed
from gateway.openai.answers import Head
from gateway.openai.call import Call, route
from gateway.openai.forms import Chat
from gateway.openai.generate import generate
from gateway.openai.prepare import ModelRules, Prepared, encoded, prepare_chat
from gateway.openai.request_types import ChatRequest, validate
from gateway.openai.routes_generate import ChatApi
from gateway.text.tokenizer import ModelTokenizer

PREFIX: Final = "/v1/messages"


def _read_count(content: Any) -> ChatRequest:
    """Raises `ApiError`."""
    return as_chat(validate(CountRequest, content, NEUTRAL_ONLY))


def _count(request: ChatRequest, tokenizer: ModelTokenizer) -> dict[str, int]:
    """Count the tokens of a conversation, even if it is too long for the model. Raises `ApiError`."""
    with renamed(NAMES):
        text = Chat.of(request, tokenizer.template).rendered(tokenizer)
        return {"input_tokens": len(encoded(text, tokenizer, "messages", special=False))}


class MessagesApi(ChatApi):
    """Anthropic's: a request is read as one of OpenAI's chat."""

    name, id_prefix, field_names = "messages", "msg", NAMES

    def parse(self, content: Any) -> ChatRequest:
        return as_chat(validate(MessagesRequest, content, NEUTRAL_ONLY))

    def prepare(self, request: ChatRequest, tokenizer: ModelTokenizer, rules: ModelRules) -> Prepared:
        # Agents ask for as many tokens as their vendor's own models can write.
        return prepare_chat(request, tokenizer, rules, cuts_at_context=True)

    def answer(self, prepared: Prepared, tokenizer: ModelTokenizer, head: Head) -> MessagesAnswer:
        return MessagesAnswer(prepared, tokenizer, head)


_MESSAGES: Final = MessagesApi()


async def create_message(call: Call) -> Response:
    return await generate(call, _MESSAGES)


async def count_tokens(call: Call) -> Response:
    return await call.tokenized(_read_count, _count)


ROUTES: Final = (route("POST", PREFIX, create_message), route("POST", f"{PREFIX}/count_tokens", count_tokens))
