"""Agents and the vendors' packages complete a session with tools, with the requests that they send of themselves."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import anthropic
import httpx
import openai
import pytest

from gateway.openai.context import ServedModel
from gateway.openai.prepare import ModelRules
from gateway.text.tokenizer import ModelFacts, ModelTokenizer
from tests import tiny_models
from tests.gateway.agent_sessions import session
from tests.gateway.fakes import MODEL, Site, make_site, served

DONE = "There are two files: a.txt and b.txt."


def with_calls(test: Callable[[Site, str], Awaitable[None]], *calls: tuple[str, dict[str, Any]]) -> None:
    """A model of a long context that makes these calls, and says `DONE` once the last message of the prompt is a result."""

    async def body() -> None:
        site = make_site()
        facts = ModelFacts(65_536, tiny_models.VOCAB, frozenset({tiny_models.EOS}))
        tokenizer = ModelTokenizer(tiny_models.tokenizer(), facts)
        site.gateway.models = [ServedModel(tokenizer, ModelRules(MODEL, 1024))]
        made = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls]

        def answer(_submit: Any, _choice: int) -> list[int]:
            asked = tokenizer.decode_all(site.cluster.submits[-1][1])
            text = DONE if "a.txt" in asked else "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in made)
            return [*tokenizer.encode(text, add_special_tokens=False), tiny_models.EOS]

        site.cluster.answer, site.cluster.batch = answer, 32
        async with served(site) as url:
            await test(site, url)

    asyncio.run(body())


@pytest.mark.parametrize(
    ("agent", "calls", "named"),
    [
        ("claude_code", [("Bash", {"command": "ls"})], ["Bash"]),
        ("claude_code", [("EnterPlanMode", {}), ("Bash", {"command": "ls"})], ["EnterPlanMode", "Bash"]),
        ("codex", [("shell_command", {"command": "ls"})], ["shell_command"]),
        ("codex", [("mcp__clock__now", {}), ("shell_command", {"command": "ls"})], ["mcp__clocknow", "shell_command"]),
    ],
)
def test_command_line_agents_finish_sessions(
    agent: str, calls: list[tuple[str, dict[str, Any]]], named: list[str]
) -> None:
    """Each agent's recorded requests complete a session with tool calls and a final answer."""

    async def test(site: Site, url: str) -> None:
        async with httpx.AsyncClient(base_url=url, timeout=30) as client:
            made, text = await session(client, agent, MODEL, first={}, last={})
        assert [call["name"] for call in made] == named and made[-1]["arguments"] == {"command": "ls"}
        assert text == DONE
        prompt = site.gateway.models[0].tokenizer.decode_all(site.cluster.submits[-1][1])
        assert "You are a coding agent." in prompt and prompt.index("list the files") < prompt.index("a.txt b.txt")
        assert "b3BhcXVl" not in prompt, "what only another server can read"

    with_calls(test, *calls)


TOOL: Any = {"name": "ls", "description": "Lists.", "parameters": {"type": "object", "properties": {}}}


@pytest.mark.parametrize("stream", [False, True])
def test_openai_package_completes_tool_session(stream: bool) -> None:
    """OpenAI's package makes a tool call and sends its own message back, streamed or not."""

    async def test(_site: Site, url: str) -> None:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            chat: Any = {"model": MODEL, "tools": [{"type": "function", "function": TOOL}]}
            turns: list[Any] = [{"role": "user", "content": "files?"}]
            for expected in (None, DONE):
                if stream:
                    async with client.chat.completions.stream(messages=turns, **chat) as one:
                        message = (await one.get_final_completion()).choices[0].message
                else:
                    message = (await client.chat.completions.create(messages=turns, **chat)).choices[0].message
                turns.append(message)  # as it is
                turns += [
                    {"role": "tool", "tool_call_id": call.id, "content": "a.txt"} for call in message.tool_calls or ()
                ]
                assert (message.content or None) == expected
            response: Any = {"model": MODEL, "tools": [{"type": "function", **TOOL, "strict": False}], "store": False}
            items: list[Any] = [{"role": "user", "content": "files?"}]
            for expected in ("", DONE):
                if stream:
                    async with client.responses.stream(input=items, **response) as two:
                        found = await two.get_final_response()
                else:
                    found = await client.responses.create(input=items, **response)
                items += found.output
                calls = [item for item in found.output if item.type == "function_call"]
                items += [{"type": "function_call_output", "call_id": c.call_id, "output": "a.txt"} for c in calls]
                assert found.output_text == expected

    with_calls(test, ("ls", {}))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("beta", [False, True])
def test_anthropic_package_finishes_session(stream: bool, beta: bool) -> None:
    """Anthropic's package makes a tool call and sends the result back, streamed or not, beta or not."""

    async def test(_site: Site, url: str) -> None:
        async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client:
            (only,) = [model async for model in client.models.list(limit=1000)]
            assert (only.id, only.type, only.display_name) == (MODEL, "model", MODEL) and only.created_at.year > 2000
            create: Any = client.beta.messages if beta else client.messages
            tool = {"name": "ls", "input_schema": TOOL["parameters"], "eager_input_streaming": True}
            common: Any = {"model": MODEL, "tools": [tool], "thinking": {"type": "adaptive"}}
            common["max_tokens"] = 32_000 if stream else 8_000
            if beta:
                common |= {"betas": ["context-management-2025-06-27"], "context_management": {"edits": []}}
            turns: list[Any] = [{"role": "user", "content": "files?"}]
            for reason in ("tool_use", "end_turn"):
                if stream:
                    async with create.stream(messages=turns, **common) as one:
                        message = await one.get_final_message()
                else:
                    message = await create.create(messages=turns, **common)
                assert message.stop_reason == reason
                uses = [block for block in message.content if block.type == "tool_use"]
                results = [{"type": "tool_result", "tool_use_id": use.id, "content": "a.txt"} for use in uses]
                turns += [{"role": "assistant", "content": message.content}, {"role": "user", "content": results}]
            assert "".join(block.text for block in message.content if block.type == "text") == DONE

    with_calls(test, ("ls", {}))


def test_messages_answer_is_cut_to_context() -> None:
    """Too large a max_tokens is cut to the context on /v1/messages and refused on chat completions."""

    async def test(site: Site, url: str) -> None:
        async with httpx.AsyncClient(base_url=url, timeout=30) as client:
            ask: Any = {"model": MODEL, "messages": [{"role": "user", "content": "x" * 60_000}], "max_tokens": 32_000}
            answer = await client.post("/v1/messages", json=ask)
            assert answer.status_code == 200
            submit, prompt = site.cluster.submits[-1]
            assert submit.sampling.max_tokens == 65_536 - len(prompt)
            assert (await client.post("/v1/chat/completions", json=ask)).status_code == 400

    with_calls(test)
