"""The API's description, `/openapi.json`. FastAPI generates it from the routes, from the types that validate requests, and
from the types that answers are tested against. `gateway.http.body` reads the bodies, so the routes must name their types
here."""

from typing import Any, Final

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from gateway.http.bounds import Text
from gateway.openai.answer_types import Error
from gateway.openai.request_types import PROMPTS_MAX, STOP_CHARS_MAX, STOPS_MAX
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
    "priority": {
        "anyOf": [
            {"type": "string"},
            {"type": "null"},
            {"type": "integer", "minimum": -limits.MAX_PRIORITY, "maximum": limits.MAX_PRIORITY},
        ]
    },
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
"""Schemas of fields that code checks, because a type could not check them or would give a poor error."""
_REFUSALS: Final = {
    400: "A parameter is wrong; `param` names it.",
    401: "The API key is missing or not valid.",
    403: "The tenant may not use this priority class.",
    404: "There is no such model or path.",
    405: "The method is not allowed here.",
    408: "The request took too long to arrive.",
    409: "What is asked for is in use, or has ended.",
    413: "The body is too large.",
    415: "The Content-Type is not application/json.",
    429: "A quota or a queue is full; `Retry-After` says until when.",
    503: "There is no capacity now.",
}
TOKENIZED: Final = (400, 401, 404, 408, 413, 415, 429, 503)
"""Refusals of requests that need a tokenizer only."""
Responses = dict[int | str, dict[str, Any]]


def refusals(*statuses: int, error: type[BaseModel] = Error) -> Responses:
    """The refusals for a route's `responses`."""
    return {status: {"description": _REFUSALS[status], "model": error} for status in statuses}


def streamed(event: type[BaseModel], error: type[BaseModel] = Error) -> Responses:
    """The `responses` of a route that answers whole or as a stream of such events."""
    content = {"text/event-stream": {"schema": {"$ref": _REFS.format(model=event.__name__)}}}
    return {200: {"description": "The answer.", "content": content}} | refusals(
        *sorted(_REFUSALS.keys() - {409}), error=error
    )


def body_of(model: type[BaseModel], media_type: str = "application/json") -> dict[str, Any]:
    """The `openapi_extra` of a route whose body is such a one."""
    schema = {"$ref": _REFS.format(model=model.__name__)}
    return {"requestBody": {"required": True, "content": {media_type: {"schema": schema}}}}


def schemas(models: tuple[type[BaseModel], ...]) -> dict[str, Any]:
    """JSON schemas of types and of what they are made of, by name."""
    found: dict[str, Any] = {}
    for model in models:
        schema = model.model_json_schema(ref_template=_REFS)
        found |= schema.pop("$defs", {})
        fields = schema["properties"]
        for name in _LOOSE.keys() & fields.keys():
            if model.model_fields[name].annotation == Text | None:  # /tokenize takes one prompt, which is a text
                continue
            about = {key: fields[name][key] for key in ("description",) if key in fields[name]}
            fields[name] = about | _LOOSE[name]
        found[model.__name__] = schema
    return found


def describe(app: FastAPI, models: tuple[type[BaseModel], ...]) -> None:
    """Have `app` describe itself. `models`: types that its routes name with `body_of` and `streamed`."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            made = get_openapi(title=app.title, version=app.version, summary=app.summary, routes=app.routes, tags=[])
            found = made["components"]["schemas"]
            found |= schemas(models)
            for path in made["paths"].values():
                for operation in path.values():
                    operation["responses"].pop("422", None)  # FastAPI's own check of parameters, which finds no fault
            for unused in ("HTTPValidationError", "ValidationError"):
                found.pop(unused, None)
            app.openapi_schema = made
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]
    served: list[bytes] = []

    async def openapi(_: Request) -> Response:
        if not served:  # made once, since any client may request it at any rate
            served.append(msgspec.json.encode(document()))
        return Response(served[0], media_type="application/json")

    app.add_route("/openapi.json", openapi, include_in_schema=False)
