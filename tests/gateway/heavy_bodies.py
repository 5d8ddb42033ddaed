"""Bodies of some megabytes that are made to take long: shapes of JSON, and the places of each route where they go."""

import json
from collections.abc import Callable, Iterator
from functools import lru_cache

from gateway.http.json_text import VALUES_BYTES_MAX, values_bytes
from tests.gateway.fakes import MODEL

BODY_BYTES_MAX = 8 << 20
_ROOM = 1 << 12
_USER = b'"messages":[{"role":"user","content":"x"}]'


def _list(piece: bytes) -> Callable[[int], bytes]:
    return lambda size: b"[" + b",".join([piece] * (size // (len(piece) + 1))) + b"]"


def _counted(before: bytes, piece: bytes, after: bytes) -> Callable[[int], bytes]:
    """A list or an object of pieces that differ: `%d` stands in them."""
    width = len(piece) + 5
    return lambda size: before + b",".join(piece % number for number in range(size // width)) + after


def _text(piece: bytes) -> Callable[[int], bytes]:
    return lambda size: b'"' + piece * (size // len(piece)) + b'"'


def _arguments(size: int) -> bytes:
    return json.dumps('{"a":[' + ",".join(["{}"] * (size // 3)) + "]}").encode()


SHAPES: dict[str, Callable[[int], bytes]] = {
    "ones": _list(b"1"),
    "token ids": _list(b"127"),
    "floats": _list(b"1.5"),
    "small floats": _list(b"1.5e-7"),
    "great floats": _list(b"1e308"),
    "subnormal floats": _list(b"5E-324"),
    "long floats": _list(b"9" * 308 + b".0"),
    "long fractions": _list(b"0." + b"0" * 320 + b"123"),
    "empty objects": _list(b"{}"),
    "empty lists": _list(b"[]"),
    "strings": _counted(b"[", b'"%d"', b"]"),
    "objects": _list(b'{"a":{"b":[1]}}'),
    "keys": _counted(b"{", b'"%d":1', b"}"),
    "bad biases": _counted(b"{", b'"%d":""', b"}"),
    "duplicate keys": lambda size: b"{" + b",".join([b'"a":1'] * (size // 6)) + b"}",
    "long key": lambda size: b'{"' + b"k" * size + b'":1}',
    "deep": lambda size: b"[" * (size // 2) + b"]" * (size // 2),
    "deep lists": _list(b"[" * 800 + b"]" * 800),
    "digits": lambda size: b"9" * size,
    "fraction": lambda size: b"0." + b"9" * size,
    "letters": _text(b"a"),
    "prose": _text(b"the quick, brown fox; "),
    "base64": _text(b"iVBORw0KGgoAAAANSUhEUgAA"),
    "escapes": _text(b"\\u00e9"),
    "quotes": _text(b'\\"'),
    "backslashes": _text(b"\\\\"),
    "braces": _text(b"{[,:"),
    "emoji": _text("🌍".encode()),
    "parts": _list(b'{"type":"text","text":""}'),
    "messages": _list(b'{"role":"user","content":"x"}'),
    "calls": _list(b'{"id":"a","type":"function","function":{"name":"f","arguments":"{}"}}'),
    "thoughts": _list(b'{"type":"thinking","thinking":"x"}'),
    "tools": _list(b'{"type":"function","function":{"name":"f"}}'),
    "enum": _counted(b'{"type":"object","properties":{"a":{"enum":[', b'"%d"', b"]}}}"),
    "properties": _counted(b'{"type":"object","properties":{', b'"p%d":{"type":"string"}', b"}}"),
    "arguments": _arguments,
}
_ANY = ("ones", "empty objects", "keys", "prose")
_TEXTS = ("prose", "escapes", "quotes", "emoji", "parts", "ones", "messages")
PLACES: dict[str, dict[bytes, tuple[str, ...]]] = {
    "/v1/chat/completions": {
        b'"messages":[{"role":"user","content":@}]': (*SHAPES,),
        b'"messages":@': ("messages", "ones", "empty objects"),
        b'"messages":[{"role":"user","content":"x","other":@}]': _ANY,
        b'"messages":[{"role":"assistant","content":"x","parsed":@}]': ("empty objects", "strings", "deep lists"),
        b'"messages":[{"role":"assistant","tool_calls":@}]': ("calls", "ones", "keys"),
        b'"messages":[{"role":"assistant","tool_calls":[{"id":"a","function":{"name":"f","arguments":@}}]}]': (
            "arguments",
            "prose",
        ),
        _USER + b',"tools":@': ("tools", "ones", "empty objects"),
        _USER + b',"tools":[{"type":"function","function":{"name":"f","parameters":@}}]': (
            "enum",
            "properties",
            "keys",
        ),
        _USER + b',"tool_choice":@': _ANY,
        _USER + b',"stop":@': ("strings", "ones", "prose"),
        _USER + b',"logit_bias":@': ("keys", "bad biases"),
        _USER + b',"stop_token_ids":@': ("token ids", "strings"),
        _USER + b',"metadata":@': _ANY,
        _USER + b',"response_format":{"type":"json_schema","json_schema":{"name":"x","schema":@}}': ("enum",),
        _USER + b',"chat_template_kwargs":@': ("keys",),
        _USER + b',"priority":@': ("prose",),
        _USER + b',"unknown":@': _ANY,
    },
    "/v1/completions": {
        b'"prompt":@': ("token ids", "ones", "strings", "prose", "empty lists"),
        b'"prompt":"x","allowed_token_ids":@': ("token ids", "strings"),
        b'"prompt":"x","echo":true,"best_of":@': ("digits",),
    },
    "/v1/responses": {
        b'"input":@': _TEXTS,
        b'"input":[{"role":"assistant","content":@}]': ("parts",),
        b'"input":"x","instructions":@': ("prose",),
        b'"input":"x","tools":[{"type":"function","name":"f","parameters":@}]': ("properties", "empty objects"),
        b'"input":"x","metadata":@': ("keys",),
        b'"input":"x","tool_choice":{"type":"allowed_tools","tools":@}': ("tools",),
    },
    "/v1/messages": {
        b'"max_tokens":5,"messages":@': ("messages", "ones"),
        b'"max_tokens":5,"messages":[{"role":"assistant","content":@}]': (*_TEXTS, "thoughts"),
        b'"max_tokens":5,"system":@,' + _USER: ("parts",),
        b'"max_tokens":5,"tools":[{"name":"f","input_schema":@}],' + _USER: ("properties",),
    },
    "/v1/messages/count_tokens": {b'"messages":[{"role":"user","content":@}]': _TEXTS},
    "/tokenize": {b'"prompt":@': ("ones", "keys"), b'"messages":[{"role":"user","content":@}]': ("parts", "ones")},
    "/detokenize": {b'"tokens":@': ("token ids", "strings", "ones")},
}


@lru_cache(maxsize=len(SHAPES))
def _largest(shape: str) -> tuple[bytes, ...]:
    """As large as a body may be; and, where the number of its values alone has that refused, nearly as many as are allowed."""
    whole = SHAPES[shape](BODY_BYTES_MAX - _ROOM)
    cost = values_bytes(whole)
    if cost <= VALUES_BYTES_MAX:
        return (whole,)
    return whole, SHAPES[shape](int(0.95 * len(whole) * VALUES_BYTES_MAX / cost))


def bodies() -> Iterator[tuple[str, str, bytes]]:
    """(name, path, body). What is refused before it is decoded comes once, not in every place."""
    refused: set[str] = set()
    for path, places in PLACES.items():
        for place, shapes in places.items():
            for shape in shapes:
                for value in _largest(shape)[-1 if shape in refused else 0 :]:
                    refused.add(shape)
                    body = b'{"model":"%b",%b}' % (MODEL.encode(), place.replace(b"@", value))
                    yield f"{shape} of {len(body)} bytes in {place.decode()[-60:]}", path, body
