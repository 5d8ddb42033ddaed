"""`python -m tools.api [FILE]`: every field of every request, made from the types that check requests."""

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
from pydantic import BaseModel

from gateway.anthropic import types
from gateway.batches.types import CreateBatchRequest, UploadRequest
from gateway.openai.request_types import INSTEAD, NEUTRAL_ONLY, ChatRequest, CompletionRequest
from gateway.responses import types as responses_types
from gateway.vllm.routes import DetokenizeRequest, TokenizeRequest
from tools.openapi import schemas

_HEAD = """\
# API

This page lists each field of a request, whether it is supported, and what it does here. Made by
`python -m tools.api docs/api.md` from the types that requests are checked with; a test fails when it is
stale. `/openapi.json` of a gateway describes the same in OpenAPI 3.1, with the answers.

A field that would change an answer is never silently ignored. Each field is one of these:

- **supported**: it does what its API says.
- **without effect**: it is accepted and, by design, changes nothing. The table gives the reason.
- **refused**: any value is answered with 400 and a message that names the field. The table lists the values that are accepted
  because they request nothing. Fields that are not in the tables are refused as unknown.

Beside these, `/v1/models`, `/v1/models/{id}`, `/version`, `/health`, `/metrics` (see [metrics](metrics.md)) and
`/tokenizer_info` (special tokens and chat template, `?model=` names one) are GET requests without fields, and so are
`/v1/responses/{id}` with GET and DELETE, and `/v1/sessions/{id}` with DELETE, which ends a session: what only it has in caches
is given up. A session is a conversation: its name is `session_id`, or the header `X-Session-Id` with any of these APIs, or
`prompt_cache_key`. Without a name, its next turn is found by its prompt. `/v1/files` and `/v1/batches` have
[a page of their own](batches.md). Images, audio and files are refused wherever messages may have parts. A compressed body
(`Content-Encoding`) is answered with 415.

`system_fingerprint` in an answer identifies the model's files, the compute backend and its versions. With a seed, two answers
to the same request can be equal only if it is equal. While workers differ, it stands for all of them together.
"""
_WITHOUT_EFFECT: Final[Mapping[str, str]] = {
    "user": "It is in the access log, for operators to find abuse.",
    "safety_identifier": "It is in the access log, for operators to find abuse.",
    "metadata": "It is given back with the response, or in the access log (`user_id`).",
    "prompt_cache_options": "The prefix cache needs no options; `cache_salt` keeps prompts apart.",
    "prompt_cache_retention": "Prompts stay cached until their room is needed.",
    "verbosity": "An answer is as long as the model makes it.",
    "prediction": "Nothing is gained by it here.",
    "client_metadata": "Labels of the client's own.",
    "include": "No answer has any of it: thoughts are given in the clear, and this server runs no tools.",
    "max_tool_calls": "It bounds the tools that a server runs.",
    "truncation": "Nothing is left out of a conversation: one that is too long is refused.",
    "context_management": "Nothing is left out of a conversation: one that is too long is refused.",
    "image": "This server reads text.",
    "store": "Only /v1/responses keeps answers.",
    "betas": "The same forms are accepted with and without.",
    "cache_control": "The prefix cache finds prompts by their tokens.",
    "diagnostics": "`usage` says how many tokens were cached.",
    "fallbacks": "No model declines before it answers.",
    "speed": "Each answer comes as fast as it can.",
}
_WITHOUT_EFFECT_OF_MESSAGES: Final[Mapping[str, str]] = {"service_tier": "The tenant's own priority class serves."}
_CACHE: Final = "The prefix cache finds prompts by their tokens."
_OF_MESSAGES: Final[Mapping[str, str]] = {
    "thinking.budget_tokens": "A thought is as long as the model makes it.",
    "thinking.display": "Thoughts are shown.",
    "thinking.block_binding": "Thoughts have no signature.",
    "output_config.task_budget": "An answer is as long as the model makes it.",
    "tools[].cache_control": _CACHE,
    "tools[].eager_input_streaming": "Arguments are streamed as they come.",
    "tools[].defer_loading": "The model is shown every tool from the beginning.",
    "tools[].input_examples": "Put them into the description.",
    "tools[].allowed_callers": "With `direct`; refused without.",
    "messages[].content[].cache_control": f"In `system` as well. {_CACHE}",
    "messages[].content[].redacted_thinking": "A block that only the server which wrote it can read.",
}
_INSIDE: Final[Mapping[str, Mapping[str, str]]] = {
    "POST /v1/chat/completions": {
        "messages[].cache_control": _CACHE,
        "messages[].content[].cache_control": f"Also `prompt_cache_breakpoint`. {_CACHE}",
        "messages[].annotations": "Of an assistant's message, as `audio` and every field that is not named here: an answer of"
        " any server can be sent back. `refusal` is its content where it has none, and `reasoning` is `reasoning_content`.",
        "tools[].cache_control": _CACHE,
        "stream_options.include_obfuscation": "Only false: no padding is added.",
    },
    "POST /v1/responses": {
        "text.verbosity": "An answer is as long as the model makes it.",
        "reasoning.summary": "Also `generate_summary` and `context`. Thoughts are given whole.",
        "input[].encrypted_content": "Of a thought; only the server that wrote it can read it.",
        "input[].web_search_call": "An item without a result, as `mcp_list_tools`. Calls of `local_shell`, `shell`,"
        " `apply_patch`, `tool_search` and custom tools, and their results, are shown to the model as those of functions.",
        "tools[].defer_loading": "Also `output_schema`. The model is shown every function from the beginning.",
        "tools[].type": "Tools of other types than `function` and `namespace` are left out, and the answer's `tools` are those"
        " that were kept. Refused where `tool_choice` names one, or no function remains.",
        "stream_options.include_obfuscation": "Only false: no padding is added.",
    },
    "POST /v1/messages": _OF_MESSAGES,
    "POST /v1/messages/count_tokens": _OF_MESSAGES,
}
"""Fields inside of others that have no effect."""
_ENDPOINTS: Final[tuple[tuple[str, str, type[BaseModel], Mapping[str, tuple[Any, ...]]], ...]] = (
    ("POST /v1/completions", "Goes on with a prompt.", CompletionRequest, NEUTRAL_ONLY),
    ("POST /v1/chat/completions", "Answers a conversation.", ChatRequest, NEUTRAL_ONLY),
    (
        "POST /v1/responses",
        "Answers a conversation, and keeps it for a while (`--responses-keep-s`): in the memory of the gateway that answered,"
        " or in [a database](high-availability.md) of all gateways (`--database`). While that does not answer, no response is"
        " kept, and `previous_response_id` and GET get 503 with `Retry-After`.",
        responses_types.ResponsesRequest,
        responses_types.NEUTRAL_ONLY,
    ),
    ("POST /v1/messages", "Anthropic's form. Keys may come as `x-api-key`.", types.MessagesRequest, types.NEUTRAL_ONLY),
    ("POST /v1/messages/count_tokens", "Counts a conversation's tokens.", types.CountRequest, types.NEUTRAL_ONLY),
    (
        "POST /v1/files",
        "A form (multipart/form-data). Also GET `/v1/files` with `after`, `limit`, `order` and `purpose`, GET and DELETE"
        " `/v1/files/{id}`, and GET `/v1/files/{id}/content`: see [batches](batches.md).",
        UploadRequest,
        {},
    ),
    (
        "POST /v1/batches",
        "Also GET `/v1/batches` with `after` and `limit`, GET `/v1/batches/{id}`, and POST `/v1/batches/{id}/cancel`.",
        CreateBatchRequest,
        {},
    ),
    ("POST /tokenize", "vLLM's.", TokenizeRequest, {}),
    ("POST /detokenize", "vLLM's.", DetokenizeRequest, {}),
)


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"


