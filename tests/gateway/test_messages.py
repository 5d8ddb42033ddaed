"""/v1/messages through Anthropic's own client."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import anthropic
import pytest

from gateway.anthropic.convert import as_chat
from gateway.anthropic.types import MessagesRequest
from gateway.openai.forms import Chat
from gateway.openai.request_types import validate
from tests.gateway.fakes import ANSWER, CONTEXT_TOKENS, MODEL, Site, make_site, served
from tests.gateway.http_words import ANSWER_TOKENS

Client = anthropic.AsyncAnthropic
HI: Any = [{"role": "user", "content": "Hi"}]
WEATHER: Any = {"name": "weather", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}


def with_client(test: Callable[[Site, Client], Awaitable[None]], **options: Any) -> None:
    async def body() -> None:
        site = make_site(**options)
        async with served(site) as url, Client(base_url=url, api_key="secret", max_retries=0) as client:
            await test(site, client)

    asyncio.run(body())


def test_message_and_token_count_agree() -> None:
    """A message answers through Anthropic's client, and count_tokens agrees with its usage."""

    async def test(site: Site, client: Client) -> None:
        blocks: Any = [{"type": "text", "text": "S1"}, {"type": "text", "text": "S2"}]
        found = await client.messages.create(model=MODEL, max_tokens=200, system=blocks, messages=HI)
        assert [block.text for block in found.content if block.type == "text"] == [ANSWER]
        assert (found.stop_reason, found.usage.output_tokens) == ("end_turn", ANSWER_TOKENS)
        assert found._request_id, "Anthropic's client reads the id from a header of its own"
        prompt = site.gateway.models[0].tokenizer.decode_all(site.cluster.submits[-1][1])
        assert "S1\nS2" in prompt
        count = await client.messages.count_tokens(model=MODEL, system=blocks, messages=HI)
        assert count.input_tokens == found.usage.input_tokens == len(site.cluster.submits[-1][1])
        cut = await client.messages.create(model=MODEL, max_tokens=3, messages=HI)
        assert cut.stop_reason == "max_tokens"
        stops = ["nothing", "Paris", "END"]
        for stream in (False, True):
            if stream:
                async with client.messages.stream(model=MODEL, max_tokens=99, messages=HI, stop_sequences=stops) as one:
                    stopped = await one.get_final_message()
            else:
                stopped = await client.messages.create(model=MODEL, max_tokens=99, messages=HI, stop_sequences=stops)  # type: ignore[assignment]
            assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "Paris")

    with_client(test, api_keys=("secret",))


def test_message_stream_has_all_events() -> None:
    """A streamed message has Anthropic's events in their order."""

    async def test(site: Site, client: Client) -> None:
        kinds, texts = [], []
        async for event in await client.messages.create(model=MODEL, max_tokens=200, messages=HI, stream=True):
            kinds.append(event.type)
            if event.type == "content_block_delta" and event.delta.type == "text_delta":
                texts.append(event.delta.text)
        assert list(dict.fromkeys(kinds)) == [
            "message_start", "content_block_start", "content_block_delta", "content_block_stop", "message_delta",
            "message_stop",
        ]  # fmt: skip
        assert "".join(texts) == ANSWER
        site.cluster.interrupt_at = dict.fromkeys(range(1, 9), 4)
        with pytest.raises(anthropic.APIStatusError):
            async for _ in await client.messages.create(model=MODEL, max_tokens=200, messages=HI, stream=True):
                pass

    with_client(test)


def test_tool_call_and_result_round_trip() -> None:
    """A tool call comes as a tool_use block, and its result can be sent back."""

    async def test(site: Site, client: Client) -> None:
        call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
        site.cluster.answer = lambda _s, _c: [
            *site.gateway.models[0].tokenizer.encode(call, add_special_tokens=False),
            2,
        ]
        found = await client.messages.create(model=MODEL, max_tokens=99, messages=HI, tools=[WEATHER])
        (use,) = [block for block in found.content if block.type == "tool_use"]
        assert (found.stop_reason, use.name, use.input) == ("tool_use", "weather", {"city": "Rome"})
        async with client.messages.stream(model=MODEL, max_tokens=99, messages=HI, tools=[WEATHER]) as stream:
            streamed = await stream.get_final_message()
        assert [b.input for b in streamed.content if b.type == "tool_use"] == [{"city": "Rome"}]
        result: Any = {"type": "tool_result", "tool_use_id": use.id, "content": "sunny in Rome"}
        turns: Any = [*HI, {"role": "assistant", "content": found.content}, {"role": "user", "content": [result]}]
        await client.messages.create(model=MODEL, max_tokens=9, messages=turns, tools=[WEATHER])
        assert "sunny in Rome" in site.gateway.models[0].tokenizer.decode_all(site.cluster.submits[-1][1])

    with_client(test)


