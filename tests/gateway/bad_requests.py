"""Bad inputs and what they must be answered with. Data only, for the gateway alone and for a whole cluster."""

import json
from dataclasses import dataclass, field
from typing import Any

JSON_HEADERS = {"Content-Type": "application/json"}
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


@dataclass(frozen=True)
class BadRequest:
    name: str
    method: str
    path: str
    body: bytes
    status: int
    param: str | None
    code: str
    headers: dict[str, str] = field(default_factory=lambda: dict(JSON_HEADERS))


def table(*, model: str, context_tokens: int, vocab_size: int, body_bytes_max: int) -> list[BadRequest]:
    """Every kind of bad input, for a gateway that serves `model` without API keys."""
    rows: list[BadRequest] = []

    def raw(name: str, body: bytes, status: int = 400, code: str = "invalid_json", **other: Any) -> None:
        rows.append(BadRequest(name, "POST", COMPLETIONS, body, status, None, code, **other))

    def completion(name: str, param: str | None, code: str, status: int = 400, **fields: Any) -> None:
        body = {"model": model, "prompt": "Hi", "max_tokens": 4, **fields}
        body = {key: value for key, value in body.items() if value is not ...}
        rows.append(BadRequest(name, "POST", COMPLETIONS, json.dumps(body).encode(), status, param, code))

    def chat(name: str, param: str | None, code: str, status: int = 400, **fields: Any) -> None:
        body = {"model": model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, **fields}
        body = {key: value for key, value in body.items() if value is not ...}
        rows.append(BadRequest(name, "POST", CHAT, json.dumps(body).encode(), status, param, code))

    def message(name: str, param: str, code: str, content: Any) -> None:
        chat(name, param, code, messages=[content])

    # --- paths and methods
    rows += [
        BadRequest("unknown path", "GET", "/v1/nothing", b"", 404, None, "not_found"),
        BadRequest("unknown path outside v1", "GET", "/admin", b"", 404, None, "not_found"),
        BadRequest("trailing slash", "POST", "/v1/completions/", b"{}", 404, None, "not_found"),
        BadRequest("GET where POST is meant", "GET", COMPLETIONS, b"", 405, None, "method_not_allowed"),
        BadRequest("DELETE of a model", "DELETE", f"/v1/models/{model}", b"", 405, None, "method_not_allowed"),
        BadRequest("POST to health", "POST", "/health", b"{}", 405, None, "method_not_allowed"),
        BadRequest("unknown model looked up", "GET", "/v1/models/none", b"", 404, "model", "model_not_found"),
    ]
    # --- bodies
    raw("empty body", b"")
    raw("truncated JSON", b'{"model": "x", "prompt": "a')
    raw("text after JSON", b'{"model": "x"} x')
    raw("not UTF-8", b'{"model": "\xff\xfe"}')
    raw("lone surrogate", b'{"model": "\\ud800"}')
    raw("NaN", json.dumps({"model": model, "prompt": "a", "temperature": float("nan")}).encode())
    raw("Infinity", json.dumps({"model": model, "prompt": "a", "top_p": float("inf")}).encode())
    raw("number out of range", f'{{"model": "{model}", "prompt": "a", "temperature": 1e999}}'.encode())
    raw("nested too deep", b"[" * 20_000)
    raw("array for a body", b"[]", code="invalid_type")
    raw("string for a body", b'"hello"', code="invalid_type")
    raw("null for a body", b"null", code="invalid_type")
    raw("body over the limit", b" " * (body_bytes_max + 1), 413, "request_too_large")
    raw("form instead of JSON", b"prompt=a", 415, "unsupported_media_type", headers={"Content-Type": "text/plain"})
    raw("no content type", b"{}", 415, "unsupported_media_type", headers={"Content-Type": ""})
    # --- model
    completion("model missing", "model", "missing_required_parameter", model=...)
    completion("model unknown", "model", "model_not_found", 404, model="gpt-none")
    completion("model not a string", "model", "invalid_type", model=5)
    completion("model empty", "model", "invalid_value", model="")
    chat("chat model unknown", "model", "model_not_found", 404, model="gpt-none")
    # --- prompt
    completion("prompt missing", "prompt", "missing_required_parameter", prompt=...)
    completion("prompt null", "prompt", "invalid_type", prompt=None)
    completion("prompt a number", "prompt", "invalid_type", prompt=7)
    completion("prompt an object", "prompt", "invalid_type", prompt={"a": 1})
    completion("prompt list empty", "prompt", "invalid_value", prompt=[])
    completion("prompt with an empty list", "prompt", "invalid_type", prompt=[[]])
    completion("prompts mixed", "prompt", "invalid_type", prompt=["a", [1]])
    completion("prompt ids with a bool", "prompt", "invalid_type", prompt=[1, True])
    completion("prompt ids with a float", "prompt", "invalid_type", prompt=[1, 2.5])
    completion("prompt id negative", "prompt", "invalid_value", prompt=[1, -1])
    completion("prompt id over the vocabulary", "prompt", "invalid_value", prompt=[vocab_size])
    completion("prompt id enormous", "prompt", "invalid_value", prompt=[1 << 70])
    completion("too many prompts", "prompt", "invalid_value", prompt=["a"] * 65)
    completion("too many choices in all", "n", "invalid_value", prompt=["a"] * 64, n=16)
    # --- lengths
    completion("ids over the context", "prompt", "context_length_exceeded", prompt=[5] * (context_tokens + 1))
    completion("ids fill the context", "prompt", "context_length_exceeded", prompt=[5] * context_tokens, max_tokens=1)
    completion("max_tokens over the context", "prompt", "context_length_exceeded", max_tokens=context_tokens)
    chat("chat over the context", "messages", "context_length_exceeded", max_tokens=context_tokens)
    completion("max_tokens zero", "max_tokens", "invalid_value", max_tokens=0)
    completion("max_tokens negative", "max_tokens", "invalid_value", max_tokens=-3)
    completion("max_tokens a string", "max_tokens", "invalid_type", max_tokens="4")
    completion("max_tokens a float", "max_tokens", "invalid_type", max_tokens=4.5)
    completion("max_tokens a bool", "max_tokens", "invalid_type", max_tokens=True)
    chat("both max_tokens, differing", "max_tokens", "invalid_value", max_completion_tokens=5)
    # --- sampling
    completion("temperature negative", "temperature", "invalid_value", temperature=-0.1)
    completion("temperature too high", "temperature", "invalid_value", temperature=2.1)
    completion("temperature a string", "temperature", "invalid_type", temperature="hot")
    completion("top_p zero", "top_p", "invalid_value", top_p=0)
    completion("top_p over one", "top_p", "invalid_value", top_p=1.01)
    completion("top_k under minus one", "top_k", "invalid_value", top_k=-2)
    completion("min_p over one", "min_p", "invalid_value", min_p=1.5)
    completion("repetition_penalty zero", "repetition_penalty", "invalid_value", repetition_penalty=0)
    completion("presence_penalty too high", "presence_penalty", "invalid_value", presence_penalty=2.5)
    completion("frequency_penalty too low", "frequency_penalty", "invalid_value", frequency_penalty=-2.5)
    completion("seed over 64 bits", "seed", "invalid_value", seed=1 << 63)
    completion("seed a float", "seed", "invalid_type", seed=1.5)
    completion("n zero", "n", "invalid_value", n=0)
    completion("n too large", "n", "invalid_value", n=17)
    completion("logit_bias a list", "logit_bias", "invalid_type", logit_bias=[1])
    completion("logit_bias key not a number", "logit_bias", "invalid_value", logit_bias={"a": 1})
    completion("logit_bias key over the vocabulary", "logit_bias", "invalid_value", logit_bias={str(vocab_size): 1})
    completion("logit_bias too strong", "logit_bias.1", "invalid_value", logit_bias={"1": 101})
    completion("logit_bias too large", "logit_bias", "invalid_value", logit_bias={f"{i:09d}": 1 for i in range(301)})
    # --- stops
    completion("stop a number", "stop", "invalid_type", stop=3)
    completion("stop with a number in it", "stop", "invalid_type", stop=["a", 3])
    completion("stop empty string", "stop", "invalid_value", stop="")
    completion("stops too many", "stop", "invalid_value", stop=["a", "b", "c", "d", "e"])
    completion("stop too long", "stop", "invalid_value", stop="x" * 257)
    completion("stop_token_ids negative", "stop_token_ids[0]", "invalid_value", stop_token_ids=[-1])
    completion("stop_token_ids over the vocabulary", "stop_token_ids", "invalid_value", stop_token_ids=[vocab_size])
    completion("stop_token_ids too many", "stop_token_ids", "invalid_value", stop_token_ids=list(range(65)))
    # --- output options
    completion("logprobs a bool", "logprobs", "invalid_type", logprobs=True)
    completion("logprobs too many", "logprobs", "invalid_value", logprobs=21)
    completion("echo with logprobs", "echo", "unsupported_parameter", echo=True, logprobs=1)
    chat("chat logprobs a number", "logprobs", "invalid_type", logprobs=1)
    chat("top_logprobs too many", "top_logprobs", "invalid_value", logprobs=True, top_logprobs=21)
    chat("top_logprobs without logprobs", "top_logprobs", "invalid_value", top_logprobs=2)
    completion("stream a string", "stream", "invalid_type", stream="yes")
    completion(
        "stream_options without stream", "stream_options", "invalid_value", stream_options={"include_usage": True}
    )
    completion(
        "stream_options unknown", "stream_options.all", "unknown_parameter", stream=True, stream_options={"all": True}
    )
    # --- unknown and unsupported
    completion("unknown parameter", "temprature", "unknown_parameter", temprature=1)
    completion("messages in a completion", "messages", "unknown_parameter", messages=[])
    completion("suffix", "suffix", "unsupported_parameter", suffix="end")
    completion("best_of over n", "best_of", "unsupported_parameter", best_of=3)
    completion("best_of under n", "best_of", "invalid_value", best_of=1, n=2)
    completion("min_tokens", "min_tokens", "unsupported_parameter", min_tokens=2)
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    chat("tools", "tools", "unsupported_parameter", tools=[tool])
    chat("tool_choice required", "tool_choice", "unsupported_parameter", tool_choice="required")
    chat("json response_format", "response_format", "unsupported_parameter", response_format={"type": "json_object"})
    chat("audio", "audio", "unsupported_parameter", audio={"voice": "x", "format": "wav"})
    chat("modalities", "modalities", "unsupported_parameter", modalities=["text", "audio"])
    chat("echo in a chat", "echo", "unknown_parameter", echo=True)
    # --- messages
    chat("messages missing", "messages", "missing_required_parameter", messages=...)
    chat("messages empty", "messages", "invalid_value", messages=[])
    chat("messages a string", "messages", "invalid_type", messages="hi")
    message("message a string", "messages[0]", "invalid_type", "hi")
    message("role missing", "messages[0].role", "missing_required_parameter", {"content": "x"})
    message("role unknown", "messages[0].role", "unsupported_value", {"role": "king", "content": "x"})
    message("role tool", "messages[0].role", "unsupported_value", {"role": "tool", "content": "x"})
    message("content missing", "messages[0].content", "missing_required_parameter", {"role": "user"})
    message("content null", "messages[0].content", "invalid_type", {"role": "assistant", "content": None})
    message("content a number", "messages[0].content", "invalid_type", {"role": "user", "content": 1})
    image = [{"type": "image_url", "image_url": {"url": "http://x/y.png"}}]
    message("image part", "messages[0].content[0].type", "unsupported_value", {"role": "user", "content": image})
    message(
        "message with an unknown field", "messages[0].x", "unknown_parameter", {"role": "user", "content": "", "x": 1}
    )
    return rows
