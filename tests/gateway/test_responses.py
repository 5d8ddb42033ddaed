"""/v1/responses through OpenAI's own client, and what is kept of it."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import openai
import pytest

from gateway.openai.request_types import validate
from gateway.response_store import COST_BYTES_MIN, ResponseStore
from gateway.responses.convert import as_chat, input_items
from gateway.responses.types import ResponsesRequest
from gateway.tools.request import tools_of
from tests.gateway.fakes import ANSWER, MODEL, Site, make_site, served
from tests.gateway.http_words import ANSWER_TOKENS, on_site

Client = openai.AsyncOpenAI
WEATHER = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


def with_client(test: Callable[[Site, Client], Awaitable[None]], *, api_key: str = "none", **options: Any) -> None:
    async def body() -> None:
        site = make_site(**options)
        async with served(site) as url, Client(base_url=f"{url}/v1", api_key=api_key, max_retries=0) as client:
            await test(site, client)

    asyncio.run(body())


def prompt_of(site: Site, number: int = -1) -> str:
    return site.gateway.models[0].tokenizer.decode_all(site.cluster.submits[number][1])


def test_response_has_openais_shape() -> None:
    """A response has the id, status, text and usage of OpenAI's API."""

    async def test(site: Site, client: Client) -> None:
        found = await client.responses.create(
            model=MODEL, input="Hi", instructions="Be brief.", metadata={"a": "b"}, max_output_tokens=200
        )
        assert (found.status, found.output_text) == ("completed", ANSWER) and found.id.startswith("resp-")
        assert found.usage is not None and found.usage.output_tokens == ANSWER_TOKENS
        assert found.metadata == {"a": "b"} and found.instructions == "Be brief."
        assert "Be brief." in prompt_of(site)
        cut = await client.responses.create(model=MODEL, input="Hi", max_output_tokens=3)
        assert cut.status == "incomplete" and cut.incomplete_details is not None
        assert cut.incomplete_details.reason == "max_output_tokens" and ANSWER.startswith(cut.output_text)

    with_client(test)


def test_stream_events_build_the_response() -> None:
    """The numbered events of a stream come in OpenAI's order and build the response."""

    async def test(site: Site, client: Client) -> None:
        events = [one async for one in await client.responses.create(model=MODEL, input="Hi", stream=True)]
        kinds = list(dict.fromkeys(event.type for event in events))
        assert kinds == [
            "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
            "response.output_text.delta", "response.output_text.done", "response.content_part.done",
            "response.output_item.done", "response.completed",
        ]  # fmt: skip
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == ANSWER
        last = events[-1]
        assert last.type == "response.completed" and last.response.output_text == ANSWER
        async with client.responses.stream(model=MODEL, input="Hi") as stream:
            assert (await stream.get_final_response()).output_text == ANSWER
        site.cluster.interrupt_at = dict.fromkeys(range(1, 9), 4)
        events = [one async for one in await client.responses.create(model=MODEL, input="Hi", stream=True)]
        assert events[-1].type == "response.failed"

    with_client(test)


def test_conversation_continues_from_kept() -> None:
    """A conversation goes on from a kept response, without its instructions, until it is deleted."""

    async def test(site: Site, client: Client) -> None:
        first = await client.responses.create(model=MODEL, input="first question", instructions="only once")
        second = await client.responses.create(model=MODEL, input="second", previous_response_id=first.id)
        prompt = prompt_of(site)
        assert prompt.index("first question") < prompt.index(ANSWER) < prompt.index("second")
        assert "only once" not in prompt, "instructions are of one response"
        assert (await client.responses.retrieve(second.id)).output_text == ANSWER
        await client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError, match=f"{first.id}.*another gateway"):
            await client.responses.create(model=MODEL, input="x", previous_response_id=first.id)
        unkept = await client.responses.create(model=MODEL, input="x", store=False)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(unkept.id)

    with_client(test)


def test_function_call_round_trip() -> None:
    """A function call comes as an item and in events, and its result can be sent back."""

    async def test(site: Site, client: Client) -> None:
        call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
        site.cluster.answer = lambda _s, _c: [
            *site.gateway.models[0].tokenizer.encode(call, add_special_tokens=False),
            2,
        ]
        found = await client.responses.create(model=MODEL, input="Weather?", tools=[WEATHER])  # type: ignore[list-item]
        (item,) = [item for item in found.output if item.type == "function_call"]
        assert (item.name, item.arguments.replace(" ", "")) == ("weather", '{"city":"Rome"}')
        events = [
            e
            async for e in await client.responses.create(  # type: ignore[call-overload]
                model=MODEL,
                input="Weather?",
                tools=[WEATHER],  # type: ignore[list-item]
                stream=True,  # type: ignore[list-item]
            )
        ]
        done = [event for event in events if event.type == "response.function_call_arguments.done"]
        assert [one.arguments for one in done] == [item.arguments]
        deltas = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
        assert "".join(deltas) == item.arguments  # type: ignore[arg-type]
        result = {"type": "function_call_output", "call_id": item.call_id, "output": "sunny in Rome"}
        await client.responses.create(model=MODEL, input=[result], previous_response_id=found.id)  # type: ignore[list-item]
        assert "sunny in Rome" in prompt_of(site)

    with_client(test)


