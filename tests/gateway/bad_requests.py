"""Bad inputs and what they must be answered with. Data only, for the gateway alone and for a whole cluster."""

import json
from dataclasses import dataclass, field
from typing import Any

JSON_HEADERS = {"Content-Type": "application/json"}
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"


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
    compiled: bool = False
    """It is found out by a process that compiles grammars, which takes a second to start."""


@dataclass
class Rows:
    """The table in the making, for a gateway that serves `model` with these limits."""

    model: str
    context_tokens: int
    vocab_size: int
    body_bytes_max: int
    rows: list[BadRequest] = field(default_factory=list)

    def raw(self, name: str, body: bytes, status: int = 400, code: str = "invalid_json", **other: Any) -> None:
        self.rows.append(BadRequest(name, "POST", COMPLETIONS, body, status, None, code, **other))

    def completion(self, name: str, param: str | None, code: str, status: int = 400, **fields: Any) -> None:
        """A good completion with these fields; `...` takes one out."""
        self._add(COMPLETIONS, {"prompt": "Hi"}, name, param, code, status, fields)

    def chat(self, name: str, param: str | None, code: str, status: int = 400, **fields: Any) -> None:
        """Likewise, a good chat."""
        self._add(CHAT, {"messages": [{"role": "user", "content": "Hi"}]}, name, param, code, status, fields)

    def response(self, name: str, param: str | None, code: str, status: int = 400, **fields: Any) -> None:
        """Likewise, a good request to /v1/responses."""
        self._add(RESPONSES, {"input": "Hi", "max_tokens": ...}, name, param, code, status, fields)

    def tokens(self, path: str, name: str, param: str | None, code: str, status: int = 400, **fields: Any) -> None:
        self._add(path, {"max_tokens": ...}, name, param, code, status, fields)

    def message(self, name: str, param: str, code: str, content: Any) -> None:
        self.chat(name, param, code, messages=[content])

    def _add(
        self,
        path: str,
        what: dict[str, Any],
        name: str,
        param: str | None,
        code: str,
        status: int,
        fields: dict[str, Any],
    ) -> None:
        body = {"model": self.model, "max_tokens": 4, **what, **fields}
        body = {key: value for key, value in body.items() if value is not ...}
        self.rows.append(BadRequest(name, "POST", path, json.dumps(body).encode(), status, param, code))


def table(*, model: str, context_tokens: int, vocab_size: int, body_bytes_max: int) -> list[BadRequest]:
    """Every kind of bad input, for a gateway that serves `model` without API keys."""
    from tests.gateway import bad_forms  # which fills a table of the kind defined here

    t = Rows(model, context_tokens, vocab_size, body_bytes_max)
    for part in (
        _paths,
        _bodies,
        _models,
        _prompts,
        _lengths,
        _sampling,
        _stops,
        _output,
        _unknown,
        _messages,
        _evaluation,
        _responses,
    ):
        part(t)
    bad_forms.add(t)
    return t.rows


def _paths(t: Rows) -> None:
    t.rows += [
        BadRequest("unknown path", "GET", "/v1/nothing", b"", 404, None, "not_found"),
        BadRequest("unknown path outside v1", "GET", "/admin", b"", 404, None, "not_found"),
        BadRequest("trailing slash", "POST", "/v1/completions/", b"{}", 404, None, "not_found"),
        BadRequest("GET where POST is meant", "GET", COMPLETIONS, b"", 405, None, "method_not_allowed"),
        BadRequest("DELETE of a model", "DELETE", f"/v1/models/{t.model}", b"", 405, None, "method_not_allowed"),
        BadRequest("POST to health", "POST", "/health", b"{}", 405, None, "method_not_allowed"),
        BadRequest("unknown model looked up", "GET", "/v1/models/none", b"", 404, "model", "model_not_found"),
    ]


