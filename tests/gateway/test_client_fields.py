"""Every field that the vendors' packages can send is decided: served, a hint without effect, or refused by its name."""

import typing
from typing import Any

import pytest
from anthropic import types as anthropic
from anthropic.types import beta
from anthropic.types import message_create_params as messages
from anthropic.types.beta import message_count_tokens_params as beta_count
from anthropic.types.beta import message_create_params as beta_messages
from openai.types import chat, completion_create_params, responses, shared_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import namespace_tool_param, response_create_params, response_input_param

from gateway.anthropic import convert as from_anthropic
from gateway.anthropic import types as to_anthropic
from gateway.http.errors import ApiError
from gateway.openai.request_types import (
    NEUTRAL_ONLY,
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    StreamOptions,
    TextPart,
    ToolCall,
    validate,
)
from gateway.responses import convert as from_responses
from gateway.responses import types as to_responses
from gateway.responses.convert import as_chat, input_items
from gateway.responses.tools import _HINTS
from gateway.tools.request import _FUNCTION_FIELDS, tools_of
from tools import api

HEADERS = {"betas", "user_profile_id", "workspace_id"}
"""Parameters of Anthropic's package that it sends as headers; `betas` is known in a body as well."""
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}
USER = {"role": "user", "content": "Hi"}


