"""Cases of the long fuzz. A case is all that its seed makes: `run_case(world, seed)` returns the faults that its client saw."""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final

import httpx
import jsonschema
import zmq

from tests.fuzz_frames import WORDS
from tests.schemas import random_root
from tests.tiny_models import SPECIAL, tokenizer
from tools.attacks.bodies import SHAPES, body
from tools.attacks.cluster import Target, api_key
from tools.attacks.peers import FakePeer
from tools.fuzz import Port

_ENDS_SOON: Final = {str(tokenizer().convert_tokens_to_ids(char)): 4 for char in '"}]'}

RUNS: dict[str, Any] = import_module("tests.fuzz_cores").RUNS if find_spec("tests.fuzz_cores") else {}

CLIENT_S = 60.0
BODIES_EACH, GRAMMARS_EACH, FRAMES_EACH, RUNS_EACH, EVENTS = 20, 6, 4_000, 2, 300
BODY_BYTES_MAX = 8_200_000
_USER = [{"role": "user", "content": "Hi"}]
_CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {}}}}}
_TALK = [*_USER, {"role": "assistant", "tool_calls": [_CALL]}, {"role": "tool", "tool_call_id": "c1", "content": "4"}]
_BLOCKS = [{"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}]}]
_SAMPLING = {"temperature": 0.5, "top_p": 0.9, "seed": 3, "stop": ["x", "y"], "n": 2, "logit_bias": {"7": 1.5}}
_CHAT, _MESSAGES, _RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
_FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}
_INPUT = [{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}]
_THEIR_TOOLS = {"tools": [{"name": "f", "input_schema": {"type": "object"}}], "tool_choice": {"type": "any"}}
_FUNCTIONS = [{"type": "function", "name": "f", "parameters": {}}]
VALID: Final[tuple[tuple[str, dict[str, Any]], ...]] = (
    ("/v1/completions", {"prompt": "Hi", "max_tokens": 4, **_SAMPLING, "logprobs": 2, "echo": True}),
    ("/v1/completions", {"prompt": [[6, 7], [8]], "max_tokens": 4, "stop_token_ids": [9], "bad_words": ["q"]}),
    ("/v1/completions", {"prompt": "Hi", "max_tokens": 4, "structured_outputs": {"choice": ["a", "b"]}, "cache_salt": "s"}),
    (_CHAT, {"messages": _TALK, "max_tokens": 4, "tools": [_TOOL], "tool_choice": "auto", "logprobs": True, "top_logprobs": 2}),
    (_CHAT, {"messages": _USER, "max_tokens": 4, "stream": True, "stream_options": {"include_usage": True}, **_SAMPLING}),
    (_CHAT, {"messages": _USER, "max_tokens": 4, "response_format": _FORMAT}),
    (_MESSAGES, {"messages": _BLOCKS, "max_tokens": 4, "system": [{"type": "text", "text": "s"}], "stop_sequences": ["x"]}),
    (_MESSAGES, {"messages": _USER, "max_tokens": 4, **_THEIR_TOOLS}),
    ("/v1/messages/count_tokens", {"messages": _BLOCKS}),
    (_RESPONSES, {"input": _INPUT, "max_output_tokens": 4, "text": {"format": {"type": "text"}}}),
    (_RESPONSES, {"input": "Hi", "max_output_tokens": 4, "metadata": {"a": "b"}, "tools": _FUNCTIONS}),
    ("/tokenize", {"messages": _TALK, "return_token_strs": True}),
    ("/detokenize", {"tokens": [6, 7, 8]}),
)  # fmt: skip


@dataclass
class World:
    target: Target
    ports: list[Port]


@dataclass
class Case:
    seed: int
    kind: str
    faults: list[str] = field(default_factory=list)
    sent: int = 0


def run_case(world: World, seed: int) -> Case:
    kind = list(KINDS)[seed % len(KINDS)]
    case = Case(seed, kind)
    KINDS[kind](world, random.Random(seed), case)
    return case


def _post(world: World, case: Case, path: str, content: bytes) -> httpx.Response | None:
    case.sent += 1
    headers = {"Authorization": f"Bearer {api_key('evil0')}", "Content-Type": "application/json"}
    try:
        url = world.target.base_url + path
        answer = httpx.post(url, content=content, headers=headers, timeout=CLIENT_S, trust_env=False)
    except httpx.TimeoutException:
        case.faults.append(f"no answer in {CLIENT_S:.0f} s to POST {path} {content[:300]!r}")
        return None
    except httpx.TransportError as error:
        case.faults.append(f"{type(error).__name__} instead of an answer to POST {path} {content[:300]!r}")
        return None
    if answer.status_code >= 500 and answer.status_code != 503:
        said = answer.text[:200]
        case.faults.append(f"HTTP {answer.status_code} ({said}) to POST {path} {content[:600]!r}")
    return answer


# --- bodies ---------------------------------------------------------------------------------------------------------------


def _json(source: random.Random, depth: int = 4) -> Any:
    match source.randrange(9 if depth else 7):
        case 0:
            return source.choice(SPECIAL)
        case 1:
            return "x\u2028\ud7ff\0é" * source.choice((1, 10, 3_000))
        case 2:
            return source.randrange(-(1 << 70), 1 << 70)
        case 7:
            return [_json(source, depth - 1) for _ in range(source.choice((0, 1, 3, 40)))]
        case 8:
            return {f"k{number}": _json(source, depth - 1) for number in range(source.choice((0, 1, 3, 40)))}
    word = source.choice(WORDS)
    return word if not isinstance(word, bytes) else word.hex()


def _times_max(tree: Any) -> int:
    """Returns how many copies of the tree fit into a body."""
    try:
        return BODY_BYTES_MAX // 2 // (len(json.dumps(tree)) + 2)
    except RecursionError:
        return 1


def _mutated(source: random.Random, tree: Any) -> Any:
    """Returns the tree with one place changed at random."""
    if isinstance(tree, dict | list) and tree and source.random() < 0.8:
        copy = dict(tree) if isinstance(tree, dict) else list(tree)
        spot = source.choice(list(tree)) if isinstance(tree, dict) else source.randrange(len(tree))
        if source.random() < 0.1:
            del copy[spot]
        else:
            copy[spot] = _mutated(source, tree[spot])
        return copy
    match source.randrange(5):
        case 0 if isinstance(tree, dict):
            return tree | {source.choice(("type", "x", "$ref", "parsed", "content")): _json(source)}
        case 1:
            return [tree] * min(source.choice((0, 1, 2, 300, 5_000, 1_000_000)), _times_max(tree))
        case 2 if isinstance(tree, str):
            return tree * min(source.choice((0, 2, 1_000, 100_000)), _times_max(tree))
        case 3:
            for _ in range(source.choice((1, 5, 200, 800))):
                tree = [tree] if source.random() < 0.5 else {"a": tree}
            return tree
    return _json(source)


def _encoded(made: Any) -> bytes:
    try:
        return json.dumps(made).encode()
    except RecursionError:
        return b'{"a":' * 3_000


def _bodies(world: World, source: random.Random, case: Case) -> None:
    for _ in range(BODIES_EACH):
        path, fields = source.choice(VALID)
        if source.random() < 0.15:
            size = min(BODY_BYTES_MAX, int(300 * 10 ** source.uniform(0, 4.5)))
            path, content = body(source.choice(list(SHAPES)), world.target.model, size)
        else:
            made: Any = {"model": world.target.model, **fields}
            for _ in range(source.choice((0, 1, 1, 1, 2, 4))):
                made = _mutated(source, made)
            content = _encoded(made)
        if source.random() < 0.05:
            at = source.randrange(len(content))
            content = content[:at] + source.randbytes(source.randrange(4)) + content[at + source.randrange(4) :]
        _post(world, case, path, content)


# --- grammars -------------------------------------------------------------------------------------------------------------


def _regex(source: random.Random, depth: int = 4) -> str:
    if depth == 0 or source.random() < 0.2:
        words = (
            "a",
            "[a-z]",
            "\\d",
            ".",
            "[^\\s\\S]",
            "é",
            "",
            "\\",
            "(",
            "[",
            "<eos>",
            "\\x00",
            "\\p{L}",
            "(?=a)",
            "^",
            "$",
        )
        return source.choice(words)
    parts = [_regex(source, depth - 1) for _ in range(source.choice((1, 2, 3, 20)))]
    inner = source.choice(("", "|")).join(parts)
    high = source.choice((1, 9, 300, 5_000))
    return source.choice(("({})", "({})*", "({})+", "(?:{})?", "({}){{0," + str(high) + "}}")).format(inner)


def _rules(source: random.Random, mark: str, root: str) -> str:
    """Random rules of a grammar in Lark or GBNF."""
    names = [root, "a", "b", "c"][: source.choice((1, 2, 4))]
    words = [
        '"x"',
        '"<|user|>"',
        "/[a-z]{1,99}/",
        "[a-z]",
        "(a | b)*",
        "%json {}",
        "/a/ & /b/",
        "  ",
        "",
        "~",
        "\t" * 500,
    ]
    lines = []
    for name in names * source.choice((1, 1, 300)):
        items = source.choices(words + names * 3, k=source.choice((1, 3, 30)))
        lines.append(f"{' ' * source.choice((0, 0, 900))}{name} {mark} {source.choice((' ', ' | ')).join(items)}")
    return "\n".join(lines)


def _with_special(source: random.Random, tree: Any) -> Any:
    """Returns the same schema, in which some constants are names of special tokens."""
    if isinstance(tree, dict):
        if tree.get("type") == "string" and source.random() < 0.3:
            return {"const": source.choice(SPECIAL)}
        return {key: _with_special(source, value) for key, value in tree.items()}
    return [_with_special(source, one) for one in tree] if isinstance(tree, list) else tree


def _grammars(world: World, source: random.Random, case: Case) -> None:
    for _ in range(GRAMMARS_EACH):
        asked: dict[str, Any]
        schema: dict[str, Any] | None = None
        match source.randrange(6):
            case 0:
                asked = {"guided_regex": _regex(source)}
            case 1:
                asked = {"guided_grammar": _rules(source, ":", "start")}
            case 2:
                asked = {"guided_grammar": _rules(source, "::=", "root")}
            case 3:
                asked = {"guided_json": _mutated(source, _mutated(source, random_root(source)))}
            case _:
                schema = _with_special(source, random_root(source))
                asked = {"guided_json": schema}
        made = {"model": world.target.model, "prompt": "x", "max_tokens": 200, "seed": source.randrange(99), **asked}
        content = _encoded({**made, "logit_bias": _ENDS_SOON} if schema else made)
        answer = _post(world, case, "/v1/completions", content)
        if schema is not None and answer is not None and answer.status_code == 200:
            (choice,) = answer.json()["choices"]
            if choice["finish_reason"] == "stop" and (wrong := _fault(schema, choice["text"])):
                case.faults.append(f"{choice['text'][:200]!r} told as complete for {json.dumps(schema)[:600]}: {wrong}")


def _fault(schema: dict[str, Any], text: str) -> str:
    """Returns why an answer does not match the schema; empty if it does."""
    try:
        jsonschema.validate(json.loads(text), schema, jsonschema.Draft202012Validator)
    except (ValueError, jsonschema.ValidationError) as error:
        return str(error)[:200]
    return ""


# --- frames and states ----------------------------------------------------------------------------------------------------


def _frames(world: World, source: random.Random, case: Case) -> None:
    port = source.choice(world.ports)
    if source.random() < 0.2:
        peer = FakePeer(world.target, port.process, None)
        count = case.sent = source.choice((3, 100, 100_000, 300_000))
        peer.send_frames(count, 1)
        peer.listen(2_000)
        peer.close(2_000)
        return
    case.sent = FRAMES_EACH
    try:
        port.throw(FRAMES_EACH, case.seed)
    except zmq.Again:
        case.faults.append(f"the {port.name} port takes nothing for a minute")


def _states(_: World, source: random.Random, case: Case) -> None:
    for _number in range(RUNS_EACH):
        for name, run in RUNS.items():
            seed = source.randrange(1 << 31)
            case.sent += EVENTS
            if fault := run(seed, EVENTS):
                case.faults.append(f"{name}, run({seed}, {EVENTS}): {fault.error} at {fault.where[-1]}")


KINDS: Final[dict[str, Callable[[World, random.Random, Case], None]]] = {
    "bodies": _bodies,
    "grammars": _grammars,
    "frames": _frames,
    "states": _states,
}
