"""Bodies of requests that are large in one way each. `SHAPES` maps a name to the route and a function that makes a body of a
given size."""

from collections.abc import Callable
from typing import Final

Shape = tuple[str, Callable[[int], bytes]]
CHAT, COMPLETIONS, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"


def fill(unit: str, size: int) -> bytes:
    """Returns about `size` bytes of `unit`, repeated with commas between; `%d` in it is replaced by its number."""
    if "%d" in unit:
        return ",".join([unit % number for number in range(size // (len(unit) + 6))]).encode()
    return b",".join([unit.encode()] * (size // (len(unit) + 1)))


def _inside(before: str, unit: str, after: str) -> Callable[[int], bytes]:
    return lambda size: before.encode() + fill(unit, size - len(before) - len(after) - 2) + after.encode()


def _shapes() -> dict[str, Shape]:
    found: dict[str, Shape] = {}

    def add(path: str, name: str, before: str, unit: str, after: str = "") -> None:
        found[name] = (path, _inside(_START[path] + before, unit, after + "}"))

    user = '"messages":[{"role":"user","content":"x"}]'
    add(CHAT, "bad parts", '"messages":[{"role":"user","content":[', "1", "]}]")
    add(CHAT, "part objects without type", '"messages":[{"role":"user","content":[', "{}", "]}]")
    add(CHAT, "good parts", '"messages":[{"role":"user","content":[', '{"type":"text","text":""}', "]}]")
    add(CHAT, "unknown keys of a message", '"messages":[{"role":"user","content":"x",', '"k%d":1', "}]")
    add(
        CHAT,
        "unknown keys of a part",
        '"messages":[{"role":"user","content":[{"type":"text","text":"",',
        '"k%d":1',
        "}]}]",
    )
    add(CHAT, "unknown keys", f"{user},", '"k%d":1')
    add(CHAT, "numbers that are slow to read", f'{user},"metadata":[', "1e308", "]")
    add(CHAT, "one key many times", f"{user},", '"seed":1')
    add(CHAT, "parsed", '"messages":[{"role":"assistant","content":"x","parsed":[', "{}", "]}]")
    add(CHAT, "parsed, nested", '"messages":[{"role":"assistant","content":"x","parsed":[', "[[[[1]]]]", "]}]")
    add(CHAT, "parsed keys", '"messages":[{"role":"assistant","content":"x","parsed":{', '"k%d":{}', "}}]")
    add(CHAT, "many messages", '"messages":[', '{"role":"user","content":"x"}', "]")
    add(CHAT, "bad messages", '"messages":[', "1", "]")
    add(CHAT, "tool calls", '"messages":[{"role":"assistant","tool_calls":[', "{}", "]}]")
    add(CHAT, "tools", f'{user},"tools":[', "{}", "]")
    tool = '{"type":"function","function":{"name":"f%d","parameters":{"type":"object"}}}'
    add(CHAT, "good tools", f'{user},"tools":[', tool, "]")
    add(CHAT, "template variables", f'{user},"chat_template_kwargs":{{', '"k%d":1', "}")
    add(CHAT, "metadata", f'{user},"metadata":{{', '"k%d":"v"', "}")
    schema = f'{user},"response_format":{{"type":"json_schema","json_schema":{{"name":"x","strict":true,"schema":'
    add(CHAT, "schema properties", schema + '{"type":"object","properties":{', '"k%d":{}', "}}}}")
    add(CHAT, "schema enum", schema + '{"enum":[', "1", "]}}}")
    add(COMPLETIONS, "bad logit_bias", '"prompt":"x","logit_bias":{', '"%d":""', "}")
    add(COMPLETIONS, "good logit_bias", '"prompt":"x","logit_bias":{', '"%d":1', "}")
    add(COMPLETIONS, "token ids", '"prompt":[', "1", "]")
    add(COMPLETIONS, "bad token ids", '"prompt":[', '1,""', "]")
    add(COMPLETIONS, "prompts", '"prompt":[', '"x"', "]")
    add(COMPLETIONS, "prompts of ids", '"prompt":[', "[1]", "]")
    for name, unit in {"stop": '"x"', "stop_token_ids": '""', "bad_words": "1", "allowed_token_ids": "-1"}.items():
        add(COMPLETIONS, name, f'"prompt":"x","{name}":[', unit, "]")
    add(COMPLETIONS, "choices", '"prompt":"x","guided_choice":[', '"%d"', "]")
    add(
        COMPLETIONS,
        "structural tags",
        '"prompt":"x","structured_outputs":{"structural_tag":{"structures":[',
        "{}",
        "]}}",
    )
    add(MESSAGES, "blocks", '"messages":[{"role":"user","content":[', "1", "]}]")
    add(MESSAGES, "block objects", '"messages":[{"role":"user","content":[', "{}", "]}]")
    add(MESSAGES, "system blocks", f'{user},"system":[', '""', "]")
    add(MESSAGES, "stop sequences", f'{user},"stop_sequences":[', "1", "]")
    add(MESSAGES, "their tools", f'{user},"tools":[', '{"name":1}', "]")
    add(RESPONSES, "items", '"input":[', "1", "]")
    add(RESPONSES, "item objects", '"input":[', '{"role":"user","content":[1]}', "]")
    add(RESPONSES, "item parts", '"input":[{"role":"user","content":[', "{}", "]}]")
    add(RESPONSES, "their metadata", '"input":"x","metadata":{', '"k%d":1', "}")
    add("/tokenize", "messages to tokenize", '"messages":[{"role":"user","content":[', "1", "]}]")
    add("/detokenize", "bad tokens", '"tokens":[', '""', "]")
    add("/detokenize", "tokens", '"tokens":[', "1", "]")
    return found | {name: (COMPLETIONS, make) for name, make in _RAW.items()}


_RAW: Final[dict[str, Callable[[int], bytes]]] = {
    "a deep list": lambda size: b'{"model":"M","prompt":' + b"[" * (size // 2) + b"]" * (size // 2) + b"}",
    "deep objects": lambda size: b'{"model":"M","prompt":' + b'{"a":' * (size // 6) + b"1" + b"}" * (size // 6) + b"}",
    "a long number": lambda size: b'{"model":"M","prompt":"x","seed":' + b"1" * (size - 40) + b"}",
    "a long fraction": lambda size: b'{"model":"M","prompt":"x","top_p":0.' + b"1" * (size - 40) + b"}",
    "a long text": lambda size: b'{"model":"M","prompt":"' + b"ab " * (size // 3 - 20) + b'"}',
    "escapes": lambda size: b'{"model":"M","prompt":"' + rb"\u00e9" * (size // 6 - 10) + b'"}',
    "one long word": lambda size: b'{"model":"M","prompt":"' + b"a" * (size - 40) + b'"}',
    "a long key": lambda size: b'{"model":"M","prompt":"x","' + b"k" * (size - 40) + b'":1}',
    "a long model": lambda size: b'{"prompt":"x","model":"' + b"k" * (size - 40) + b'"}',
    "white space": lambda size: b" " * size,
    "no UTF-8": lambda size: b'{"model":"M","prompt":"' + b"\xff" * (size - 40) + b'"}',
    "only keys": lambda size: b"{" + fill('"k%d":1', size - 2) + b"}",
}
"""Bodies that are no list of one unit."""
_MODEL: Final = '{"model":"M",'
_START: Final = {
    path: _MODEL + ('"max_tokens":1,' if path in (CHAT, COMPLETIONS, MESSAGES) else "")
    for path in (CHAT, COMPLETIONS, MESSAGES, RESPONSES, "/tokenize", "/detokenize")
}
SHAPES: Final = _shapes()


def body(name: str, model: str, size: int) -> tuple[str, bytes]:
    """(route, body)."""
    path, make = SHAPES[name]
    return path, make(size).replace(b'"M"', f'"{model}"'.encode(), 1)
