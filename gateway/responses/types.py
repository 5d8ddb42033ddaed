"""Requests to /v1/responses."""

from typing import Annotated, Any, Final, Literal

from pydantic import Field

from gateway.http.bounds import AnyObject, MaxItems, MaxKeys, Text
from gateway.openai.request_types import (
    IDENTIFIER_CHARS_MAX,
    MESSAGES_MAX,
    TOOLS_MAX,
    Neutral,
    RequestType,
)
from proto import limits

NEUTRAL_ONLY: Final[Neutral] = {
    "background": (None, False),
    "conversation": (None,),
    "include": (None, []),
    "max_tool_calls": (None,),
    "moderation": (None,),
    "prompt": (None,),
    "prompt_cache_options": (None, {}),
    "prompt_cache_retention": (None, "in_memory"),
    "top_logprobs": (None, 0),
    "truncation": (None, "disabled"),
    "context_management": (None, []),
}


class ResponsesStreamOptions(RequestType):
    include_obfuscation: Literal[False] | None = None


class TextOptions(RequestType):
    format: AnyObject | None = None
    """`text`, `json_object` or `json_schema`."""
    verbosity: None = None


class ReasoningOptions(RequestType):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: None = None
    generate_summary: None = None


class ResponsesRequest(RequestType):
    model: Annotated[str, Field(min_length=1, max_length=limits.MAX_TEXT_CHARS)]
    input: Text | Annotated[list[AnyObject], Field(min_length=1), MaxItems(MESSAGES_MAX)]
    instructions: Text | None = None
    """Not kept for the next response."""
    previous_response_id: Annotated[str, Field(max_length=128)] | None = None
    """A response that this very gateway still keeps: its input and output come before `input`. Gateways do not share them: with
    several, send a client to the same one each time, or send the items as `input`."""
    store: bool | None = None
    """Null is true: the response is kept for a while, for `previous_response_id`. Bounds may end that early."""
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=limits.MAX_CONTEXT_TOKENS)] | None = None
    temperature: Annotated[float, Field(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=limits.MAX_VOCAB)] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    tools: Annotated[list[AnyObject], MaxItems(TOOLS_MAX)] | None = None
    """Functions only: this server runs no tools."""
    tool_choice: Annotated[str, Field(max_length=IDENTIFIER_CHARS_MAX)] | AnyObject | None = None
    parallel_tool_calls: bool | None = None
    metadata: (
        Annotated[dict[Annotated[str, Field(max_length=512)], Annotated[str, Field(max_length=512)]], MaxKeys(16)]
        | None
    ) = None
    """Given back with the response."""
    priority: Any = None
    service_tier: Literal["auto", "default", "flex", "priority", "scale"] | None = None
    deadline_ms: Annotated[float, Field(gt=0.0, le=86_400_000.0)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=IDENTIFIER_CHARS_MAX)] | None = None
    user: Annotated[str, Field(max_length=IDENTIFIER_CHARS_MAX)] | None = None
    safety_identifier: Annotated[str, Field(max_length=IDENTIFIER_CHARS_MAX)] | None = None
    prompt_cache_key: Annotated[str, Field(max_length=IDENTIFIER_CHARS_MAX)] | None = None