@pytest.mark.parametrize(
    ("sent", "known"),
    [
        (chat_params.CompletionCreateParamsBase, {*ChatRequest.model_fields, *NEUTRAL_ONLY}),
        (completion_create_params.CompletionCreateParamsBase, {*CompletionRequest.model_fields, *NEUTRAL_ONLY}),
        (response_create_params.ResponseCreateParamsBase,
         {*to_responses.ResponsesRequest.model_fields, *to_responses.NEUTRAL_ONLY}),
        (messages.MessageCreateParamsBase, {*to_anthropic.MessagesRequest.model_fields, *to_anthropic.NEUTRAL_ONLY}),
        (beta_messages.MessageCreateParamsBase,
         {*to_anthropic.MessagesRequest.model_fields, *to_anthropic.NEUTRAL_ONLY}),
        (beta_count.MessageCountTokensParams, {*to_anthropic.CountRequest.model_fields, *to_anthropic.NEUTRAL_ONLY}),
        (chat.ChatCompletionStreamOptionsParam, {*StreamOptions.model_fields}),
        (chat.ChatCompletionAssistantMessageParam, {*ChatMessage.model_fields}),
        (chat.ChatCompletionUserMessageParam, {*ChatMessage.model_fields}),
        (chat.ChatCompletionToolMessageParam, {*ChatMessage.model_fields}),
        (chat.ChatCompletionFunctionMessageParam, {*ChatMessage.model_fields}),
        (chat.ChatCompletionContentPartTextParam, {*TextPart.model_fields}),
        (chat.ChatCompletionMessageFunctionToolCallParam, {*ToolCall.model_fields}),
        (shared_params.FunctionDefinition, _FUNCTION_FIELDS),
        (shared_params.Reasoning, {*to_responses.ReasoningOptions.model_fields}),
        (responses.ResponseTextConfigParam, {*to_responses.TextOptions.model_fields}),
        (response_create_params.StreamOptions, {*to_responses.ResponsesStreamOptions.model_fields}),
        (anthropic.OutputConfigParam, {*to_anthropic.OutputConfig.model_fields}),
        (beta.BetaOutputConfigParam, {*to_anthropic.OutputConfig.model_fields}),
        (anthropic.ThinkingConfigEnabledParam, {*to_anthropic.Thinking.model_fields}),
        (beta.BetaThinkingConfigEnabledParam, {*to_anthropic.Thinking.model_fields}),
        (anthropic.ThinkingConfigAdaptiveParam, {*to_anthropic.Thinking.model_fields}),
        (anthropic.MetadataParam, {*to_anthropic.Metadata.model_fields}),
        (anthropic.CacheControlEphemeralParam, {*to_anthropic.CacheControl.model_fields}),
        (anthropic.ToolParam,
         {*from_anthropic._TOOL_FIELDS, *from_anthropic._TOOL_HINTS, "allowed_callers"}),
        (beta.BetaToolParam, {*from_anthropic._TOOL_FIELDS, *from_anthropic._TOOL_HINTS, "allowed_callers"}),
        (responses.FunctionToolParam, {*_FUNCTION_FIELDS, *_HINTS}),
        (namespace_tool_param.NamespaceToolParam, {"type", "name", "tools", "description"}),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)  # fmt: skip
def test_every_vendor_field_is_decided(sent: Any, known: set[str]) -> None:
    """Every field of the vendors' packages is served, accepted as a hint or refused by name."""
    names = set(typing.get_type_hints(sent)) - (HEADERS if "anthropic" in sent.__module__ else set())
    assert names, sent
    assert not names - known, "decide these: serve them, accept them as hints, or refuse them by name"


ITEMS_REFUSED = {
    "file_search_call", "computer_call", "computer_call_output", "image_generation_call", "code_interpreter_call",
    "mcp_approval_request", "mcp_approval_response", "mcp_call", "compaction", "compaction_trigger", "item_reference",
    "program", "program_output", "additional_tools", "configuration_update",
}  # fmt: skip
"""They ask this server for what it has not, or hold what would be missed."""


def test_every_response_item_type_is_decided() -> None:
    """Every type of input item of OpenAI's responses is served, dropped or refused by name."""
    kinds = set[str]()
    for item in typing.get_args(response_input_param.ResponseInputItemParam):
        kinds |= set(typing.get_args(_bare(typing.get_type_hints(item).get("type", str)))) - {type(None)}
    served = {"message", "function_call", "reasoning", *from_responses._CALLS, *from_responses._RESULTS}
    assert {kind for kind in kinds if isinstance(kind, str)} == served | {*from_responses._DROPPED} | ITEMS_REFUSED
    for kind in ITEMS_REFUSED:
        request = validate(to_responses.ResponsesRequest, {"model": "m", "input": [{"type": kind}]}, {})
        with pytest.raises(ApiError, match=r"'input\[0\].type'"):
            as_chat(request, input_items(request))


def _bare(hint: Any) -> Any:
    """`Literal` out of `Optional`."""
    return next((part for part in typing.get_args(hint) if typing.get_origin(part) is typing.Literal), hint)


BLOCKS_SHOWN = {"text", "tool_use", "thinking", "redacted_thinking"}


def test_every_message_block_type_is_decided() -> None:
    """Every type of block in an assistant message of Anthropic's API is shown or refused."""
    union = typing.get_args(typing.get_type_hints(anthropic.AssistantMessageParam)["content"])[1]
    for block in typing.get_args(typing.get_args(union)[0]):
        if not block.__name__.endswith("Param"):
            continue
        (kind,) = typing.get_args(typing.get_type_hints(block)["type"])
        body = {"type": kind, "text": "x", "thinking": "x", "data": "x", "id": "i", "name": "f", "input": {}}
        turns = [USER, {"role": "assistant", "content": [body]}, USER]
        request = validate(to_anthropic.MessagesRequest, {"model": "m", "max_tokens": 9, "messages": turns}, {})
        if kind in BLOCKS_SHOWN:
            from_anthropic.as_chat(request)
        else:
            with pytest.raises(ApiError, match=r"'messages\[1\].content\[0\].type'"):
                from_anthropic.as_chat(request)


HINTS: dict[type, dict[str, list[Any]]] = {
    ChatRequest: {
        "verbosity": ["low", "medium", "high"],
        "prediction": [{"type": "content", "content": "x"}],
        "metadata": [{}, {"a": "b"}],
        "prompt_cache_key": ["k"],
        "prompt_cache_options": [{}, {"mode": "implicit", "ttl": "30m"}],
        "prompt_cache_retention": ["in_memory", "24h"],
        "reasoning_effort": ["none", "minimal", "low", "medium", "high", "xhigh", "max"],
        "service_tier": ["auto", "default", "flex", "scale", "priority", "fast"],
    },
    to_responses.ResponsesRequest: {
        "include": [[], ["reasoning.encrypted_content"], ["web_search_call.action.sources", "code_interpreter_call.outputs"]],
        "reasoning": [{"effort": "medium", "summary": "auto"}, {"generate_summary": "concise"}, {"context": "auto"}],
        "text": [{"verbosity": "low"}, {"verbosity": "high", "format": {"type": "text"}}],
        "truncation": ["auto", "disabled"],
        "client_metadata": [{"x-installation": "a", "n": 1}],
        "max_tool_calls": [5],
        "prompt_cache_options": [{"mode": "implicit"}],
        "prompt_cache_retention": ["24h"],
        "context_management": [[], [{"type": "compaction", "compact_threshold": 1000}]],
        "service_tier": ["auto", "ultrafast"],
        "image": [{"context_compression": "auto"}],
        "access_programs": [{"cyber": "standard"}],
        "store": [False, True],
    },
    to_anthropic.MessagesRequest: {
        "thinking": [{"type": "enabled", "budget_tokens": 31_999}, {"type": "adaptive", "budget_tokens": 0},
                     {"type": "disabled"}, {"type": "adaptive", "display": "omitted"}],
        "output_config": [{"effort": "high"}, {"effort": "low", "task_budget": {"type": "tokens", "total": 9}}],
        "cache_control": [{"type": "ephemeral"}, {"type": "ephemeral", "ttl": "1h"}],
        "context_management": [{"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}],
        "diagnostics": [{"previous_message_id": None}],
        "speed": ["fast", "standard"],
        "betas": [["context-1m-2025-08-07", "interleaved-thinking-2025-05-14"]],
        "fallbacks": ["default", [{"model": "other"}]],
        "mcp_servers": [[]],
        "inference_geo": ["global"],
        "service_tier": ["auto", "standard_only"],
        "metadata": [{"user_id": "u"}],
    },
}  # fmt: skip


def _asked(cls: type, more: dict[str, Any]) -> Any:
    if cls is to_responses.ResponsesRequest:
        request = validate(
            to_responses.ResponsesRequest, {"model": "m", "input": "Hi", **more}, to_responses.NEUTRAL_ONLY
        )
        return as_chat(request, input_items(request))
    if cls is to_anthropic.MessagesRequest:
        body = {"model": "m", "max_tokens": 9, "messages": [USER], **more}
        return from_anthropic.as_chat(validate(to_anthropic.MessagesRequest, body, to_anthropic.NEUTRAL_ONLY))
    return validate(ChatRequest, {"model": "m", "messages": [USER], **more})


@pytest.mark.parametrize(("cls", "name"), [(cls, name) for cls, fields in HINTS.items() for name in fields])
def test_hints_are_accepted_and_checked(cls: type, name: str) -> None:
    """Hints are accepted with right values and refused with wrong ones."""
    for value in [*HINTS[cls][name], None]:
        _asked(cls, {name: value})
    wrong: list[Any] = [7.5, "nonsense" if name != "prompt_cache_key" else 7, [7]]
    for value in wrong:
        with pytest.raises(ApiError) as caught:
            _asked(cls, {name: value})
        assert caught.value.status == 400 and str(caught.value.param).startswith(name)


def test_hints_are_listed_in_docs() -> None:
    """The API's page lists every hint."""
    text = api.text()
    for cls, title in ((ChatRequest, "chat/completions"), (to_responses.ResponsesRequest, "responses")):
        part = text.partition(f"## POST /v1/{title}\n")[2].partition("\n## ")[0]
        for name in HINTS[cls]:
            assert f"| `{name}` |" in part
    for name in (
        "thinking.budget_tokens",
        "tools[].eager_input_streaming",
        "tools[].defer_loading",
        "reasoning.summary",
    ):
        assert f"- `{name}`: " in text


def test_server_tools_are_left_out() -> None:
    """Tools that OpenAI would run are left out if functions remain."""
    tools = [
        {"type": "web_search", "external_web_access": False},
        {**TOOL, "strict": False, "defer_loading": True, "output_schema": {}},
        {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark", "definition": "start: x"}},
        {"type": "namespace", "name": "mcp__git", "description": "x", "tools": [TOOL, {"type": "custom", "name": "c"}]},
        {"type": "local_shell"},
        {"type": "image_generation"},
    ]  # fmt: skip
    offered = _asked(to_responses.ResponsesRequest, {"tools": tools, "tool_choice": "auto"})
    found = tools_of({"tools": offered.tools})
    assert found is not None and [tool.name for tool in found.offered] == ["f", "mcp__git__f"]
    for alone in (tools[:1], tools[2:3], [{"type": "namespace", "name": "n", "tools": []}]):
        with pytest.raises(ApiError, match=r"'tools\[0\].type'"):
            _asked(to_responses.ResponsesRequest, {"tools": alone})
