"""POST /v1/completions and /v1/chat/completions."""

from typing import Any, Final

from fastapi import APIRouter
from starlette.responses import Response

from gateway.openai.answer_types import ChatCompletion, ChatCompletionChunk, Completion
from gateway.openai.answers import Answer, ChatAnswer, CompletionAnswer, Head
from gateway.openai.dependencies import CallDep
from gateway.openai.generate import Api, generate
from gateway.openai.openapi import body_of, streamed
from gateway.openai.prepare import ModelRules, Prepared, prepare_chat, prepare_completion
from gateway.openai.request_types import ChatRequest, CompletionRequest, validate
from gateway.text.tokenizer import ModelTokenizer

router = APIRouter(tags=["OpenAI"])


class CompletionsApi(Api[CompletionRequest]):
    name, id_prefix = "completions", "cmpl"

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


@router.post(
    "/v1/completions",
    summary="Go on with a prompt.",
    response_model=Completion,
    responses=streamed(Completion),
    openapi_extra=body_of(CompletionRequest),
)
async def completions(call: CallDep) -> Response:
    return await generate(call, COMPLETIONS)


@router.post(
    "/v1/chat/completions",
    summary="Answer a conversation.",
    response_model=ChatCompletion,
    responses=streamed(ChatCompletionChunk),
    openapi_extra=body_of(ChatRequest),
)
async def chat_completions(call: CallDep) -> Response:
    return await generate(call, CHAT)
