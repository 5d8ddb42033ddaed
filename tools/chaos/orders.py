"""The requests of clients while processes die, and the comparison of an answer with the one of a quiet cluster."""

import json
import os
import random
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from typing import Any, Final

import jsonschema

from engine.cpu import library

CONTEXT_TOKENS = 2048
_FIRST_BYTE_TOKEN, _VOCAB_END = 6, 262


def _is_batch_invariant() -> bool:
    if os.environ.get("CROSSDOCK_ENGINE") == "vllm":
        return False
    try:
        library.load_kernels()
    except library.KernelsUnavailable:
        return False
    return True


IS_BATCH_INVARIANT = _is_batch_invariant()
"""Whether a token has the same numbers here in every batch and chunking, for the models of `tests.tiny_models`."""
LOGPROB_TOLERANCE = 0.0 if IS_BATCH_INVARIANT else 2e-3
"""If it has not, the other sequences of a batch and the cut into chunks change the last bits of a sum of floats."""

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 0.8, "top_k": 8},
    "penalised": {"temperature": 0.7, "top_k": 8, "presence_penalty": 0.5, "repetition_penalty": 1.1},
    "frequency": {"temperature": 0, "frequency_penalty": 0.4},
    "logprobs": {"temperature": 0, "logprobs": 2},
    "two": {"temperature": 0.8, "top_k": 8, "n": 2},
    "two_logprobs": {"temperature": 0.9, "top_k": 6, "n": 2, "logprobs": 1, "frequency_penalty": 0.3},
    "stops": {"temperature": 0.8, "top_k": 16, "stop": ["e", "Q7"]},
}

ITEM: Final = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "size": {"type": "integer", "minimum": 0, "maximum": 9999},
    },
    "required": ["name", "size"],
    "additionalProperties": False,
}
SCHEMA: Final = {
    "type": "object",
    "properties": {"items": {"type": "array", "items": ITEM, "minItems": 2, "maxItems": 5}},
    "required": ["items"],
    "additionalProperties": False,
}
_FORMAT: Final = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
_TOOLS: Final = [{"type": "function", "function": {"name": "keep", "parameters": SCHEMA, "strict": True}}]
CONSTRAINED: dict[str, dict[str, Any]] = {
    "json": {"temperature": 1, "response_format": _FORMAT},
    "json_logprobs": {"temperature": 0.8, "response_format": _FORMAT, "logprobs": 2},
    "two_json": {"temperature": 1, "n": 2, "presence_penalty": 0.3, "guided_json": SCHEMA},
    "call": {"temperature": 1, "tools": _TOOLS, "tool_choice": "required", "parallel_tool_calls": False},
    "regex": {"temperature": 0.9, "guided_regex": "([a-f]{4}-[0-9]{2,6} ){8,20}!"},
    "prompt_logprobs": {"temperature": 0.8, "top_k": 8, "echo": True, "logprobs": 2},
    "only_prompt_logprobs": {"echo": True, "logprobs": 1, "max_tokens": 0},
}
"""Requests in a grammar or with a tool call, and log-probabilities of prompts."""
_FREE: Final = ("regex", "prompt_logprobs", "only_prompt_logprobs")  # those of them that no JSON schema describes


@dataclass
class Choice:
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[float] = field(default_factory=list)
    finish: str = ""


Answer = dict[int, Choice]


@dataclass(frozen=True)
class Order:
    number: int
    kind: str
    prompt: list[int]
    body: dict[str, Any]  # but for the model
    path: str = "/v1/completions"
    turn: int = 0
    later_turns: tuple[tuple[int, ...], ...] = ()
    """The tokens that the user of a conversation adds in each turn after this one."""

    @property
    def key(self) -> tuple[int, int]:
        return (self.number, self.turn)

    def next_turn(self, answer: Answer) -> "Order | None":
        """It goes on from this answer."""
        if not self.later_turns:
            return None
        prompt = [*self.prompt, *answer[0].token_ids, *self.later_turns[0]]
        body, turn = {**self.body, "prompt": prompt}, self.turn + 1
        return replace(self, prompt=prompt, body=body, turn=turn, later_turns=self.later_turns[1:])