def _bodies(t: Rows) -> None:
    t.raw("empty body", b"")
    t.raw("truncated JSON", b'{"model": "x", "prompt": "a')
    t.raw("text after JSON", b'{"model": "x"} x')
    t.raw("not UTF-8", b'{"model": "\xff\xfe"}')
    t.raw("lone surrogate", b'{"model": "\\ud800"}')
    t.raw("NaN", json.dumps({"model": t.model, "prompt": "a", "temperature": float("nan")}).encode())
    t.raw("Infinity", json.dumps({"model": t.model, "prompt": "a", "top_p": float("inf")}).encode())
    t.raw("number out of range", f'{{"model": "{t.model}", "prompt": "a", "temperature": 1e999}}'.encode())
    t.raw("nested too deep", b"[" * 20_000)
    t.raw("array for a body", b"[]", code="invalid_type")
    t.raw("string for a body", b'"hello"', code="invalid_type")
    t.raw("null for a body", b"null", code="invalid_type")
    t.raw("body over the limit", b" " * (t.body_bytes_max + 1), 413, "request_too_large")
    t.raw("form instead of JSON", b"prompt=a", 415, "unsupported_media_type", headers={"Content-Type": "text/plain"})
    t.raw("no content type", b"{}", 415, "unsupported_media_type", headers={"Content-Type": ""})


def _models(t: Rows) -> None:
    t.completion("model missing", "model", "missing_required_parameter", model=...)
    t.completion("model unknown", "model", "model_not_found", 404, model="gpt-none")
    t.completion("model not a string", "model", "invalid_type", model=5)
    t.completion("model empty", "model", "invalid_value", model="")
    t.chat("chat model unknown", "model", "model_not_found", 404, model="gpt-none")


def _prompts(t: Rows) -> None:
    t.completion("prompt missing", "prompt", "missing_required_parameter", prompt=...)
    t.completion("prompt null", "prompt", "invalid_type", prompt=None)
    t.completion("prompt a number", "prompt", "invalid_type", prompt=7)
    t.completion("prompt an object", "prompt", "invalid_type", prompt={"a": 1})
    t.completion("prompt list empty", "prompt", "invalid_value", prompt=[])
    t.completion("prompt with an empty list", "prompt", "invalid_type", prompt=[[]])
    t.completion("prompts mixed", "prompt", "invalid_type", prompt=["a", [1]])
    t.completion("prompt ids with a bool", "prompt", "invalid_type", prompt=[1, True])
    t.completion("prompt ids with a float", "prompt", "invalid_type", prompt=[1, 2.5])
    t.completion("prompt id negative", "prompt", "invalid_value", prompt=[1, -1])
    t.completion("prompt id over the vocabulary", "prompt", "invalid_value", prompt=[t.vocab_size])
    t.completion("prompt id enormous", "prompt", "invalid_value", prompt=[1 << 70])
    t.completion("too many prompts", "prompt", "invalid_value", prompt=["a"] * 65)
    t.completion("too many choices in all", "n", "invalid_value", prompt=["a"] * 64, n=16)


def _lengths(t: Rows) -> None:
    t.completion("ids over the context", "prompt", "context_length_exceeded", prompt=[5] * (t.context_tokens + 1))
    t.completion(
        "ids fill the context", "prompt", "context_length_exceeded", prompt=[5] * t.context_tokens, max_tokens=1
    )
    t.completion("max_tokens over the context", "prompt", "context_length_exceeded", max_tokens=t.context_tokens)
    t.chat("chat over the context", "messages", "context_length_exceeded", max_tokens=t.context_tokens)
    t.completion("max_tokens negative", "max_tokens", "invalid_value", max_tokens=-3)
    t.completion("max_tokens a string", "max_tokens", "invalid_type", max_tokens="4")
    t.completion("max_tokens a float", "max_tokens", "invalid_type", max_tokens=4.5)
    t.completion("max_tokens a bool", "max_tokens", "invalid_type", max_tokens=True)
    t.chat("both max_tokens, differing", "max_tokens", "invalid_value", max_completion_tokens=5)


