"""The fields of a request, with strict types and ranges; `validate` turns faults into one error.

Ranges are OpenAI's, and vLLM's where OpenAI has no such parameter. A parameter that is only a hint to make an answer faster or
cheaper is checked and then ignored. Any other parameter that is not supported is refused by name, so that a client never
believes that it got something it did not get.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec
from pydantic import ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from gateway.http.bounds import FIELDS_MAX, AnyObject, BoundedModel, MaxItems, MaxKeys, Text
from gateway.http.errors import ApiError, bad_value
from gateway.tools.conversation import KWARGS_MAX as KWARGS_MAX
from gateway.tools.request import NAME_CHARS_MAX as NAME_CHARS_MAX
from gateway.tools.request import TOOLS_MAX as TOOLS_MAX
from proto import limits

_OF_THE_MODEL: Final = (
    "Left out or null: the value of the model's generation_config.json if it has one, else OpenAI's default."
)

PROMPTS_MAX: Final = 64
CHOICES_MAX: Final = 256
"""Most choices over all prompts of one request."""
MESSAGES_MAX: Final = 4096
PARTS_MAX: Final = 4096
IDENTIFIER_CHARS_MAX: Final = 512
STOPS_MAX: Final = 16
"""OpenAI has 4. Evaluators send more: the `until` of lm-eval's code tasks has six."""
STOP_CHARS_MAX: Final = 256
CALLS_MAX: Final = 256
BAD_WORDS_MAX: Final = limits.MAX_BAD_WORDS // 2
"""Each may have two spellings in tokens."""


class RequestType(BoundedModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True)


Hint = AnyObject
"""An object that has no effect, whatever it holds."""
Labels = Annotated[
    dict[Annotated[str, Field(max_length=512)], Annotated[str, Field(max_length=512)]], MaxKeys(FIELDS_MAX)
]


class SharedFields(RequestType):
    """The fields that OpenAI's endpoints share, vLLM's included. None is the default."""

    model: Annotated[str, Field(min_length=1, max_length=limits.MAX_TEXT_CHARS)]
    stream: bool | None = None
    stop: Any = None
    """A string or several."""
    # Checked by `stop_strings`, which names the fault better than a union can.
    stop_token_ids: Annotated[list[Annotated[int, Field(ge=0)]], MaxItems(limits.MAX_STOP_TOKEN_IDS)] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    temperature: Annotated[float, Field(ge=0.0, le=2.0, description=_OF_THE_MODEL)] | None = None
    top_p: Annotated[float, Field(gt=0.0, le=1.0, description=_OF_THE_MODEL)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=limits.MAX_VOCAB, description=_OF_THE_MODEL)] | None = None
    """0 and -1 are off."""
    min_p: Annotated[float, Field(ge=0.0, le=1.0, description=_OF_THE_MODEL)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0.0, le=100.0, description=_OF_THE_MODEL)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] | None = None
    logit_bias: (
        Annotated[
            dict[Annotated[str, Field(max_length=9)], Annotated[float, Field(ge=-100.0, le=100.0)]],
            MaxKeys(limits.MAX_LOGIT_BIAS),
        ]
        | None
    ) = None
    ignore_eos: bool | None = None
    priority: Any = None
    """Name of a priority class of the tenants file; or a number, as in vLLM: of a tenant's requests the lowest goes first."""
    service_tier: Literal["auto", "default", "flex", "priority", "scale", "fast", "ultrafast"] | None = None
    deadline_ms: Annotated[float, Field(gt=0.0, le=86_400_000.0)] | None = None
    """How soon the first token is wanted, from now."""
    structured_outputs: Any = None
    """vLLM's, with one of `json`, `regex`, `choice`, `grammar`, `json_object` and `structural_tag`."""
    min_tokens: Annotated[int, Field(ge=0, le=limits.MAX_CONTEXT_TOKENS)] | None = None
    """No stop token is drawn, and stop strings are not looked for, until there are so many. A complete answer of a grammar
    ends all the same."""
    allowed_token_ids: Annotated[list[Annotated[int, Field(ge=0)]], MaxItems(limits.MAX_ALLOWED_TOKEN_IDS)] | None = (
        None
    )
    """No others are drawn, except where a grammar allows none of these."""
    bad_words: (
        Annotated[list[Annotated[str, Field(min_length=1, max_length=STOP_CHARS_MAX)]], MaxItems(BAD_WORDS_MAX)] | None
    ) = None
    """Words that the answer does not have, except where a grammar allows nothing else. Each is kept out as it is and behind a
    space."""
    skip_special_tokens: bool | None = None
    """False: special tokens are part of the text, by their names."""
    include_stop_str_in_output: bool | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=IDENTIFIER_CHARS_MAX)] | None = None
    """Prompts share cached blocks only with those of the same tenant and salt."""
    user: Annotated[str, Field(max_length=IDENTIFIER_CHARS_MAX)] | None = None
    """The client's own user; it is in the access log, for operators to find abuse."""
    safety_identifier: Annotated[str, Field(max_length=IDENTIFIER_CHARS_MAX)] | None = None
    """OpenAI's new name for `user`."""
    session_id: Annotated[str, Field(min_length=1, max_length=IDENTIFIER_CHARS_MAX)] | None = None
    """The name of the conversation that this is a turn of; also as the header `X-Session-Id`. Without a name, the last turn is
    found by its prompt."""
    prompt_cache_key: Annotated[str, Field(max_length=IDENTIFIER_CHARS_MAX)] | None = None
    """The name of the conversation, where `session_id` gives none. Nothing is found by it but how long to keep what is cached:
    the prefix cache finds prompts by their tokens."""
    prompt_cache_options: Hint | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    request_id: Annotated[str, Field(max_length=IDENTIFIER_CHARS_MAX)] | None = None
    """vLLM's: as the header `X-Request-Id`."""

    @property
    def end_user(self) -> str:
        """The name of the end user for the log, bounded and printable."""
        name = self.safety_identifier or self.user or ""
        return "".join(char if char.isprintable() else "?" for char in name[:128])


