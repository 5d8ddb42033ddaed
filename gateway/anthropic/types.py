"""Requests to /v1/messages."""

from typing import Annotated, Any, Final, Literal

from pydantic import Field

from gateway.http.bounds import FIELDS_MAX, AnyObject, MaxItems, MaxKeys, Text
from gateway.openai.request_types import (
    MESSAGES_MAX,
    PARTS_MAX,
    STOP_CHARS_MAX,
    STOPS_MAX,
    TOOLS_MAX,
    Neutral,
    RequestType,
)
from proto import limits

NEUTRAL_ONLY: Final[Neutral] = {
    "container": (None,),
    "context_management": (None,),
    "mcp_servers": (None, []),
    "inference_geo": (None,),
    "cache_control": (None,),
    "output_format": (None,),  # of a beta; `output_config` is its successor
    "diagnostics": (None,),
    "speed": (None, "standard"),
}


class Metadata(RequestType):
    user_id: Annotated[str, Field(max_length=512)] | None = None


class Thinking(RequestType):
    type: Literal["disabled", "adaptive"]
    """`adaptive`: models that think do so as their chat template has it. No budget can be kept to."""


class OutputFormat(RequestType):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema"), MaxKeys(FIELDS_MAX)]


class OutputConfig(RequestType):
    format: OutputFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    """As `reasoning_effort` of /v1/chat/completions."""


class CountRequest(RequestType):
    model: Annotated[str, Field(min_length=1, max_length=limits.MAX_TEXT_CHARS)]
    messages: Annotated[list[AnyObject], Field(min_length=1), MaxItems(MESSAGES_MAX)]
    system: Text | Annotated[list[AnyObject], MaxItems(PARTS_MAX)] | None = None
    tools: Annotated[list[AnyObject], MaxItems(TOOLS_MAX)] | None = None
    """Functions of the client only: this server runs no tools."""
    tool_choice: AnyObject | None = None
    thinking: Thinking | None = None
    """`disabled` or `adaptive`; with neither, the model does as its chat template has it."""
    output_config: OutputConfig | None = None
    """`format`: a JSON schema that the answer follows; `effort`."""


class MessagesRequest(CountRequest):
    max_tokens: Annotated[int, Field(ge=1, le=limits.MAX_CONTEXT_TOKENS)]
    stop_sequences: (
        Annotated[list[Annotated[str, Field(min_length=1, max_length=STOP_CHARS_MAX)]], MaxItems(STOPS_MAX)] | None
    ) = None
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Field(ge=0, lt=limits.MAX_VOCAB)] | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    """Without effect: the tenant's own priority class serves."""
