"""Requests and answers of /tokenize, /detokenize and /tokenizer_info."""

from typing import Annotated

from pydantic import Field

from gateway.http.bounds import MaxItems, Text
from gateway.openai.answer_types import AnswerType
from gateway.openai.request_types import MESSAGES_MAX, ChatMessage, RequestType
from proto import limits


class TokenizeRequest(RequestType):
    """Either `prompt` or `messages`."""

    model: Annotated[str, Field(min_length=1, max_length=limits.MAX_TEXT_CHARS)] | None = None
    prompt: Text | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1), MaxItems(MESSAGES_MAX)] | None = None
    add_special_tokens: bool | None = None
    """Null: true for a prompt, false for messages, whose template has them."""
    return_token_strs: bool | None = None


class TokenizeAnswer(AnswerType):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(RequestType):
    model: Annotated[str, Field(min_length=1, max_length=limits.MAX_TEXT_CHARS)] | None = None
    tokens: Annotated[list[Annotated[int, Field(ge=0)]], MaxItems(limits.MAX_CONTEXT_TOKENS)]


class DetokenizeAnswer(AnswerType):
    prompt: str


class TokenizerInfo(AnswerType):
    tokenizer_class: str
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    chat_template: str | dict[str, str] | None
