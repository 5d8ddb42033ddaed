"""Requests of /tokenize and /detokenize."""

from typing import Annotated

from pydantic import Field

from gateway.http.bounds import MaxItems, Text
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


class DetokenizeRequest(RequestType):
    model: Annotated[str, Field(min_length=1, max_length=limits.MAX_TEXT_CHARS)] | None = None
    tokens: Annotated[list[Annotated[int, Field(ge=0)]], MaxItems(limits.MAX_CONTEXT_TOKENS)]