def _sampling(t: Rows) -> None:
    t.completion("temperature negative", "temperature", "invalid_value", temperature=-0.1)
    t.completion("temperature too high", "temperature", "invalid_value", temperature=2.1)
    t.completion("temperature a string", "temperature", "invalid_type", temperature="hot")
    t.completion("top_p zero", "top_p", "invalid_value", top_p=0)
    t.completion("top_p over one", "top_p", "invalid_value", top_p=1.01)
    t.completion("top_k under minus one", "top_k", "invalid_value", top_k=-2)
    t.completion("min_p over one", "min_p", "invalid_value", min_p=1.5)
    t.completion("repetition_penalty zero", "repetition_penalty", "invalid_value", repetition_penalty=0)
    t.completion("presence_penalty too high", "presence_penalty", "invalid_value", presence_penalty=2.5)
    t.completion("frequency_penalty too low", "frequency_penalty", "invalid_value", frequency_penalty=-2.5)
    t.completion("seed over 64 bits", "seed", "invalid_value", seed=1 << 63)
    t.completion("seed a float", "seed", "invalid_type", seed=1.5)
    t.completion("n zero", "n", "invalid_value", n=0)
    t.completion("n too large", "n", "invalid_value", n=17)
    t.completion("logit_bias a list", "logit_bias", "invalid_type", logit_bias=[1])
    t.completion("logit_bias key not a number", "logit_bias", "invalid_value", logit_bias={"a": 1})
    t.completion("logit_bias key over the vocabulary", "logit_bias", "invalid_value", logit_bias={str(t.vocab_size): 1})
    t.completion("logit_bias too strong", "logit_bias.1", "invalid_value", logit_bias={"1": 101})
    t.completion("logit_bias too large", "logit_bias", "invalid_value", logit_bias={f"{i:09d}": 1 for i in range(301)})


def _stops(t: Rows) -> None:
    t.completion("stop a number", "stop", "invalid_type", stop=3)
    t.completion("stop with a number in it", "stop", "invalid_type", stop=["a", 3])
    t.completion("stop empty string", "stop", "invalid_value", stop="")
    t.completion("stops too many", "stop", "invalid_value", stop=list("abcdefghijklmnopq"))
    t.completion("stop too long", "stop", "invalid_value", stop="x" * 257)
    t.completion("stop_token_ids negative", "stop_token_ids[0]", "invalid_value", stop_token_ids=[-1])
    t.completion("stop_token_ids over the vocabulary", "stop_token_ids", "invalid_value", stop_token_ids=[t.vocab_size])
    t.completion("stop_token_ids too many", "stop_token_ids", "invalid_value", stop_token_ids=list(range(65)))


def _output(t: Rows) -> None:
    t.completion("logprobs a bool", "logprobs", "invalid_type", logprobs=True)
    t.completion("logprobs too many", "logprobs", "invalid_value", logprobs=21)
    t.chat("chat logprobs a number", "logprobs", "invalid_type", logprobs=1)
    t.chat("top_logprobs too many", "top_logprobs", "invalid_value", logprobs=True, top_logprobs=21)
    t.chat("top_logprobs without logprobs", "top_logprobs", "invalid_value", top_logprobs=2)
    t.completion("stream a string", "stream", "invalid_type", stream="yes")
    t.completion(
        "stream_options without stream", "stream_options", "invalid_value", stream_options={"include_usage": True}
    )
    t.completion(
        "stream_options unknown", "stream_options.all", "unknown_parameter", stream=True, stream_options={"all": True}
    )


def _unknown(t: Rows) -> None:
    t.completion("unknown parameter", "temprature", "unknown_parameter", temprature=1)
    t.completion("messages in a completion", "messages", "unknown_parameter", messages=[])
    t.completion("suffix", "suffix", "unsupported_parameter", suffix="end")
    t.completion("store as a number", "store", "invalid_type", store=0)
    t.chat("metadata", "metadata.a", "invalid_type", metadata={"a": 1})
    t.chat("cache retention", "prompt_cache_retention", "unsupported_value", prompt_cache_retention="1y")
    t.chat("cache options", "prompt_cache_options", "invalid_type", prompt_cache_options="30m")
    t.chat("prediction", "prediction", "invalid_type", prediction="x")
    t.chat("moderation", "moderation", "unsupported_parameter", moderation={"model": "x"})
    t.chat(
        "obfuscation", "stream_options.include_obfuscation", "unsupported_value", stream=True,
        stream_options={"include_obfuscation": True},
    )  # fmt: skip
    t.completion("user a number", "user", "invalid_type", user=5)
    t.completion("user too long", "user", "invalid_value", user="x" * 513)
    t.completion("best_of under n", "best_of", "invalid_value", best_of=1, n=2)
    t.chat("audio", "audio", "unsupported_parameter", audio={"voice": "x", "format": "wav"})
    t.chat("modalities", "modalities", "unsupported_parameter", modalities=["text", "audio"])
    t.chat("echo in a chat", "echo", "unknown_parameter", echo=True)


