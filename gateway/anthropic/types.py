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
    Hint,
    Neutral,
    RequestType,
)
from proto import limits

NEUTRAL_ONLY: Final[Neutral] = {
    "container": (None,),
    "mcp_servers": (None, []),
    "inference_geo": (None, "global"),
    "compaction": (None,),
    "thread": (None,),
    "billing_policy": (None, {"type": "billing_policy", "bill_to": "self"}),
    "fallback_credit_token": (None,),
}


class Metadata(RequestType):
    user_id: Annotated[str, Field(max_length=512)] | None = None


class CacheControl(RequestType):
    type: Literal["ephemeral"] = "ephemeral"
    ttl: Literal["5m", "1h"] | None = None


class Thinking(RequestType):
    type: Literal["disabled", "adaptive", "enabled", "between_tools"]
    """`adaptive` and `between_tools`: models that think do so as their chat template has it. `enabled`: they think where the
    template lets that be asked for."""
    budget_tokens: Annotated[int, Field(ge=0, le=limits.MAX_CONTEXT_TOKENS)] | None = None
    """This has no effect, nor has what follows: a thought is as long as the model makes it, and it is shown."""
    display: Literal["summarized", "omitted", "updates"] | None = None
    block_binding: Hint | None = None


class OutputFormat(RequestType):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema"), MaxKeys(FIELDS_MAX)]


class OutputConfig(RequestType):
    format: OutputFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    """As `reasoning_effort` of /v1/chat/completions."""
    task_budget: Hint | None = None
    """This has no effect."""


class CountRequest(RequestType):
    model: Annotated[str, Field(min_length=1, max_length=limits.MAX_TEXT_CHARS)]
    messages: Annotated[list[AnyObject], Field(min_length=1), MaxItems(MESSAGES_MAX)]
    system: Text | Annotated[list[AnyObject], MaxItems(PARTS_MAX)] | None = None
    tools: Annotated[list[AnyObject], MaxItems(TOOLS_MAX)] | None = None
    """Functions of the client only: this server runs no tools."""
    tool_choice: AnyObject | None = None
    thinking: Thinking | None = None
    """`disabled`, `enabled` or `adaptive`, without a budget that is kept to; left out, the model does as its chat template
    has it."""
    output_config: OutputConfig | None = None
    """`format`: a JSON schema that the answer follows; `effort`, as far as the model's chat template takes it."""
    output_format: OutputFormat | None = None
    """As `output_config.format`, which has taken its place."""
    betas: Annotated[list[Annotated[str, Field(max_length=256)]], MaxItems(FIELDS_MAX)] | None = None
    cache_control: CacheControl | None = None
    context_management: Hint | None = None
    diagnostics: Hint | None = None
    fallbacks: Literal["default"] | Annotated[list[Hint], MaxItems(16)] | None = None
    speed: Literal["standard", "fast"] | None = None


class MessagesRequest(CountRequest):
    max_tokens: Annotated[int, Field(ge=1, le=limits.MAX_CONTEXT_TOKENS)]
    """The answer has so many tokens at most: it ends where the model's context does."""
    stop_sequences: (
        Annotated[list[Annotated[str, Field(min_length=1, max_length=STOP_CHARS_MAX)]], MaxItems(STOPS_MAX)] | None
    ) = None
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Field(ge=0, lt=limits.MAX_VOCAB)] | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    """This has no effect: the tenant's own priority class serves."""
