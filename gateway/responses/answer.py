"""A chat answer in the form of /v1/responses: one object, or events that build it."""

from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import msgspec

from gateway.http.encoding import encode
from gateway.http.errors import ApiError
from gateway.openai.answers import ChatAnswer, ChoiceState, Head
from gateway.openai.prepare import Prepared
from gateway.responses.tools import kept
from gateway.responses.types import ResponsesRequest
from gateway.streams.types import Deliver, Finish
from gateway.text.tokenizer import ModelTokenizer

Json = dict[str, Any]
_ECHOED = (
    "instructions", "metadata", "previous_response_id", "temperature", "top_p", "max_output_tokens", "tool_choice",
    "parallel_tool_calls", "service_tier", "user",
)  # fmt: skip


def echoed(request: ResponsesRequest) -> dict[str, msgspec.Raw]:
    """Returns the request's fields that a response repeats, as JSON. They are encoded once, and are no longer than in the
    request."""
    asked: Json = {name: getattr(request, name) for name in _ECHOED}
    asked["text"] = {"format": (request.text and request.text.format) or {"type": "text"}}
    asked["reasoning"] = {"effort": request.reasoning and request.reasoning.effort, "summary": None}
    asked["tools"] = kept(request.tools)
    asked["tool_choice"] = asked["tool_choice"] or "auto"
    asked["parallel_tool_calls"] = asked["parallel_tool_calls"] is not False
    asked["metadata"] = asked["metadata"] or {}
    asked["store"] = request.store is not False
    return {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in asked.items()}


