"""POST /v1/completions and /v1/chat/completions."""

from typing import Any, Final

from starlette.responses import Response

from gateway.openai.answers import Answer, ChatAnswer, CompletionAnswer, Head
from gateway.openai.call import Call, route
from gateway.openai.generate import Api, generate
from gateway.openai.prepare import ModelRules, Prepared, prepare_chat, prepare_completion
from gateway.openai.request_types import ChatRequest, CompletionRequest, validate
from gateway.text.tokenizer import ModelTokenizer


class CompletionsApi(Api[CompletionRequest]):
    name, id_prefix, operation = "completions", "cmpl", "text_completion"

    def parse(self, content: Any) -> CompletionRequest:
        return validate(CompletionRequest, content)

    def prepare(self, request: CompletionRequest, tokenizer: ModelTokenizer, rules: ModelRules) -> Prepared:
        return prepare_completion(request, tokenizer, rules)

    def answer(self, prepared: Prepared, tokenizer: ModelTokenizer, head: Head) -> CompletionAnswer:
        return CompletionAnswer(prepared, tokenizer, head)


class ChatApi(Api[ChatRequest]):
    name, id_prefix = "chat", "chatcmpl"

    def parse(self, content: Any) -> ChatRequest:
        return validate(ChatRequest, content)

    def prepare(self, request: ChatRequest, tokenizer: ModelTokenizer, rules: ModelRules) -> Prepared:
        return prepare_chat(request, tokenizer, rules)

    def answer(self, prepared: Prepared, tokenizer: ModelTokenizer, head: Head) -> Answer:
        return ChatAnswer(prepared, tokenizer, head)


COMPLETIONS: Final = CompletionsApi()
CHAT: Final = ChatApi()


async def completions(call: Call) -> Response:
    return await generate(call, COMPLETIONS)


async def chat_completions(call: Call) -> Response:
    return await generate(call, CHAT)


ROUTES: Final = (route("POST", "/v1/completions", completions), route("POST", "/v1/chat/completions", chat_completions))