class StreamOptions(RequestType):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """vLLM's: every chunk says how many tokens there are so far. Without effect unless `include_usage` is on."""
    include_obfuscation: Literal[False] | None = None
    """No padding is added."""


class GenerationRequest(SharedFields):
    """The fields that completions and chat share."""

    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=0, le=limits.MAX_CONTEXT_TOKENS)] | None = None
    """0: nothing is answered; for the log-probabilities of a prompt, which may fill the context. One token is drawn and
    charged all the same."""
    n: Annotated[int, Field(ge=1, le=limits.MAX_CHOICES)] | None = None
    return_token_ids: bool | None = None
    response_format: Any = None
    """The form of the answer: `text`, `json_object`, `json_schema` or `structural_tag`."""
    # Checked by `gateway.structured.request`, as are the next four and `structured_outputs`.
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=limits.MAX_TOP_LOGPROBS)] | None = None
    """vLLM's: log-probabilities of the prompt's tokens, and of so many of the likeliest at each place. The prompt is computed
    anew for them, cached or not. Not with `stream`."""
    metadata: Labels | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    prediction: Hint | None = None
    store: bool | None = None


class CompletionRequest(GenerationRequest):
    prompt: Any = Field(...)
    """A string, token ids, or a list of either."""
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=limits.MAX_TOP_LOGPROBS)] | None = None
    best_of: Annotated[int, Field(ge=1, le=limits.MAX_CHOICES)] | None = None
    """So many answers are drawn, and the `n` with the highest log-probability per token are given. Not with `stream`."""


class TextPart(RequestType):
    type: Literal["text"]
    text: Text
    cache_control: Hint | None = None
    """A hint, as the next."""
    prompt_cache_breakpoint: Hint | None = None


class _Foreign(RequestType):
    """A part of an answer, which another server may have given: what it has besides is dropped."""

    model_config = ConfigDict(extra="ignore")


class CalledFunction(_Foreign):
    name: Annotated[str, Field(min_length=1, max_length=NAME_CHARS_MAX)]
    arguments: Text


class ToolCall(_Foreign):
    id: Annotated[str, Field(min_length=1, max_length=256)]
    type: Literal["function"] | None = "function"
    function: CalledFunction

    @model_validator(mode="before")
    @classmethod
    def _of_custom_tool(cls, fields: Any) -> Any:
        """The call of a tool that takes a text is shown to the model as one of a function that takes it as `input`."""
        called = fields.get("custom") if isinstance(fields, dict) and fields.get("type") == "custom" else None
        if not isinstance(called, dict):
            return fields
        given = called.get("input")
        arguments = msgspec.json.encode({"input": given}).decode() if isinstance(given, str) else given
        return {"id": fields.get("id"), "function": {"name": called.get("name"), "arguments": arguments}}