class ResponsesAnswer(ChatAnswer):
    def __init__(
        self,
        prepared: Prepared,
        tokenizer: ModelTokenizer,
        head: Head,
        *,
        asked: dict[str, msgspec.Raw],
        namespaces: dict[str, Json],
        keep: Callable[[Json], None],
        settle: Callable[[], Awaitable[None]],
    ) -> None:
        """`asked`: as of `echoed`; `namespaces`: as of `tools.namespaces`. `keep` is given the complete response, and `settle`
        called before its end is sent."""
        super().__init__(prepared, tokenizer, head)
        self._asked = asked
        self._keep = keep
        self._settle = settle
        self._namespaces = namespaces
        self._items: list[Json] = []  # Items of the output in order; the last may be open
        self._open = False
        self._sequence = 0
        self._finish: Finish | None = None

    async def settle(self) -> None:
        await self._settle()

    # --- the object ---------------------------------------------------------------------------------------------------

    def _response(self, status: str, usage: Json | None = None, error: Json | None = None) -> Json:
        response: Json = {
            "id": self._head["id"], "object": "response", "created_at": self._head["created"], "status": status,
            "background": False, "error": error, "incomplete_details": None, **self._asked, "model": self._head["model"],
            "output": self._items, "usage": usage, "truncation": "disabled",
        }  # fmt: skip
        if status == "incomplete":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        return response

    def _usage(self, completion_tokens: int, cached_tokens: int) -> Json:
        usage = self.usage(completion_tokens, cached_tokens)
        reasoning = usage.get("completion_tokens_details", {}).get("reasoning_tokens", 0)
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": cached_tokens},
            "output_tokens": completion_tokens,
            "output_tokens_details": {"reasoning_tokens": reasoning},
            "total_tokens": usage["total_tokens"],
        }

    def _ended(self, completion_tokens: int, cached_tokens: int) -> Json:
        status = "incomplete" if self._finish is Finish.LENGTH else "completed"
        response = self._response(status, self._usage(completion_tokens, cached_tokens))
        self._keep(response)
        return response

    def collect(self, choice: ChoiceState, part: Deliver) -> None:
        choice.tokens.extend(part.tokens)
        for _ in self.chunks(choice, part):
            pass

    def whole(self, choices: Iterable[ChoiceState], cached_tokens: int) -> Json:
        return self._ended(sum(len(choice.tokens) for choice in choices), cached_tokens)

    # --- events -------------------------------------------------------------------------------------------------------

    def event(self, content: Json) -> bytes:
        content["sequence_number"] = self._sequence
        self._sequence += 1
        kind: str = content["type"]
        return b"event: " + kind.encode() + b"\ndata: " + encode(content) + b"\n\n"

    def opening(self) -> bytes:
        kinds = ("response.created", "response.in_progress")
        return b"".join(self.event({"type": kind, "response": self._response("in_progress")}) for kind in kinds)

    def chunks(self, choice: ChoiceState, part: Deliver) -> Iterable[Json]:
        delta, finish = self._read(choice, part)
        if thought := delta.get("reasoning_content"):
            yield from self._text_delta("reasoning", thought)
        if text := delta.get("content"):
            yield from self._text_delta("message", text)
        for call in delta.get("tool_calls", ()):
            yield from self._call_delta(call)
        if finish is not None:
            self._finish = finish
            if not self._items and not self._open:
                yield from self._begin(self._new_message())
            yield from self._end()

    def closing(self, completion_tokens: int, cached_tokens: int) -> bytes:
        response = self._ended(completion_tokens, cached_tokens)
        return self.event({"type": f"response.{response['status']}", "response": response})

    def failing(self, error: ApiError, request_id: str) -> bytes:
        fault = {"code": "server_error" if error.status >= 500 else error.code, "message": error.message}
        return self.event({"type": "response.failed", "response": self._response("failed", error=fault)})

    def _item_id(self, prefix: str) -> str:
        """The id of the next item."""
        return f"{prefix}_{str(self._head['id']).removeprefix('resp-')}_{len(self._items)}"

    def _new_message(self) -> Json:
        return {"id": self._item_id("msg"), "type": "message", "role": "assistant", "content": []}

    def _begin(self, item: Json) -> Iterable[Json]:
        yield from self._end()
        self._open = True
        self._items.append(item | {"status": "in_progress"})
        yield {"type": "response.output_item.added", "output_index": self._at, "item": self._last_item()}
        if item["type"] != "function_call":
            part = self._part(item["type"], "")
            self._items[-1]["content"].append(part)
            yield self._about("response.content_part.added", content_index=0, part=dict(part))

    @staticmethod
    def _part(kind: str, text: str) -> Json:
        if kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    @property
    def _at(self) -> int:
        return len(self._items) - 1

    def _last_item(self) -> Json:
        """The last item as it is now; what comes later does not change it."""
        item = dict(self._items[-1])
        if "content" in item:
            item["content"] = [dict(part) for part in item["content"]]
        return item

    def _about(self, kind: str, **fields: Any) -> Json:
        return {"type": kind, "item_id": self._items[-1]["id"], "output_index": self._at, **fields}

    def _text_delta(self, kind: str, text: str) -> Iterable[Json]:
        if not self._open or self._items[-1]["type"] != kind:
            item = self._new_message()
            if kind == "reasoning":
                item = {"id": self._item_id("rs"), "type": "reasoning", "summary": [], "content": []}
            yield from self._begin(item)
        self._items[-1]["content"][0]["text"] += text
        name = "response.reasoning_text.delta" if kind == "reasoning" else "response.output_text.delta"
        more: Json = {} if kind == "reasoning" else {"logprobs": []}
        yield self._about(name, content_index=0, delta=text, **more)

    def _call_delta(self, call: Json) -> Iterable[Json]:
        function: Json = call["function"]
        if "id" in call:
            item: Json = {"id": self._item_id("fc"), "type": "function_call", "call_id": call["id"]}
            item |= self._namespaces.get(function["name"], {"name": function["name"]})
            yield from self._begin(item | {"arguments": ""})
        if arguments := function.get("arguments"):
            self._items[-1]["arguments"] += arguments
            yield self._about("response.function_call_arguments.delta", delta=arguments)

    def _end(self) -> Iterable[Json]:
        if not self._open:
            return
        self._open = False
        item = self._items[-1]
        cut = self._finish is Finish.LENGTH
        item["status"] = "incomplete" if cut else "completed"
        if item["type"] == "function_call":
            done = "response.function_call_arguments.done"
            yield self._about(done, name=item["name"], arguments=item["arguments"])
        else:
            (part,) = item["content"]
            reasons = item["type"] == "reasoning"
            name = "response.reasoning_text.done" if reasons else "response.output_text.done"
            yield self._about(name, content_index=0, text=part["text"], **({} if reasons else {"logprobs": []}))
            yield self._about("response.content_part.done", content_index=0, part=dict(part))
        yield {"type": "response.output_item.done", "output_index": self._at, "item": self._last_item()}