def _evaluation(t: Rows) -> None:
    t.completion("best_of streamed", "best_of", "unsupported_parameter", best_of=3, stream=True)
    t.completion("best_of too many", "best_of", "invalid_value", best_of=17)
    t.completion("best_of zero", "best_of", "invalid_value", best_of=0)
    t.completion("min_tokens over max_tokens", "min_tokens", "invalid_value", min_tokens=5)
    t.completion("min_tokens negative", "min_tokens", "invalid_value", min_tokens=-1)
    t.completion("min_tokens a bool", "min_tokens", "invalid_type", min_tokens=True)
    t.completion("min_tokens a fraction", "min_tokens", "invalid_type", min_tokens=1.5)
    t.completion("prompt_logprobs negative", "prompt_logprobs", "invalid_value", prompt_logprobs=-1)
    t.completion("prompt_logprobs too many", "prompt_logprobs", "invalid_value", prompt_logprobs=21)
    t.completion("prompt_logprobs streamed", "prompt_logprobs", "unsupported_parameter", prompt_logprobs=1, stream=True)
    t.completion("allowed_token_ids empty", "allowed_token_ids", "invalid_value", allowed_token_ids=[])
    t.completion("allowed_token_ids too large", "allowed_token_ids", "invalid_value", allowed_token_ids=[t.vocab_size])
    t.completion("allowed_token_ids negative", "allowed_token_ids[0]", "invalid_value", allowed_token_ids=[-1])
    t.completion("allowed_token_ids too many", "allowed_token_ids", "invalid_value", allowed_token_ids=[1] * 4097)
    t.completion("allowed_token_ids texts", "allowed_token_ids[0]", "invalid_type", allowed_token_ids=["a"])
    t.completion("bad_words a string", "bad_words", "invalid_type", bad_words="no")
    t.completion("bad_words with an empty word", "bad_words[0]", "invalid_value", bad_words=[""])
    t.completion("bad_words of a space", "bad_words", "invalid_value", bad_words=[" "])
    t.completion("bad_words too many", "bad_words", "invalid_value", bad_words=["a"] * 33)
    t.completion("bad_words too long", "bad_words", "invalid_value", bad_words=["word " * 40])
    t.completion("skip_special_tokens a number", "skip_special_tokens", "invalid_type", skip_special_tokens=1)
    t.completion("cache_salt empty", "cache_salt", "invalid_value", cache_salt="")
    t.completion("cache_salt too long", "cache_salt", "invalid_value", cache_salt="x" * 513)