_OF_THOUGHTS: Final = ("thinking", "redacted_thinking", "reasoning")


class ChatMessage(RequestType):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Annotated[list[TextPart], MaxItems(PARTS_MAX)] | None = None
    """Null or left out only of the role `assistant`; `gateway.tools.conversation` sees to that."""
    tool_calls: Annotated[list[ToolCall], MaxItems(CALLS_MAX)] | None = None
    tool_call_id: Annotated[str, Field(max_length=256)] | None = None
    """The call that a message of the role `tool` is the result of."""
    reasoning_content: Text | None = None
    name: Annotated[str, Field(max_length=256)] | None = None
    cache_control: Hint | None = None
    # Fields that OpenAI's own answers, and those of other servers, carry besides.
    refusal: Text | None = None
    reasoning: Text | None = None
    """Another name of `reasoning_content`."""
    annotations: Annotated[list[Any], MaxItems(MESSAGES_MAX)] | None = None
    audio: Hint | None = None
    function_call: CalledFunction | None = None

    @model_validator(mode="before")
    @classmethod
    def _of_any_server(cls, fields: Any) -> Any:
        """Fields of an assistant's message that no chat template shows are dropped. A function's result is that of a tool."""
        if not isinstance(fields, dict):
            return fields
        if fields.get("role") == "function" and "tool_call_id" not in fields:
            content = fields.get("content")
            given = {"role": "tool", "tool_call_id": fields.get("name"), "content": "" if content is None else content}
            return {**fields, **given}
        if fields.get("role") != "assistant":
            return fields
        kept = {name: fields[name] for name in cls.model_fields if name in fields}
        parts = kept.get("content")
        if isinstance(parts, list) and len(parts) <= PARTS_MAX and all(isinstance(part, dict) for part in parts):
            kept["content"] = [_shown(part) for part in parts if part.get("type") not in _OF_THOUGHTS]
        return kept

    def calls(self) -> list[ToolCall]:
        """A call of the form that OpenAI had before tools has its function's name for an id."""
        if self.tool_calls or self.function_call is None:
            return self.tool_calls or []
        return [ToolCall.model_construct(id=self.function_call.name, function=self.function_call)]

    def text(self) -> str:
        if self.content is None:
            return self.refusal or ""
        return self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)


def _shown(part: dict[str, Any]) -> dict[str, Any]:
    """A part of an assistant's content as a text, where it is one."""
    if part.get("type") == "refusal":
        return {"type": "text", "text": part.get("refusal")}
    return {"type": "text", "text": part.get("text")} if part.get("type") == "text" else part


class ChatRequest(GenerationRequest):
    messages: Annotated[list[ChatMessage], Field(min_length=1), MaxItems(MESSAGES_MAX)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=limits.MAX_CONTEXT_TOKENS)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=limits.MAX_TOP_LOGPROBS)] | None = None
    tools: Any = None
    """Functions that the model may call."""
    # Checked by `gateway.tools.request`, as are the next two.
    tool_choice: Any = None
    parallel_tool_calls: Any = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    """As far as the model's chat template takes it."""
    chat_template_kwargs: Annotated[dict[str, Any], MaxKeys(KWARGS_MAX)] | None = None
    """vLLM's: variables of the model's chat template."""


