"""POST /v1/completions and /v1/chat/completions."""

from functools import partial
from typing import Final

from fastapi import APIRouter
from starlette.responses import Response

from gateway.openai.answer_types import ChatCompletion, ChatCompletionChunk, Completion
from gateway.openai.answers import ChatAnswer, CompletionAnswer
from gateway.openai.dependencies import CallDep
from gateway.openai.generate import Endpoint, generate
from gateway.openai.openapi import body_of, streamed
from gateway.openai.prepare import prepare_chat, prepare_completion
from gateway.openai.request_types import ChatRequest, CompletionRequest, validate

router = APIRouter(tags=["OpenAI"])
COMPLETIONS: Final = Endpoint(
    "completions", "cmpl", partial(validate, CompletionRequest), prepare_completion, CompletionAnswer
)
CHAT: Final = Endpoint("chat", "chatcmpl", partial(validate, ChatRequest), prepare_chat, ChatAnswer)


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
