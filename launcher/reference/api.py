"""`python -m launcher.reference.api [FILE]`: every field of every request, made from the types that check requests."""

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
from pydantic import BaseModel

from gateway.anthropic import types as anthropic
from gateway.openai.openapi import schemas
from gateway.openai.request_types import INSTEAD, NEUTRAL_ONLY, ChatRequest, CompletionRequest
from gateway.responses import types as responses
from gateway.vllm.types import DetokenizeRequest, TokenizeRequest

_HEAD = """\
# API

Made by `python -m launcher.reference.api docs/api.md` from the types that requests are checked with; a test fails when it is
stale. `/openapi.json` of a gateway describes the same in OpenAPI 3.1, with the answers.

Nothing is accepted and ignored. Each field is one of these:

- **supported**: it does what its API says.
- **without effect**: it is accepted, and by design changes nothing, for the reason that stands there.
- **refused**: any value is answered with 400 and a message that names the field, except those that ask for nothing, which stand
  there. Fields that are not in the tables are refused as unknown.

Beside these, `/v1/models`, `/v1/models/{id}`, `/version` and `/health` are GET requests without fields, and so are
`/v1/responses/{id}` with GET and DELETE. Images, audio and files are refused wherever messages may have parts.

`system_fingerprint` in an answer stands for the model's files, what computes and its versions: with a seed, two answers to the
same request can be equal only where it is equal. While workers differ, it stands for all of them together.
"""
_WITHOUT_EFFECT: Final[Mapping[str, str]] = {
    "user": "It is in the access log, for operators to find abuse.",
    "safety_identifier": "It is in the access log, for operators to find abuse.",
    "metadata": "It is given back with the response, or in the access log (`user_id`).",
    "prompt_cache_key": "The prefix cache finds prompts by their tokens.",
    "stream_options.include_obfuscation": "Only false: no padding is added.",
}
_WITHOUT_EFFECT_OF_MESSAGES: Final[Mapping[str, str]] = {
    "service_tier": "The tenant's own priority class serves.",
}
_ENDPOINTS: Final[tuple[tuple[str, str, type[BaseModel], Mapping[str, tuple[Any, ...]]], ...]] = (
    ("POST /v1/completions", "Goes on with a prompt.", CompletionRequest, NEUTRAL_ONLY),
    ("POST /v1/chat/completions", "Answers a conversation.", ChatRequest, NEUTRAL_ONLY),
    (
        "POST /v1/responses",
        "Answers a conversation, and keeps it for a while in the memory of the gateway that answered (`--responses-keep-s`).",
        responses.ResponsesRequest,
        responses.NEUTRAL_ONLY,
    ),
    (
        "POST /v1/messages",
        "Anthropic's form. Keys may come as `x-api-key`.",
        anthropic.MessagesRequest,
        anthropic.NEUTRAL_ONLY,
    ),
    (
        "POST /v1/messages/count_tokens",
        "Counts a conversation's tokens.",
        anthropic.CountRequest,
        anthropic.NEUTRAL_ONLY,
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
        notes = [
            f"{need}{_kind(what)}.",
            " ".join((without.get(field) or what.get("description", "")).split()),
        ]
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
            cell = note.replace("|", "\\|")
            lines.append(f"| `{field}` | {status} | {cell} |")
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def main() -> None:
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(text(), encoding="utf-8")
    else:
        sys.stdout.write(text())


if __name__ == "__main__":
    main()
