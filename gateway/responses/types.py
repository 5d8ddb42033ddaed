"""Requests to /v1/responses."""

from typing import Annotated, Any, Final, Literal

from pydantic import Field

from gateway.http.bounds import FIELDS_MAX, AnyObject, MaxItems, MaxKeys, Text
from gateway.openai.request_types import (
    IDENTIFIER_CHARS_MAX,
    KWARGS_MAX,
    MESSAGES_MAX,
    TOOLS_MAX,
    Hint,
    Neutral,
    RequestType,
    SharedFields,
)
from proto import limits

NEUTRAL_ONLY: Final[Neutral] = {
    "background": (None, False),
    "conversation": (None,),
    "moderation": (None,),
    "prompt": (None,),
    "top_logprobs": (None, 0),
    "include_reasoning": (None, True),
    "access_programs": (None, {"cyber": "standard"}),
}
_Included = Literal[
    "reasoning.encrypted_content", "file_search_call.results", "web_search_call.results", "web_search_call.action.sources",
    "message.input_image.image_url", "computer_call_output.output.image_url", "code_interpreter_call.outputs",
]  # fmt: skip
"""Nothing to include: no answer has any of it. Log-probabilities could be missed."""


class ResponsesStreamOptions(RequestType):
    include_obfuscation: Literal[False] | None = None


class TextOptions(RequestType):
    format: AnyObject | None = None
    """`text`, `json_object` or `json_schema`."""
    verbosity: Literal["low", "medium", "high"] | None = None
    """This has no effect."""


class ReasoningOptions(RequestType):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    """As far as the model's chat template takes it."""
    # Thoughts are given whole, without a summary. The following fields have no effect.
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    context: Literal["auto", "current_turn", "all_turns"] | None = None
    mode: Literal["standard"] | None = None


class ResponsesRequest(SharedFields):
    input: Text | Annotated[list[AnyObject], Field(min_length=1), MaxItems(MESSAGES_MAX)]
    instructions: Text | None = None
    """Not kept for the next response."""
    previous_response_id: Annotated[str, Field(max_length=128)] | None = None
    """A response that is still kept: its input and output come before `input`. Gateways share them only with `--database`: with
    several and without it, send a client to the same one each time, or send the items as `input`."""
    store: bool | None = None
    """Null is true: the response is kept for a while, for `previous_response_id`. Bounds may end that early."""
    stream_options: ResponsesStreamOptions | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=limits.MAX_CONTEXT_TOKENS)] | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    tools: Annotated[list[AnyObject], MaxItems(TOOLS_MAX)] | None = None
    """Functions, also in namespaces: this server runs no tools. Others are left out where functions remain, and refused where
    none do."""
    tool_choice: Annotated[str, Field(max_length=IDENTIFIER_CHARS_MAX)] | AnyObject | None = None
    parallel_tool_calls: bool | None = None
    metadata: (
        Annotated[dict[Annotated[str, Field(max_length=512)], Annotated[str, Field(max_length=512)]], MaxKeys(16)]
        | None
    ) = None
    """Given back with the response."""
    client_metadata: Hint | None = None
    include: Annotated[list[_Included], MaxItems(FIELDS_MAX)] | None = None
    max_tool_calls: Annotated[int, Field(ge=1, le=limits.MAX_CONTEXT_TOKENS)] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    context_management: Annotated[list[Hint], MaxItems(FIELDS_MAX)] | None = None
    image: Hint | None = None
    chat_template_kwargs: Annotated[dict[str, Any], MaxKeys(KWARGS_MAX)] | None = None
    """vLLM's: variables of the model's chat template."""