_NOTHING: Final[tuple[Any, ...]] = (None, [], {})
Neutral = Mapping[str, tuple[Any, ...]]
NEUTRAL_ONLY: Final[Neutral] = {
    "functions": _NOTHING,
    "function_call": (None, "none", "auto"),
    "audio": (None,),
    "modalities": (None, ["text"]),
    "web_search_options": (None,),
    "moderation": (None,),
    "suffix": (None, ""),
    "use_beam_search": (None, False),
    "length_penalty": (None, 1.0),
    "truncate_prompt_tokens": (None,),
    "chat_template": (None,),
    "continue_final_message": (None, False),
    "add_generation_prompt": (None, True),
    "include_reasoning": (None, True),
    "guided_json_object": (None, False),
    "guided_whitespace_pattern": (None,),
    "guided_decoding_backend": (None,),
}  # Known but not supported: accepted only with a value that asks for nothing
INSTEAD: Final[dict[str, str]] = {
    "functions": "'tools' is their successor.",
    "function_call": "'tool_choice' is its successor.",
    "audio": "This server reads and writes text.",
    "modalities": "This server reads and writes text.",
    "moderation": "Moderate in the client.",
    "suffix": "Put the text behind the prompt into the prompt, as the model's own format has it.",
    "use_beam_search": "'n' and 'best_of' draw several answers.",
    "length_penalty": "It belongs to beam search.",
    "truncate_prompt_tokens": "/tokenize counts tokens before a request is sent.",
    "chat_template": "The model's own template is used; /v1/completions takes any text.",
    "continue_final_message": "/v1/completions goes on with any text.",
    "add_generation_prompt": "/v1/completions takes any text.",
    "web_search_options": "Search in the client, and send what was found as a message.",
}  # The fields that are served in place of those

R = TypeVar("R", bound=RequestType)


def validate(cls: type[R], content: Any, neutral: Neutral = NEUTRAL_ONLY) -> R:
    """A parsed JSON body → a request. `neutral`: fields that `cls` does not have, and with which values they are accepted all
    the same. Raises `ApiError` (400) naming the parameter at fault."""
    if not isinstance(content, dict):
        raise bad_value(None, "The body must be a JSON object.", "invalid_type")
    fields: dict[str, Any] = {}
    for key, value in content.items():
        if key in cls.model_fields:
            fields[key] = value
        elif key in neutral:
            if not any(_is(value, one) for one in neutral[key]):
                allowed = " or ".join(msgspec.json.encode(one).decode() for one in neutral[key])
                message = (
                    f"'{key}' is not supported here: leave it out, or send {allowed}. {INSTEAD.get(key, '')}".rstrip()
                )
                raise bad_value(key, message, "unsupported_parameter")
        else:
            shown = key[:100]
            raise bad_value(shown, f"Unknown parameter: '{shown}'.", "unknown_parameter")
    try:
        return cls.model_validate(fields)
    except ValidationError as error:
        raise _explain(error.errors(include_url=False, include_context=True, include_input=False)) from None


_STRINGS: Final = frozenset({"str", "constrained-str"})
_LISTS: Final = ("list[", "function-before[")
"""pydantic's names of the branches of a union."""


def _is(value: Any, neutral: Any) -> bool:
    """Returns whether the values are equal. 1 equals 1.0, since JavaScript writes 1.0 as 1, but false does not equal 0."""
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)


def _explain(found: list[ErrorDetails]) -> ApiError:
    """Returns the first fault as an error. If a content is a list, faults of the union's string branch are ignored."""
    first = next((details for details in found if not _STRINGS.intersection(details["loc"])), found[0])
    loc = [part for part in first["loc"] if part not in _STRINGS and not str(part).startswith(_LISTS)]
    param = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc).lstrip(".")[:200]
    match first["type"]:
        case "missing":
            return bad_value(param, f"Missing required parameter: '{param}'.", "missing_required_parameter")
        case "extra_forbidden":
            return bad_value(param, f"Unknown parameter: '{param}'.", "unknown_parameter")
        case kind if kind.endswith(("_type", "_parsing")):
            code = "invalid_type"
        case "literal_error" | "none_required":
            code = "unsupported_value"
        case _:
            code = "invalid_value"
    fault = first["msg"][:300]
    if loc and loc[-1] == "content" and first["type"] != "too_long":
        fault = "it must be a string or a list of text parts"
    return bad_value(param, f"Invalid value for '{param}': {fault}.", code)


def stop_strings(value: Any) -> list[str]:
    """`stop` as a list. Raises `ApiError`."""
    if value is None:
        return []
    stops = [value] if isinstance(value, str) else value
    if isinstance(stops, list) and len(stops) > STOPS_MAX:
        raise bad_value("stop", f"Invalid value for 'stop': at most {STOPS_MAX} strings are allowed.")
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise bad_value("stop", "Invalid value for 'stop': it must be a string or a list of strings.", "invalid_type")
    if not all(1 <= len(stop) <= STOP_CHARS_MAX for stop in stops):
        raise bad_value("stop", f"Invalid value for 'stop': each string must have 1 to {STOP_CHARS_MAX} characters.")
    return stops
