"""`python -m tools.openapi [FILE]`: the API's description, `/openapi.json`, made from the gateway's routes, from the types that
check requests, and from the types that answers are tested against."""

import inspect
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec
from pydantic import BaseModel

from gateway.anthropic.types import CountRequest, MessagesRequest
from gateway.app import ROUTES
from gateway.batches.types import CreateBatchRequest, UploadRequest
from gateway.http.bounds import Text
from gateway.openai.call import Endpoint
from gateway.openai.request_types import PROMPTS_MAX, STOP_CHARS_MAX, STOPS_MAX, ChatRequest, CompletionRequest
from gateway.responses.types import ResponsesRequest
from gateway.vllm.routes import DetokenizeRequest, TokenizeRequest
from proto import limits
from tools import answer_types as answers

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
    401: "The API key or token is missing or not valid.",
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
_TOKENIZED: Final = (400, 401, 404, 408, 413, 415, 429, 503)
"""Refusals of requests that need a tokenizer only."""
_GENERATED: Final = (400, 401, 403, 404, 405, 408, 413, 415, 429, 503)
_POSTED: Final = (400, 401, 403, 404, 408, 413, 415, 429, 503)
_STORED: Final = (401, 404, 429, 503)
Answer = type[BaseModel] | str


@dataclass(frozen=True)
class About:
    tag: str
    summary: str
    answer: Answer
    """A type, or the media type of a text."""
    refusals: tuple[int, ...] = ()
    body: type[BaseModel] | None = None
    event: type[BaseModel] | None = None
    """The type of a stream's events, if the answer may be a stream."""
    error: type[BaseModel] = answers.Error
    query: Mapping[str, str | None] = field(default_factory=dict)
    """Parameters of the query, with their defaults."""


_OPENAI, _ANTHROPIC, _TOKENS, _BATCHES, _STATE = "OpenAI", "Anthropic", "Tokens", "Batches", "Models and state"
_COMPLETION, _CHAT, _EVENT = answers.Completion, answers.ChatCompletion, answers.ChatCompletionChunk
_FILES: Final = {"after": "", "limit": "10000", "order": "desc", "purpose": ""}
ABOUT: Final[Mapping[str, About]] = {
    "POST /v1/completions": About(
        _OPENAI, "Go on with a prompt.", _COMPLETION, _GENERATED, CompletionRequest, _COMPLETION
    ),
    "POST /v1/chat/completions": About(_OPENAI, "Answer a conversation.", _CHAT, _GENERATED, ChatRequest, _EVENT),
    "POST /v1/responses": About(
        _OPENAI,
        "Answer a conversation, and keep it for the next.",
        answers.ResponseObject,
        _GENERATED,
        ResponsesRequest,
        answers.ResponseEvent,
    ),
    "GET /v1/responses/{response_id}": About(_OPENAI, "A response that is kept.", answers.ResponseObject, (401, 404)),
    "DELETE /v1/responses/{response_id}": About(_OPENAI, "Forget a response.", answers.DeletedResponse, (401, 404)),
    "POST /v1/messages": About(
        _ANTHROPIC,
        "Answer a conversation, in Anthropic's form.",
        answers.AnthropicMessage,
        _GENERATED,
        MessagesRequest,
        answers.MessageEvent,
        answers.AnthropicError,
    ),
    "POST /v1/messages/count_tokens": About(
        _ANTHROPIC,
        "The tokens that a conversation has.",
        answers.TokenCount,
        _TOKENIZED,
        CountRequest,
        error=answers.AnthropicError,
    ),
    "POST /tokenize": About(
        _TOKENS, "The tokens of a text or a conversation.", answers.TokenizeAnswer, _TOKENIZED, TokenizeRequest
    ),
    "POST /detokenize": About(
        _TOKENS, "The text of tokens, special ones included.", answers.DetokenizeAnswer, _TOKENIZED, DetokenizeRequest
    ),
    "GET /tokenizer_info": About(
        _TOKENS, "The special tokens and the chat template.", answers.TokenizerInfo, (401, 404), query={"model": None}
    ),
    "POST /v1/files": About(_BATCHES, "Upload the requests of a batch.", answers.FileObject, _POSTED, UploadRequest),
    "GET /v1/files": About(_BATCHES, "Files of this tenant.", answers.FileList, (400, *_STORED), query=_FILES),
    "GET /v1/files/{file_id}": About(_BATCHES, "One file.", answers.FileObject, _STORED),
    "DELETE /v1/files/{file_id}": About(_BATCHES, "Delete a file.", answers.DeletedFile, (409, *_STORED)),
    "GET /v1/files/{file_id}/content": About(_BATCHES, "The content of a file.", "application/jsonl", _STORED),
    "POST /v1/batches": About(
        _BATCHES,
        "Run the requests of a file when there is capacity to spare.",
        answers.BatchObject,
        _POSTED,
        CreateBatchRequest,
    ),
    "GET /v1/batches": About(
        _BATCHES,
        "Batches of this tenant, the newest first.",
        answers.BatchList,
        (400, *_STORED),
        query={"after": "", "limit": "20"},
    ),
    "GET /v1/batches/{batch_id}": About(_BATCHES, "One batch.", answers.BatchObject, _STORED),
    "POST /v1/batches/{batch_id}/cancel": About(
        _BATCHES, "End a batch without the requests that have not run.", answers.BatchObject, (409, *_STORED)
    ),
    "GET /v1/models": About(_STATE, "The models served here.", answers.ModelList, (401,)),
    "GET /v1/models/{model_id}": About(_STATE, "One model.", answers.Model, (401, 404)),
    "DELETE /v1/sessions/{session_id}": About(_STATE, "End a conversation.", answers.EndedSession, (401, 503)),
    "GET /metrics": About(
        _STATE,
        "This gateway's metrics, for Prometheus; the other processes have ports of their own.",
        "text/plain",
        (401, 404),
    ),
    "GET /version": About(_STATE, "The version of this server.", answers.Version),
    "GET /": About(_STATE, "As /health, for probes that ask for nothing else.", answers.Status),
    "GET /health": About(_STATE, "200 while this process answers.", answers.Status),
    "GET /ready": About(_STATE, "200 only while a request would be served.", answers.Ready, (503,)),
}
_SECURITY: Final = {
    "key": {"type": "http", "scheme": "bearer", "description": "An API key of a tenant, or a JSON Web Token, if any."},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": "As Anthropic's."},
}