def test_errors_have_anthropics_shape() -> None:
    """Anthropic's client raises its own typed errors for refused requests."""

    async def test(site: Site, client: Client) -> None:
        image: Any = {"type": "image", "source": {"type": "url", "url": "https://x.example/y.png"}}
        with pytest.raises(anthropic.BadRequestError, match="images are not supported"):
            await client.messages.create(model=MODEL, max_tokens=9, messages=[{"role": "user", "content": [image]}])
        with pytest.raises(anthropic.NotFoundError):
            await client.messages.create(model="other", max_tokens=9, messages=HI)
        with pytest.raises(anthropic.AuthenticationError):
            await client.with_options(api_key="wrong").messages.create(model=MODEL, max_tokens=9, messages=HI)

    with_client(test, api_keys=("secret",))


def test_too_long_conversation_is_still_counted() -> None:
    """The tokens of a conversation are counted although it is too long to be answered."""

    async def test(site: Site, client: Client) -> None:
        long: Any = [{"role": "user", "content": "x " * 2 * CONTEXT_TOKENS}]
        assert (await client.messages.count_tokens(model=MODEL, messages=long)).input_tokens > CONTEXT_TOKENS
        with pytest.raises(anthropic.BadRequestError, match="prompt is too long: "):
            await client.messages.create(model=MODEL, max_tokens=9, messages=long)

    with_client(test)


def test_schema_and_thinking_reach_the_request() -> None:
    """An output schema becomes a grammar, and disabled thinking turns off the template's option."""

    async def test(site: Site, client: Client) -> None:
        schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
        config: Any = {"format": {"type": "json_schema", "schema": schema}}
        await client.messages.create(model=MODEL, max_tokens=9, messages=HI, output_config=config)
        assert '"city"' in site.cluster.submits[-1][0].sampling.grammar
        tokenizer = site.gateway.models[0].tokenizer
        facts = replace(tokenizer.template, variables=tokenizer.template.variables | {"enable_thinking"})
        for thinking, options in (("disabled", {"enable_thinking": False}), ("adaptive", {})):
            request = as_chat(validate(MessagesRequest, {
                "model": MODEL, "max_tokens": 9, "messages": HI, "thinking": {"type": thinking}}))  # fmt: skip
            assert Chat.of(request, facts).options == options

    with_client(test)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"messages": [*HI, {"role": "assistant", "content": "{"}]}, "last message must be the user's"),
        ({"tools": [{**WEATHER, "defer_loading": 1}]}, r"'tools\[0\].defer_loading'"),
        ({"tools": [{**WEATHER, "allowed_callers": ["code_execution_20250825"]}]}, r"tools\[0\].allowed_callers"),
        ({"tools": [{**WEATHER, "input_schema": {"type": "array"}}]}, r"'tools\[0\].input_schema'"),
        ({"tools": [{**WEATHER, "name": "a b"}]}, r"'tools\[0\].name'"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"enum": [[]] * 4001}}}}, "'output_config.format"),
        ({"output_config": {"effort": "huge"}}, "'output_config.effort'"),
        ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "'thinking.budget_tokens'"),
        ({"messages": [{"role": "user", "content": "x", "weight": 1}]}, r"'messages\[0\].weight'"),
        ({"messages": [{"role": "king", "content": "x"}]}, r"'messages\[0\].role'"),
        ({"extra_body": {"mcp_servers": [{"type": "url", "url": "https://x.example", "name": "x"}]}}, "'mcp_servers'"),
        ({"extra_body": {"inference_geo": "us"}}, "inference_geo"),
    ],
)  # fmt: skip
def test_unsupported_field_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    """A field that is not supported is refused by its name in Anthropic's API."""

    async def test(site: Site, client: Client) -> None:
        with pytest.raises(anthropic.BadRequestError, match=message):
            await client.messages.create(**{"model": MODEL, "max_tokens": 9, "messages": HI, **fields})
        assert not site.cluster.submits

    with_client(test)


def test_error_result_is_marked() -> None:
    """A tool result with is_error is shown to the model with the word Error before it."""
    use = {"type": "tool_use", "id": "t", "name": "weather", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": "no such city", "is_error": True}
    turns = [*HI, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    request = as_chat(validate(MessagesRequest, {"model": MODEL, "max_tokens": 9, "messages": turns}))
    assert request.messages[-1].text() == "Error: no such city"