def make_orders(
    source: random.Random,
    count: int,
    *,
    output_max: int = 400,
    constrained_share: float = 0.0,
    session_share: float = 0.0,
) -> list[Order]:
    """Makes short and long prompts; a third begin like others. `constrained_share` of them are of the kinds in `CONSTRAINED`,
    and `session_share` are first turns of conversations."""
    shared = [source.choices(range(_FIRST_BYTE_TOKEN, _VOCAB_END), k=96) for _ in range(3)]
    orders = []
    for number in range(count):
        kind = list(KINDS)[number % len(KINDS)]
        low, high = source.choices([(3, 40), (60, 300), (400, 1200)], weights=[4, 4, 2])[0]
        prompt = _random_tokens(source, low, high)
        if source.random() < 1 / 3:
            prompt = [*source.choice(shared), *prompt]
        body = {
            "prompt": prompt,
            "max_tokens": source.randint(output_max // 6, output_max),
            "ignore_eos": True,
            "seed": source.randrange(1 << 30),
            "return_token_ids": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **KINDS[kind],
        }
        orders.append(Order(number, kind, prompt, body))
    if constrained_share:
        for turn, number in enumerate(range(0, count, max(1, round(1 / constrained_share)))):
            orders[number] = _constrained(orders[number], list(CONSTRAINED)[turn % len(CONSTRAINED)], output_max)
    for order in [one for one in orders if one.kind not in CONSTRAINED][: round(count * session_share)]:
        later = tuple(tuple(_random_tokens(source, 5, 90)) for _ in range(source.randint(2, 4)))
        prompt = order.prompt[:500]
        body = {**order.body, "prompt": prompt, "max_tokens": min(order.body["max_tokens"], 220)}
        orders[order.number] = replace(order, prompt=prompt, body=body, later_turns=later)
    return orders


def _random_tokens(source: random.Random, low: int, high: int) -> list[int]:
    return source.choices(range(_FIRST_BYTE_TOKEN, _VOCAB_END), k=source.randint(low, high))


def _constrained(order: Order, kind: str, output_max: int) -> Order:
    body = {key: order.body[key] for key in ("prompt", "seed", "return_token_ids", "stream")}
    body |= {"max_tokens": output_max, **CONSTRAINED[kind]}
    if kind == "only_prompt_logprobs":
        body["prompt"] = prompt = (order.prompt * CONTEXT_TOKENS)[:CONTEXT_TOKENS]
        return Order(order.number, kind, prompt, body)
    if kind != "call":
        return Order(order.number, kind, order.prompt, body)
    del body["prompt"]
    text = "".join(chr(ord("a") + token % 26) for token in order.prompt[:900])  # beside the tool's description
    body["messages"] = [{"role": "user", "content": text}]
    return Order(order.number, kind, order.prompt, body, "/v1/chat/completions")


def invalid(order: Order, answer: Answer) -> str:
    """Returns the fault of an answer that must have a form; empty if it has none, or ended by its length."""
    if order.kind not in CONSTRAINED or order.kind in _FREE:
        return ""
    for choice in answer.values():
        if choice.finish == "length":
            continue
        try:
            jsonschema.validate(json.loads(choice.text), SCHEMA)
        except (ValueError, jsonschema.ValidationError) as error:
            return f"not valid: {choice.text[-60:]!r}: {str(error)[:200]}"
    return ""


@dataclass(frozen=True)
class Difference:
    lost: int = 0
    duplicated: int = 0
    changed: int = 0
    note: str = ""

    def __bool__(self) -> bool:
        return bool(self.lost or self.duplicated or self.changed)


def compare(want: Answer, got: Answer, *, whole: bool) -> Difference:
    """Tokens by their ids, then text, log-probabilities and ends. `whole`: the stream ended well; else it may stop anywhere."""
    lost = duplicated = changed = 0
    notes = []
    for index, right in want.items():
        seen = got.get(index, Choice())
        expected = right.token_ids if whole else right.token_ids[: len(seen.token_ids)]
        if seen.token_ids != expected:
            matcher = SequenceMatcher(None, expected, seen.token_ids, autojunk=False)
            for what, a, b, c, d in matcher.get_opcodes():
                lost += b - a if what == "delete" else 0
                duplicated += d - c if what == "insert" else 0
                changed += max(b - a, d - c) if what == "replace" else 0
            first = next((at for at, (a, b) in enumerate(zip(expected, seen.token_ids, strict=False)) if a != b), "end")
            notes.append(f"choice {index}: {len(seen.token_ids)} tokens of {len(expected)}, first differs at {first}")
        elif (said := _detail(right, seen, whole)) != "":
            changed += 1
            notes.append(f"choice {index}: {said}")
    return Difference(lost, duplicated, changed, "; ".join(notes))


def _detail(right: Choice, seen: Choice, whole: bool) -> str:
    """The other differences where the tokens are the same."""
    if whole and (seen.text != right.text or seen.finish != right.finish):
        return f"text or end: {seen.text[-20:]!r} {seen.finish}, not {right.text[-20:]!r} {right.finish}"
    if not whole and not right.text.startswith(seen.text):
        return f"text {seen.text[-20:]!r}"
    count = len(right.logprobs) if whole else min(len(right.logprobs), len(seen.logprobs))
    if len(seen.logprobs) < count:
        return f"{len(seen.logprobs)} log-probabilities of {count}"
    off = max((abs(a - b) for a, b in zip(right.logprobs[:count], seen.logprobs, strict=False)), default=0.0)
    return f"log-probabilities, by up to {off:.2g}" if off > LOGPROB_TOLERANCE else ""