def test_cut_call_can_be_continued() -> None:
    """A response that was cut amid the arguments of its call can be the previous one, with a result and without."""

    async def test(site: Site, client: Client) -> None:
        call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ro'
        ids = site.gateway.models[0].tokenizer.encode(call, add_special_tokens=False)
        site.cluster.answer = lambda _s, _c: ids
        asked: Any = {"model": MODEL, "tools": [WEATHER]}
        cut = await client.responses.create(input="Weather?", max_output_tokens=len(ids), **asked)
        assert cut.status == "incomplete"
        calls = [item for item in cut.output if item.type == "function_call"]
        results: list[Any] = [
            {"type": "function_call_output", "call_id": one.call_id, "output": "sunny"} for one in calls
        ]
        for sent in ([*results, {"role": "user", "content": "Go on"}], *([results] if results else [])):
            await client.responses.create(input=sent, previous_response_id=cut.id, max_output_tokens=2, **asked)
            assert '"city": "Ro' in prompt_of(site) or '"city":"Ro' in prompt_of(site)

    with_client(test)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{**WEATHER, "name": "a b"}]}, "tools[0].name"),
        (
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "odd"}, "strict": True}}},
            "text.format.schema",
        ),
        ({"input": [{"role": "tool", "content": "x"}]}, "input"),
    ],
)
def test_errors_use_responses_field_names(fields: dict[str, Any], param: str) -> None:
    """Errors name the field as the responses API does."""

    async def test(site: Site, client: Client) -> None:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.create(**{"model": MODEL, "input": "Hi", **fields})
        assert caught.value.param == param and f"'{param}" in caught.value.message

    with_client(test)


def test_allowed_tools_and_thoughts_are_taken() -> None:
    """Allowed tools limit the choice of tools, and several reasoning items are joined."""
    chosen = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "weather"}]}
    thoughts = [{"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": t}]} for t in "ab"]
    items = [{"role": "user", "content": "Hi"}, *thoughts, {"role": "user", "content": "so?"}]
    body = {"model": MODEL, "input": items, "tools": [WEATHER], "tool_choice": chosen}
    request = validate(ResponsesRequest, body)
    chat = as_chat(request, input_items(request))
    assert chat.messages[1].reasoning_content == "a\nb"
    tools = tools_of({"tools": chat.tools, "tool_choice": chat.tool_choice})
    assert tools is not None and tools.must_call and [tool.name for tool in tools.allowed] == ["weather"]


TENANTS = """
[tenants.a]
keys = ["{a}"]
[tenants.b]
keys = ["{b}"]
"""


def test_other_tenants_cannot_read_responses() -> None:
    """Responses of one tenant cannot be read, deleted or continued by another."""
    import hashlib

    tenants = TENANTS.format(**{name: hashlib.sha256(name.encode()).hexdigest() for name in "ab"})

    async def test(site: Site, client: Client) -> None:
        mine = await client.responses.create(model=MODEL, input="secret")
        other = client.with_options(api_key="b")
        for attempt in (
            lambda: other.responses.retrieve(mine.id),
            lambda: other.responses.delete(mine.id),
            lambda: other.responses.create(model=MODEL, input="x", previous_response_id=mine.id),
        ):
            with pytest.raises(openai.NotFoundError):
                await attempt()
        assert (await client.responses.retrieve(mine.id)).id == mine.id

    with_client(test, api_key="a", tenants=tenants)


def test_kept_responses_are_bounded() -> None:
    """Kept responses are bounded in number, bytes and time, and for each tenant."""
    size = COST_BYTES_MIN
    store = ResponseStore(keep_s=10.0, bytes_max=8 * size)
    for number in range(6):
        assert store.put("greedy", f"g{number}", b"x" * size, b"", now=float(number))
    assert [store.get("greedy", f"g{number}", 5.0) is not None for number in range(6)] == 4 * [False] + 2 * [True]
    for tenant in "abcdefgh":
        assert store.put(tenant, f"of-{tenant}", b"", b"z", now=6.0)
        assert store.get(tenant, f"of-{tenant}", 6.0) and store.share.held <= 8 * size
    assert store.get("b", "of-h", 6.0) is None and store.get("h", "of-h", 6.0)
    assert not store.put("a", "huge", b"x" * (2 * size + 1), b"", now=6.0), "more than one may have"
    assert store.get("h", "of-h", 16.0) is None
    assert store.put("a", "later", b"", b"", now=16.0) and len(store) == 1, "the others have expired"
    assert store.share.held == size
    assert not ResponseStore(keep_s=0).put("a", "r", b"", b"", 0.0)


def test_tokenize_and_detokenize_round_trip() -> None:
    """Tokens of /tokenize give the text again on /detokenize."""

    async def test(site: Site) -> None:
        async with site.client() as client:
            there = (
                await client.post("/tokenize", json={"model": MODEL, "prompt": "Hi 日", "return_token_strs": True})
            ).json()
            assert there["count"] == len(there["tokens"]) == len(there["token_strs"])
            back = await client.post("/detokenize", json={"tokens": there["tokens"]})
            assert back.json() == {"prompt": "Hi 日"}
            chat = (await client.post("/tokenize", json={"messages": [{"role": "user", "content": "Hi"}]})).json()
            await client.post(
                "/v1/chat/completions", json={"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
            )
            assert site.cluster.submits[-1][1] == chat["tokens"]

    on_site(test)


def test_cors_allows_configured_origins() -> None:
    """Pages of the configured origins may call, and those of others may not."""

    async def test(site: Site) -> None:
        from gateway.app import create_app

        site.gateway.cors_origins = ["https://chat.example"]
        site.app = create_app(site.gateway)
        asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
        async with site.client() as client:
            for origin, allowed in (("https://chat.example", "https://chat.example"), ("https://evil.example", None)):
                headers = {"Origin": origin, **asked}
                answer = await client.options("/v1/chat/completions", headers=headers)
                assert answer.headers.get("access-control-allow-origin") == allowed
                answer = await client.get("/health", headers={"Origin": origin})
                if allowed:  # a pattern is not allowed there
                    assert "x-ratelimit-remaining-tokens" in answer.headers["access-control-expose-headers"]
                assert answer.headers.get("access-control-allow-origin") == allowed

    on_site(test)
