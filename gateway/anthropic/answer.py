"""A chat answer in the form of /v1/messages: one object, or events that build it."""

from collections.abc import Iterable
from typing import Any

import msgspec

from gateway.http.encoding import encode
from gateway.http.errors import ApiError
from gateway.openai.answers import ChatAnswer, ChoiceState, Head
from gateway.openai.prepare import Prepared
from gateway.streams.types import Deliver, Finish
from gateway.text.tokenizer import ModelTokenizer

Json = dict[str, Any]
_ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_REASONS = {Finish.STOP: "end_turn", Finish.LENGTH: "max_tokens", Finish.TOOL_CALLS: "tool_use"}


def error_body(error: ApiError, request_id: str) -> Json:
    kind = _ERRORS.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    found: Json = {"type": kind, "message": error.message}
    if error.param == "thread" and error.code == "unsupported_parameter":
        # Anthropic's tool runners then send the whole conversation with each request.
        found["details"] = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    elif error.code == "context_length_exceeded":
        found["message"] = f"prompt is too long: {error.overflow or error.message}"
    return {"type": "error", "error": found, "request_id": request_id}


class MessagesAnswer(ChatAnswer):
    def __init__(self, prepared: Prepared, tokenizer: ModelTokenizer, head: Head) -> None:
        super().__init__(prepared, tokenizer, head)
        self._blocks: list[Json] = []  # The blocks in order; the last may be open
        self._open = False
        self._stopped: Json = {"stop_reason": None, "stop_sequence": None}

    def _envelope_of(self, usage: Json, content: list[Json]) -> Json:
        return {
            "id": self._head["id"], "type": "message", "role": "assistant", "model": self._head["model"],
            "content": content, **self._stopped, "usage": usage,
        }  # fmt: skip

    def _usage(self, completion_tokens: int, cached_tokens: int) -> Json:
        prompt_tokens = len(self.prepared.prompts[0])
        return {
            "input_tokens": prompt_tokens - cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached_tokens,
            "output_tokens": completion_tokens,
        }

    def collect(self, choice: ChoiceState, part: Deliver) -> None:
        choice.tokens.extend(part.tokens)
        for _ in self.chunks(choice, part):
            pass

    def whole(self, choices: Iterable[ChoiceState], cached_tokens: int) -> Json:
        usage = self._usage(sum(len(choice.tokens) for choice in choices), cached_tokens)
        for block in self._blocks:
            if block["type"] == "tool_use":
                block["input"] = _decoded(block.pop("json"))
        return self._envelope_of(usage, self._blocks)

    # --- events -------------------------------------------------------------------------------------------------------

    def event(self, content: Json) -> bytes:
        kind: str = content["type"]
        return b"event: " + kind.encode() + b"\ndata: " + encode(content) + b"\n\n"

    def opening(self) -> bytes:
        return self.event({"type": "message_start", "message": self._envelope_of(self._usage(0, 0), [])})

    def chunks(self, choice: ChoiceState, part: Deliver) -> Iterable[Json]:
        delta, finish = self._read(choice, part)
        if thought := delta.get("reasoning_content"):
            yield from self._delta("thinking", {"thinking": "", "signature": ""}, "thinking_delta", "thinking", thought)
        if text := delta.get("content"):
            yield from self._delta("text", {"text": ""}, "text_delta", "text", text)
        for call in delta.get("tool_calls", ()):
            yield from self._call_delta(call)
        if finish is not None:
            reason = "stop_sequence" if part.stop and finish is Finish.STOP else _REASONS[finish]
            self._stopped = {"stop_reason": reason, "stop_sequence": part.stop or None}
            yield from self._end()

    def closing(self, completion_tokens: int, cached_tokens: int) -> bytes:
        usage = self._usage(completion_tokens, cached_tokens)
        end: Json = {"type": "message_delta", "delta": self._stopped, "usage": usage}
        return self.event(end) + self.event({"type": "message_stop"})

    def failing(self, error: ApiError, request_id: str) -> bytes:
        return self.event(error_body(error, request_id))

    def _begin(self, block: Json, shown: Json) -> Iterable[Json]:
        yield from self._end()
        self._open = True
        self._blocks.append(block)
        yield {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": shown}

    def _end(self) -> Iterable[Json]:
        if self._open:
            self._open = False
            yield {"type": "content_block_stop", "index": len(self._blocks) - 1}

    def _delta(self, kind: str, empty: Json, name: str, field: str, text: str) -> Iterable[Json]:
        if not self._open or self._blocks[-1]["type"] != kind:
            yield from self._begin({"type": kind, **empty}, {"type": kind, **empty})
        self._blocks[-1][field] += text
        yield {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": {"type": name, field: text}}

    def _call_delta(self, call: Json) -> Iterable[Json]:
        function = call["function"]
        if "id" in call:
            block = {"type": "tool_use", "id": call["id"], "name": function["name"]}
            yield from self._begin(block | {"json": ""}, block | {"input": {}})
        if arguments := function.get("arguments"):
            self._blocks[-1]["json"] += arguments
            delta = {"type": "input_json_delta", "partial_json": arguments}
            yield {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}


def _decoded(arguments: str) -> Any:
    """An answer that was cut off may end inside a call."""
    try:
        return msgspec.json.decode(arguments)
    except msgspec.DecodeError:
        return {}
