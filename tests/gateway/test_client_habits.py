"""What published clients send, found by running them: it is served as OpenAI's, Anthropic's or vLLM's servers do."""

import asyncio
import codecs
import gzip
from dataclasses import replace
from typing import Any

import anthropic
import msgspec
import pytest
from prometheus_client import CONTENT_TYPE_LATEST

from gateway.text.template_facts import TemplateFacts
from gateway.tools.conversation import template_options
from runtime.metrics.server import Reply
from tests import tiny_models
from tests.gateway.fakes import CONTEXT_TOKENS, MODEL, Site, make_site, served, tokenizer
from tests.gateway.http_words import chat, on_site, post

HI: Any = [{"role": "user", "content": "Hi"}]
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"type": {"type": "string"}}}
LONG: Any = [{"role": "user", "content": "x" * CONTEXT_TOKENS}]


def tool(name: str, description: str = "", *, size: int = 0) -> dict[str, Any]:
    """`size`: properties of its schema."""
    properties = {f"property_{number}": {"type": "string"} for number in range(size)}
    schema = {"type": "object", "properties": {**SCHEMA["properties"], **properties}}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


async def status(site: Site, path: str, **fields: Any) -> Any:
    return (await post(site, path, **fields)).status_code


def test_agents_own_tools_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Agents send long descriptions, long names of MCP tools, hundreds of tools, and properties named `type`."""

    monkeypatch.setattr(tokenizer(), "facts", replace(tokenizer().facts, context_tokens=100_000))

    async def test(site: Site) -> None:
        await chat(site, tools=[tool("workflow", "x" * 19_000), tool("mcp__" + "n" * 123)])
        await chat(site, tools=[tool(f"mcp__{number}", size=24) for number in range(48)])
        called = {"id": "c", "type": "function", "function": {"name": "n" * 128, "arguments": "{}"}}
        await chat(site, messages=[*HI, {"role": "assistant", "tool_calls": [called]}])
        named = {"name": "n" * 128, "input_schema": SCHEMA, "description": "x" * 19_000}
        assert await status(site, "/v1/messages", max_tokens=9, messages=HI, tools=[named]) == 200

    on_site(test)


def test_thread_is_refused_as_runners_expect() -> None:
    """Anthropic's tool runners send the whole conversation if they are told that there are no threads."""

    async def test(site: Site) -> None:
        answer = await post(site, "/v1/messages", max_tokens=9, messages=HI, thread={"type": "create"})
        details = answer.json()["error"]["details"]
        assert details == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}

        @anthropic.beta_async_tool
        async def weather(city: str) -> str:
            return city

        async with served(site) as url, anthropic.AsyncAnthropic(base_url=url, api_key="k", max_retries=0) as client:
            runner = client.beta.messages.tool_runner(model=MODEL, max_tokens=99, messages=HI, tools=[weather])
            assert (await runner.until_done()).stop_reason == "end_turn"

    on_site(test)


def test_overflow_has_the_vendors_words() -> None:
    """LiteLLM and agents know the overflow of the context by OpenAI's and Anthropic's words."""

    async def test(site: Site) -> None:
        for path, fields in (("chat/completions", {"messages": LONG}), ("responses", {"input": LONG}),
                             ("completions", {"prompt": "x" * CONTEXT_TOKENS, "max_tokens": 5})):  # fmt: skip
            error = (await post(site, f"/v1/{path}", **fields)).json()["error"]
            assert error["code"] == "context_length_exceeded"
            said = f"This model's maximum context length is {CONTEXT_TOKENS} tokens. However, you requested "
            assert error["message"].startswith(said)
        error = (await post(site, "/v1/messages", max_tokens=9, messages=LONG)).json()["error"]
        assert error["message"] == f"prompt is too long: {CONTEXT_TOKENS + 3} tokens > {CONTEXT_TOKENS} maximum"
        huge: Any = [{"role": "user", "content": "x" * 20 * CONTEXT_TOKENS}]
        error = (await post(site, "/v1/messages", max_tokens=9, messages=huge)).json()["error"]
        assert error["message"].startswith("prompt is too long: ")

    on_site(test)


def test_responses_take_vllms_sampling() -> None:
    """Benchmarks send vLLM's fields to /v1/responses, and they reach the sampling."""

    async def test(site: Site) -> None:
        sent = {
            "min_p": 0.1, "repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.3, "min_tokens": 2,
            "logit_bias": {"5": 1.0}, "stop_token_ids": [7],
        }  # fmt: skip
        free = {"stop": ["Paris"], "ignore_eos": True, "include_reasoning": True, "skip_special_tokens": False}
        answer = await post(site, "/v1/responses", input="Hi", request_id="mine", **sent, **free)
        assert answer.status_code == 200 and answer.headers["x-request-id"] == "mine"
        assert answer.json()["output"][0]["content"][0]["text"] == "The capital is "
        sampling = site.cluster.submits[-1][0].sampling
        given = {**sent, "logit_bias": ((5, 1.0),), "stop_token_ids": (7,)}
        assert {name: getattr(sampling, name) for name in given} == given
        for more in ({"structured_outputs": {"choice": ["a"]}}, {"chat_template_kwargs": {"enable_thinking": False}}):
            assert await status(site, "/v1/responses", input="Hi", **more) == 200
        assert "choice" not in sampling.grammar and site.cluster.submits[-2][0].sampling.grammar

    on_site(test)


