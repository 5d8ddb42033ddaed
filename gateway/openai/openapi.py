"""The API's own description, `/openapi.json`: made of the types that requests are checked with, so that they do not differ."""

from typing import Any, Final

from pydantic import BaseModel

from gateway.openai.request_types import (
    MESSAGES_MAX,
    PROMPTS_MAX,
    STOP_CHARS_MAX,
    STOPS_MAX,
    ChatRequest,
    CompletionRequest,
)
from proto import limits

_REFS: Final = "#/components/schemas/{model}"
_TEXT: Final = {"type": "string"}
_TOKEN_IDS: Final = {
    "type": "array",
    "minItems": 1,
    "maxItems": limits.MAX_CONTEXT_TOKENS,
    "items": {"type": "integer", "minimum": 0, "maximum": limits.MAX_VOCAB - 1},
}
_STOP: Final = {"type": "string", "minLength": 1, "maxLength": STOP_CHARS_MAX}
_LOOSE: Final[dict[str, Any]] = {
    "prompt": {
        "anyOf": [
            _TEXT,
            _TOKEN_IDS,
            {"type": "array", "minItems": 1, "maxItems": PROMPTS_MAX, "items": _TEXT},
            {"type": "array", "minItems": 1, "maxItems": PROMPTS_MAX, "items": _TOKEN_IDS},
        ]
    },
    "stop": {"anyOf": [_STOP, {"type": "array", "maxItems": STOPS_MAX, "items": _STOP}, {"type": "null"}]},
    "priority": {"anyOf": [{"type": "string"}, {"type": "null"}, {"const": 0}]},
    "logit_bias": {
        "anyOf": [
            {
                "type": "object",
                "maxProperties": limits.MAX_LOGIT_BIAS,
                "propertyNames": {"pattern": "^[0-9]{1,9}$"},
                "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
            },
            {"type": "null"},
        ]
    },
}
"""Fields that code checks where a type could not, or would say it badly."""
_ERROR: Final = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code", "request_id"],
            "properties": {
                "message": _TEXT,
                "type": _TEXT,
                "param": {"type": ["string", "null"]},
                "code": _TEXT,
                "request_id": {"type": "string", "description": "As in the header `X-Request-Id`."},
            },
        }
    },
}
_REFUSALS: Final = {
    "400": "A parameter is wrong; `param` names it.",
    "401": "The API key is missing or not valid.",
    "403": "The tenant may not use this priority class.",
    "404": "There is no such model or path.",
    "405": "The method is not allowed here.",
    "408": "The request took too long to arrive.",
    "413": "The body is too large.",
    "415": "The Content-Type is not application/json.",
    "429": "A quota or a queue is full; `Retry-After` says until when.",
    "503": "There is no capacity now.",
}


def _schemas() -> dict[str, Any]:
    found: dict[str, Any] = {"Error": _ERROR}
    models: tuple[type[BaseModel], ...] = (CompletionRequest, ChatRequest)
    for model in models:
        schema = model.model_json_schema(ref_template=_REFS)
        found |= schema.pop("$defs", {})
        schema["properties"] |= {name: loose for name, loose in _LOOSE.items() if name in schema["properties"]}
        found[model.__name__] = schema
    assert found["ChatRequest"]["properties"]["messages"]["maxItems"] == MESSAGES_MAX
    return found


def _answers(*media_types: str, refusals: tuple[str, ...] = ()) -> dict[str, Any]:
    error = {"application/json": {"schema": {"$ref": _REFS.format(model="Error")}}}
    ok = {"description": "The answer.", "content": {media_type: {} for media_type in media_types}}
    return {"200": ok} | {status: {"description": _REFUSALS[status], "content": error} for status in refusals}


def _generation(model: type[BaseModel], summary: str) -> dict[str, Any]:
    return {
        "post": {
            "summary": summary,
            "requestBody": {
                "required": True,
                "content": {"application/json": {"schema": {"$ref": _REFS.format(model=model.__name__)}}},
            },
            "responses": _answers("application/json", "text/event-stream", refusals=tuple(_REFUSALS)),
            "security": [{"key": []}, {}],
        }
    }


def _reading(summary: str, media_type: str = "application/json", *refusals: str) -> dict[str, Any]:
    return {"summary": summary, "responses": _answers(media_type, refusals=refusals)}


def document() -> dict[str, Any]:
    """OpenAPI 3.1."""
    model_id = {"name": "model_id", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "crossdock", "version": "1", "description": "OpenAI's API for completions and chat."},
        "paths": {
            "/v1/completions": _generation(CompletionRequest, "Go on with a prompt."),
            "/v1/chat/completions": _generation(ChatRequest, "Answer a conversation."),
            "/v1/models": {"get": _reading("The models served here.", "application/json", "401")},
            "/v1/models/{model_id}": {
                "get": _reading("One model.", "application/json", "401", "404") | {"parameters": [model_id]}
            },
            "/health": {"get": _reading("200 while the process answers.")},
        },
        "components": {"schemas": _schemas(), "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
    }