def _kind(schema: Mapping[str, Any]) -> str:
    """A field's type with its bounds, in a few words."""
    if "$ref" in schema:
        return "object"
    if "anyOf" in schema:
        parts = [_kind(part) for part in schema["anyOf"] if part.get("type") != "null"]
        return " or ".join(dict.fromkeys(parts))
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if "const" in schema:
        return f"`{msgspec.json.encode(schema['const']).decode()}`"
    kind = str(schema.get("type", "any"))
    low, high = (
        schema.get("minimum", schema.get("exclusiveMinimum")),
        schema.get("maximum", schema.get("exclusiveMaximum")),
    )
    if low is not None and high is not None:
        above = "above " if "exclusiveMinimum" in schema else ""
        below = "below " if "exclusiveMaximum" in schema else ""
        return f"{kind}, {above}{_number(low)} to {below}{_number(high)}"
    if kind == "array":
        most = f", at most {schema['maxItems']}" if "maxItems" in schema else ""
        return f"array of {_kind(schema.get('items', {}))}{most}"
    if kind == "string" and "maxLength" in schema:
        return f"string of at most {schema['maxLength']} characters"
    return kind


def _rows(name: str, cls: type[BaseModel], neutral: Mapping[str, tuple[Any, ...]]) -> Iterator[tuple[str, str, str]]:
    schema = schemas((cls,))[cls.__name__]
    required = set(schema.get("required", ()))
    without = {**_WITHOUT_EFFECT, **(_WITHOUT_EFFECT_OF_MESSAGES if "/v1/messages" in name else {})}
    for field, what in schema["properties"].items():
        status = "without effect" if field in without else "supported"
        need = "required; " if field in required else ""
        notes = [f"{need}{_kind(what)}.", " ".join((without.get(field) or what.get("description", "")).split())]
        yield field, status, " ".join(filter(None, notes))
    for field, values in neutral.items():
        if field not in schema["properties"]:
            given = [f"`{msgspec.json.encode(value).decode()}`" for value in values if value is not None]
            but = f"Accepted: {', '.join(given)}." if given else ""
            yield (
                field,
                "refused",
                " ".join(filter(None, (but, INSTEAD.get(field, "") if neutral is NEUTRAL_ONLY else ""))),
            )


def text() -> str:
    parts = [_HEAD]
    for name, about, cls, neutral in _ENDPOINTS:
        parts.append(f"## {name}\n\n{about}\n")
        lines = ["| field | | |", "|---|---|---|"]
        for field, status, note in _rows(name, cls, neutral):
            entry = note.replace("|", "\\|")
            lines.append(f"| `{field}` | {status} | {entry} |")
        parts.append("\n".join(lines) + "\n")
        if inside := _INSIDE.get(name):
            parts.append("Inside of these, without effect:\n")
            parts.append("\n".join(f"- `{field}`: {note}" for field, note in inside.items()) + "\n")
    return "\n".join(parts)


def main() -> None:
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(text(), encoding="utf-8")
    else:
        sys.stdout.write(text())


if __name__ == "__main__":
    main()