def schemas(models: tuple[type[BaseModel], ...]) -> dict[str, Any]:
    """JSON schemas of types and of what they are made of, by name."""
    found: dict[str, Any] = {}
    for model in models:
        schema = model.model_json_schema(ref_template=_REFS)
        found |= schema.pop("$defs", {})
        fields = schema["properties"]
        for name in _LOOSE.keys() & fields.keys():
            if model.model_fields[name].annotation in (Text | None, str):  # /tokenize takes one prompt, which is a text
                continue
            about = {key: fields[name][key] for key in ("description",) if key in fields[name]}
            fields[name] = about | _LOOSE[name]
        found[model.__name__] = schema
    return found


def _content(answer: Answer) -> dict[str, Any]:
    if isinstance(answer, str):
        return {answer: {"schema": _TEXT}}
    return {"application/json": {"schema": {"$ref": _REFS.format(model=answer.__name__)}}}


def _parameters(path: str, about: About) -> Iterator[dict[str, Any]]:
    for name in re.findall(r"{(\w+)}", path):
        yield {"name": name, "in": "path", "required": True, "schema": _TEXT}
    for name, default in about.query.items():
        schema = _TEXT if default is None else _TEXT | {"default": default}
        yield {"name": name, "in": "query", "required": False, "schema": schema}


def _operation(endpoint: Endpoint, path: str, method: str, about: About) -> dict[str, Any]:
    responses: dict[str, Any] = {"200": {"description": "The answer.", "content": _content(about.answer)}}
    if about.event is not None:
        responses["200"]["content"] |= {"text/event-stream": _content(about.event)["application/json"]}
    for status in sorted(about.refusals):
        responses[str(status)] = {"description": _REFUSALS[status], "content": _content(about.error)}
    name = re.sub(r"\W", "_", f"{endpoint.handler.__name__}{path}_{method.lower()}")
    operation: dict[str, Any] = {
        "tags": [about.tag],
        "summary": about.summary,
        "operationId": name,
        "responses": responses,
    }
    if text := inspect.getdoc(endpoint.handler):
        operation["description"] = text
    if parameters := list(_parameters(path, about)):
        operation["parameters"] = parameters
    if about.body is not None:
        media_type = "multipart/form-data" if about.body is UploadRequest else "application/json"
        schema = _content(about.body)["application/json"]
        operation["requestBody"] = {"required": True, "content": {media_type: schema}}
    if endpoint.needs_key:
        operation["security"] = [{scheme: []} for scheme in _SECURITY]
    return operation


def models() -> tuple[type[BaseModel], ...]:
    """The types that the routes name."""
    found = [one for about in ABOUT.values() for one in (about.answer, about.body, about.event, about.error)]
    return tuple(one for one in dict.fromkeys(found) if isinstance(one, type))


def paths() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for route in ROUTES:
        path = route.path.replace(":path", "")
        assert isinstance(route.endpoint, Endpoint)
        for method in route.methods or ():
            if about := ABOUT.get(f"{method} {path}"):
                found.setdefault(path, {})[method.lower()] = _operation(route.endpoint, path, method, about)
    return found


def text() -> str:
    """The JSON document, with a line for each path and each schema."""
    version = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    info = {"title": "crossdock", "summary": "OpenAI's API for completions and chat.", "version": version}
    head = f'{{"openapi":"3.1.0","info":{_json(info)},"paths":{{'
    middle = f'}},"components":{{"securitySchemes":{_json(_SECURITY)},"schemas":{{'
    return "\n".join([head, _lines(paths()), middle, _lines(schemas(models())), "}}}\n"])


def _lines(values: Mapping[str, Any]) -> str:
    return ",\n".join(f"{_json(name)}:{_json(value)}" for name, value in values.items())


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def main() -> None:
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(text(), encoding="utf-8")
    else:
        sys.stdout.write(text())


if __name__ == "__main__":
    main()