def test_forced_call_needs_no_form() -> None:
    """A forced call has no text, so that a form of text beside it is ignored."""

    async def test(site: Site) -> None:
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": "of the text"}}}
        await chat(site, tools=[tool("f")], tool_choice="required", response_format=form)
        assert "of the text" not in site.cluster.submits[-1][0].sampling.grammar
        function = {"type": "function", "name": "f", "parameters": SCHEMA}
        text = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}
        for choice in ("required", {"type": "function", "name": "f"}):
            fields: Any = {"input": "Hi", "tools": [function], "tool_choice": choice, "text": text}
            assert await status(site, "/v1/responses", **fields) == 200

    on_site(test)


@pytest.mark.parametrize(
    ("variables", "kwargs", "effort", "options"),
    [
        ("", {"enable_thinking": False, "thinking": False, "x": None}, None, {}),
        ("", {"reasoning_effort": "low"}, "high", {}),
        ("thinking", {"enable_thinking": False}, None, {"thinking": False}),
        ("enable_thinking", {"enable_thinking": True, "thinking": False}, None, {"enable_thinking": True}),
        ("thinking", {}, "none", {"thinking": False}),
        ("enable_thinking", {"reasoning_effort": "high"}, None, {"enable_thinking": True}),
    ],
)
def test_thinking_may_be_turned_off(variables: str, kwargs: Any, effort: str | None, options: Any) -> None:
    """Fleets turn thoughts off for every model: by any name of the variable, and where there are none."""
    assert template_options(TemplateFacts("", frozenset(variables.split())), kwargs, effort) == options


def test_small_habits_are_served() -> None:
    """Fields and paths that clients send without need are taken, and what is not there is a 404."""

    async def test(site: Site) -> None:
        await chat(site, store=True, logprobs=False, top_logprobs=0)
        for path in ("input_tokens", "compact"):
            assert await status(site, f"/v1/responses/{path}", input="Hi") == 404
        async with site.client() as client:
            info = (await client.get("/tokenizer_info")).json()
            assert (info["eos_token"], info["chat_template"]) == ("<eos>", tiny_models.CHAT_TEMPLATE)
            assert (await client.get("/v1/models/")).json() == (await client.get("/v1/models")).json()

    on_site(test)


def test_metrics_are_on_the_apis_port() -> None:
    """Benchmarks find the metrics under the API's address, for those who may use it; with several tenants nobody does."""
    page = Reply(200, b"up 1\n", CONTENT_TYPE_LATEST)

    async def found(key: str = "", **options: Any) -> tuple[int, str]:
        async with make_site(**options).client() as client:
            answer = await client.get("/metrics", headers={"x-api-key": key} if key else {})
            return answer.status_code, answer.text

    async def body() -> None:
        assert await found(metrics_page=lambda: page) == (200, "up 1\n")
        assert (await found())[0] == 404, "--no-api-metrics"
        keyed: Any = {"api_keys": ("secret",), "metrics_page": lambda: page}
        assert ((await found(**keyed))[0], (await found("secret", **keyed))[0]) == (401, 200)
        assert (await found("secret", tenants="[tenants.acme]", **keyed))[0] == 404

    asyncio.run(body())


@pytest.mark.parametrize("encoding", ["gzip", "GZIP", "br", "identity, gzip", "zstd", "nonsense"])
def test_compressed_body_is_refused_by_name(encoding: str) -> None:
    """A body with a Content-Encoding is a 415 that says what is accepted, on every path that reads a body."""

    async def test(site: Site) -> None:
        headers = {"content-type": "application/json", "content-encoding": encoding}
        plain = msgspec.json.encode({"model": MODEL, "messages": HI})
        async with site.client() as client:
            for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages",
                         "/v1/messages/count_tokens", "/tokenize", "/detokenize"):  # fmt: skip
                answer = await client.post(path, content=gzip.compress(plain), headers=headers)
                assert (answer.status_code, answer.headers["accept-encoding"]) == (415, "identity")
                assert encoding in answer.json()["error"]["message"]
            headers["content-encoding"] = "identity"
            for sent in (plain, codecs.BOM_UTF8 + plain):
                assert (await client.post("/v1/chat/completions", content=sent, headers=headers)).status_code == 200

    on_site(test)


@pytest.mark.parametrize(
    "parameters",
    [
        {"type": ["object", "null"], "properties": {"a": {"type": "string"}}},
        {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["b"]},
        {"type": "object", "properties": {}, "required": ["b"], "additionalProperties": False},
        {"type": "object", "required": ["b"], "additionalProperties": False},
        {"type": "object", "properties": None, "required": None, "additionalProperties": None},
    ],
    ids=str,
)
def test_sloppy_functions_are_taken(parameters: Any) -> None:
    """Functions whose schema has a common mistake can be called."""

    async def test(site: Site) -> None:
        await chat(site, tools=[{"type": "function", "function": {"name": "f", "parameters": parameters}}])

    on_site(test)