def _responses(t: Rows) -> None:
    t.response("responses: no input", "input", "missing_required_parameter", input=...)
    t.response("responses: empty input", "input", "invalid_value", input=[])
    t.response("responses: unknown field", "x", "unknown_parameter", x=1)
    t.response("responses: unknown model", "model", "model_not_found", status=404, model="other")
    t.response("responses: in the background", "background", "unsupported_parameter", background=True)
    t.response("responses: conversation", "conversation", "unsupported_parameter", conversation="c")
    t.response("responses: truncation", "truncation", "unsupported_value", truncation="half")
    t.response("responses: include", "include[0]", "unsupported_value", include=["message.output_text.logprobs"])
    t.response("responses: verbosity", "text.verbosity", "unsupported_value", text={"verbosity": "huge"})
    t.response("responses: pro", "reasoning.mode", "unsupported_value", reasoning={"mode": "pro"})
    t.response("responses: client_metadata", "client_metadata", "invalid_type", client_metadata=[])
    t.response("responses: custom tool", "tools[0].type", "unsupported_value", tools=[{"type": "custom", "name": "x"}])
    function = {"type": "function", "name": "f"}
    t.response("responses: async", "tools[1].async", "unsupported_parameter",
               tools=[{"type": "web_search"}, {**function, "async": True}])  # fmt: skip
    t.response("responses: a name behind a tool that is left out", "tools[1].name", "invalid_value",
               tools=[{"type": "web_search"}, {**function, "name": "a b"}])  # fmt: skip
    t.response("responses: a name in a namespace", "tools[0].tools[1].parameters", "invalid_type",
               tools=[{"type": "namespace", "name": "n", "tools": [
                   {"type": "custom"}, {**function, "parameters": 1}]}])  # fmt: skip
    t.response("responses: namespace of nothing", "tools[0]", "invalid_type", tools=[{"type": "namespace", "tools": 1}])
    t.response("responses: a choice that is left out", "tool_choice", "invalid_type",
               tools=[function, {"type": "web_search"}], tool_choice={"type": "web_search"})  # fmt: skip
    t.response("responses: a compacted conversation", "input[0].type", "unsupported_value",
               input=[{"type": "compaction", "encrypted_content": "x"}])  # fmt: skip
    t.response("responses: not kept", "previous_response_id", "response_not_found", 404, previous_response_id="resp-0")
    t.response("responses: too long", "max_output_tokens", "invalid_value", max_output_tokens=0)
    image = {"role": "user", "content": [{"type": "input_image", "image_url": "http://x/y.png"}]}
    t.response("responses: an image", "input[0].content[0]", "unsupported_value", input=[image])
    audio = {"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}
    t.response("responses: audio", "input[0].content[0]", "unsupported_value", input=[audio])
    t.response("responses: an item of another kind", "input[0].type", "unsupported_value", input=[{"type": "shell"}])
    t.response("responses: a role", "input", "unsupported_value", input=[{"role": "king", "content": "x"}])
    t.response("responses: a result of nothing", "input", "invalid_type", input=[{"type": "function_call", "name": 1}])
    t.response("responses: a tool of the server", "tools[0].type", "unsupported_value", tools=[{"type": "web_search"}])
    t.response("responses: metadata", "metadata.a", "invalid_type", metadata={"a": 1})
    t.response("responses: a format", "text.format.type", "unsupported_value", text={"format": {"type": "poem"}})
    t.tokens("/tokenize", "tokenize: nothing", "prompt", "missing_required_parameter")
    t.tokens("/tokenize", "tokenize: both", "prompt", "missing_required_parameter", prompt="", messages=[_HI])
    t.tokens("/tokenize", "tokenize: unknown model", "model", "model_not_found", 404, prompt="", model="other")
    t.tokens("/tokenize", "tokenize: unknown field", "x", "unknown_parameter", prompt="", x=1)
    t.tokens("/detokenize", "detokenize: nothing", "tokens", "missing_required_parameter")
    t.tokens("/detokenize", "detokenize: too large", "tokens", "invalid_value", tokens=[t.vocab_size])
    t.tokens("/detokenize", "detokenize: texts", "tokens[0]", "invalid_type", tokens=["a"])


_HI = {"role": "user", "content": "Hi"}


def _messages(t: Rows) -> None:
    t.chat("messages missing", "messages", "missing_required_parameter", messages=...)
    t.chat("messages empty", "messages", "invalid_value", messages=[])
    t.chat("messages a string", "messages", "invalid_type", messages="hi")
    t.message("message a string", "messages[0]", "invalid_type", "hi")
    t.message("role missing", "messages[0].role", "missing_required_parameter", {"content": "x"})
    t.message("role unknown", "messages[0].role", "unsupported_value", {"role": "king", "content": "x"})
    t.message("content missing", "messages[0].content", "invalid_type", {"role": "user"})
    t.message("content null", "messages[0].content", "invalid_type", {"role": "user", "content": None})
    t.message("content a number", "messages[0].content", "invalid_type", {"role": "user", "content": 1})
    image = [{"type": "image_url", "image_url": {"url": "http://x/y.png"}}]
    t.message("image part", "messages[0].content[0].type", "unsupported_value", {"role": "user", "content": image})
    t.message(
        "message with an unknown field", "messages[0].x", "unknown_parameter", {"role": "user", "content": "", "x": 1}
    )
