"""No answer has a character that a client which splits lines as Unicode does would take for the end of one."""

import json
from typing import Any

import msgspec
import pytest

from gateway.http.encoding import encode
from launcher.http.client import SseReader
from tests.gateway.fakes import MODEL, Site
from tests.gateway.http_words import on_site

BREAKS = "\v\f\x1c\x1d\x1e\x85\u2028\u2029"
TEXT = f"a{BREAKS}b“…”日🌍\r\n"
CHAT: Any = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 99}
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}}


def test_only_line_breaks_are_escaped() -> None:
    """JSON of the gateway escapes the characters that may end a line, and no others."""
    for text in (TEXT, "plain", "“…” ‧ ‪ ¤\x84\x86", "𝄞" * 3, "\\u2028", "\x7f\0"):
        written = encode({"t": text})
        assert json.loads(written) == {"t": text}
        assert len(written.decode().splitlines()) == 1
    for text in ("plain", "“…” ‧ ‪ ¤\x84\x86𝄞"):
        assert encode(text) == msgspec.json.encode(text), "as short as before"
    with pytest.raises(UnicodeEncodeError):
        encode("\ud800")


def call_of(site: Site) -> list[int]:
    call = json.dumps({"name": "w", "arguments": {"city": TEXT}}, ensure_ascii=False)
    return [*site.gateway.models[0].tokenizer.encode(f"<tool_call>\n{call}\n</tool_call>", add_special_tokens=False), 2]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": TEXT, "echo": True, "max_tokens": 99, "logprobs": 1}),
        ("/v1/chat/completions", CHAT),
        ("/v1/chat/completions", {**CHAT, "logprobs": True}),
        ("/v1/chat/completions", {**CHAT, "tools": [{"type": "function", "function": {"name": "w", "parameters": WEATHER}}]}),
        ("/v1/responses", {"input": "Hi", "metadata": {"a": TEXT}, "instructions": TEXT}),
        ("/v1/messages", CHAT),
        ("/v1/messages", {**CHAT, "tools": [{"name": "w", "input_schema": WEATHER}]}),
        ("/v1/chat/completions", {**CHAT, TEXT: 1}),
        ("/v1/messages", {**CHAT, TEXT: 1}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_answers_have_no_inner_breaks(path: str, fields: dict[str, Any], stream: bool) -> None:
    """No answer of any API, streamed or not, has a line break inside of a line."""

    async def test(site: Site) -> None:
        plain = [*site.gateway.models[0].tokenizer.encode(TEXT, add_special_tokens=False), 2]
        site.cluster.answer = lambda _submit, _choice: call_of(site) if "tools" in fields else plain
        async with site.client() as client:
            answer = await client.post(path, json={"model": MODEL, "stream": stream, **fields})
            if path == "/v1/responses" and not stream:
                kept = await client.get(f"/v1/responses/{answer.json()['id']}")
                assert kept.text.splitlines() == [kept.text]
        assert answer.text.splitlines() == answer.text.removesuffix("\n").split("\n")
        if not stream or TEXT in fields:
            assert "a" in json.dumps(answer.json())
        for line in answer.text.split("\n"):
            if line.startswith("data: {"):
                json.loads(line[6:])

    on_site(test)


def test_other_routes_have_no_inner_breaks() -> None:
    """Answers of /tokenize, /detokenize and /v1/models are one line each."""

    async def test(site: Site) -> None:
        async with site.client() as client:
            there = await client.post("/tokenize", json={"prompt": TEXT, "return_token_strs": True})
            back = await client.post("/detokenize", json={"tokens": there.json()["tokens"]})
            assert back.json() == {"prompt": TEXT}
            for answer in (there, back, await client.get("/v1/models")):
                assert answer.text.splitlines() == [answer.text]

    on_site(test)


def test_unescaped_events_are_read() -> None:
    """The reader of events takes line breaks that another server did not escape."""
    event = {"choices": [{"index": 0, "text": TEXT}]}
    data = b"data: " + msgspec.json.encode(event) + b"\r\n\r\ndata: [DONE]\n\n"
    for cut in range(1, len(data)):
        reader = SseReader()
        (found,) = [*reader.feed(data[:cut]), *reader.feed(data[cut:])]
        assert found.choices is not None and found.choices[0].text == TEXT and reader.done
