"""Clients and agent frameworks that others wrote, unchanged, on a cluster with a random model: its calls and forms are made by
grammars. Frameworks that are not installed are skipped; `pip install -e .[clients]` has them."""

import asyncio
import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import httpx
import pytest
from pydantic import BaseModel, Field

from tests import tiny_models
from tests.e2e.live import Live, live
from tests.gateway.agent_sessions import session

CONTEXT_TOKENS = 4096
NOT_INSTALLED = "not installed: pip install -e .[clients]"


class Weather(BaseModel):
    city: Literal["Oslo", "Paris"]
    days: Annotated[int, Field(ge=1, le=9)]


class Trip(BaseModel):
    to: Literal["sea", "hills"]
    with_dog: bool
    stops: Annotated[list[Weather], Field(max_length=2)]


TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Weather.", "parameters": Weather.model_json_schema()},
}


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    model = tiny_models.make(
        "llama", tmp_path_factory.mktemp("models") / "wide", max_position_embeddings=CONTEXT_TOKENS
    )
    with live(model, tmp_path_factory.mktemp("state")) as cluster:
        yield cluster


def _openai(up: Live) -> Any:
    openai = pytest.importorskip("openai", reason=NOT_INSTALLED)
    return openai.OpenAI(base_url=f"{up.base_url}/v1", api_key="none", max_retries=0)


def test_openai_parses_structured_output(up: Live) -> None:
    with _openai(up) as client:
        answer = client.chat.completions.parse(
            model=up.model_id, messages=[{"role": "user", "content": "x"}], response_format=Trip, seed=1
        )
    assert isinstance(answer.choices[0].message.parsed, Trip)


def test_openai_client_calls_tools(up: Live) -> None:
    import openai

    with _openai(up) as client:
        messages: list[Any] = [{"role": "user", "content": "Weather?"}]
        answer = client.chat.completions.parse(
            model=up.model_id, messages=messages, tools=[openai.pydantic_function_tool(Weather, name="get_weather")],
            tool_choice="required", parallel_tool_calls=False,
        )  # fmt: skip
        (choice,) = answer.choices
        assert choice.finish_reason == "tool_calls"
        (call,) = choice.message.tool_calls
        assert isinstance(call.function.parsed_arguments, Weather)
        messages += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": "rain"}]
        last = client.chat.completions.create(
            model=up.model_id, messages=messages, tools=[TOOL], tool_choice="none", max_tokens=8
        )
    assert last.choices[0].message.tool_calls is None


def test_openai_client_streams_tool_calls(up: Live) -> None:
    with (
        _openai(up) as client,
        client.chat.completions.stream(
            model=up.model_id,
            messages=[{"role": "user", "content": "Weather?"}],
            tools=[TOOL],
            tool_choice={"type": "function", "function": {"name": "get_weather"}},
            parallel_tool_calls=False,
        ) as stream,
    ):
        deltas = [event for event in stream if event.type == "tool_calls.function.arguments.delta"]
        (call,) = stream.get_final_completion().choices[0].message.tool_calls
    assert len(deltas) > 5
    assert Weather.model_validate_json(call.function.arguments)
    assert "".join(delta.arguments_delta for delta in deltas) == call.function.arguments


@pytest.mark.parametrize("stream", [False, True])
def test_openai_responses_end_a_tool_loop(up: Live, stream: bool) -> None:
    """A loop of tool calls over OpenAI's responses API comes to its end, streamed or not."""
    tool = {"type": "function", **TOOL["function"], "strict": False}
    items: list[Any] = [{"role": "user", "content": "Weather?"}]
    called = list[Weather]()
    with _openai(up) as client:
        for choice in ("required", "none"):
            common: Any = {"model": up.model_id, "input": items, "tools": [tool], "store": False, "tool_choice": choice}
            common |= {
                "parallel_tool_calls": False,
                "max_output_tokens": 400,
                "include": ["reasoning.encrypted_content"],
            }
            if stream:
                with client.responses.stream(**common) as events:  # which may end with `response.incomplete`
                    found = [event.response for event in events if hasattr(event, "response")][-1]
            else:
                found = client.responses.create(**common)
            items += found.output
            for call in [item for item in found.output if item.type == "function_call"]:
                called.append(Weather.model_validate_json(call.arguments))
                items.append({"type": "function_call_output", "call_id": call.call_id, "output": "rain"})
    assert len(called) == 1 and found.output[-1].type == "message"


@pytest.mark.parametrize("stream", [False, True])
def test_anthropic_messages_end_a_tool_loop(up: Live, stream: bool) -> None:
    """A loop of tool calls over Anthropic's messages API comes to its end, streamed or not."""
    anthropic = pytest.importorskip("anthropic", reason=NOT_INSTALLED)
    tool = {"name": "get_weather", "input_schema": Weather.model_json_schema(), "eager_input_streaming": True}
    turns: list[Any] = [{"role": "user", "content": "Weather?"}]
    called = list[Weather]()
    with anthropic.Anthropic(base_url=up.base_url, api_key="none", max_retries=0) as client:
        for choice in ({"type": "any", "disable_parallel_tool_use": True}, {"type": "none"}):
            common: Any = {"model": up.model_id, "messages": turns, "tools": [tool], "tool_choice": choice}
            common |= {"max_tokens": 400, "thinking": {"type": "enabled", "budget_tokens": 1024}}
            if stream:
                with client.messages.stream(**common) as events:
                    found = events.get_final_message()
            else:
                found = client.messages.create(**common)
            uses = [block for block in found.content if block.type == "tool_use"]
            called += [Weather.model_validate(use.input) for use in uses]
            results = [{"type": "tool_result", "tool_use_id": use.id, "content": "rain"} for use in uses]
            turns += [{"role": "assistant", "content": found.content}, {"role": "user", "content": results}]
    assert len(called) == 1 and found.stop_reason in ("end_turn", "max_tokens")


@pytest.mark.parametrize(
    ("agent", "first", "last"),
    [
        ("claude_code", {"tool_choice": {"type": "tool", "name": "EnterPlanMode", "disable_parallel_tool_use": True}},
         {"tool_choice": {"type": "none"}, "max_tokens": 16}),
        ("codex", {"tool_choice": {"type": "function", "name": "now", "namespace": "mcp__clock"}, "parallel_tool_calls": False},
         {"tool_choice": "none", "max_output_tokens": 16}),
    ],
)  # fmt: skip
def test_command_line_agents_end_tool_loop(up: Live, agent: str, first: dict[str, Any], last: dict[str, Any]) -> None:
    """A random model calls nothing of itself: which tool it calls is the one thing that the agents do not send."""

    async def talk() -> None:
        async with httpx.AsyncClient(base_url=up.base_url, timeout=60) as client:
            calls, _ = await session(client, agent, up.model_id, first=first, last=last)
        assert [call["arguments"] for call in calls] == [{}]

    asyncio.run(talk())


def test_pydantic_ai_ends_a_tool_loop(up: Live) -> None:
    pytest.importorskip("pydantic_ai", reason=NOT_INSTALLED)
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider
    from pydantic_ai.usage import UsageLimits

    asked: list[Weather] = []
    provider = OpenAIProvider(base_url=f"{up.base_url}/v1", api_key="none")
    agent = Agent(OpenAIChatModel(up.model_id, provider=provider), output_type=Trip)

    @agent.tool_plain
    def get_weather(query: Weather) -> str:
        """Tells the weather."""
        asked.append(query)
        return "rain"

    async def talk() -> None:
        for seed in range(20):
            # The model draws whether to ask again or to answer, so that the loop ends soon.
            done = await agent.run("Plan.", usage_limits=UsageLimits(request_limit=40), model_settings={"seed": seed})
            assert isinstance(done.output, Trip)
            if asked:
                return
        raise AssertionError("no tool was called")

    asyncio.run(talk())


def test_openai_agents_end_a_tool_loop(up: Live) -> None:
    agents = pytest.importorskip("agents", reason=NOT_INSTALLED)
    import openai

    asked: list[Weather] = []
    agents.set_tracing_disabled(True)

    @agents.function_tool  # type: ignore[untyped-decorator]
    def get_weather(query: Weather) -> str:
        """Tells the weather."""
        asked.append(query)
        return "rain"

    async def talk() -> str:
        async with openai.AsyncOpenAI(base_url=f"{up.base_url}/v1", api_key="none", max_retries=0) as client:
            agent = agents.Agent(
                name="a",
                model=agents.OpenAIChatCompletionsModel(up.model_id, client),
                tools=[get_weather],
                model_settings=agents.ModelSettings(tool_choice="required", parallel_tool_calls=False, max_tokens=200),
            )
            done = await agents.Runner.run(agent, "Weather?", max_turns=10)
            return str(done.final_output)

    assert asyncio.run(talk())
    assert asked


def test_langchain_calls_tools_and_parses(up: Live) -> None:
    """LangChain calls tools and parses structured output."""
    pytest.importorskip("langchain_openai", reason=NOT_INSTALLED)
    from langchain_openai import ChatOpenAI  # type: ignore[import-not-found]

    model = ChatOpenAI(model=up.model_id, base_url=f"{up.base_url}/v1", api_key="none", max_retries=0, max_tokens=600)
    called = model.bind_tools([TOOL], tool_choice="required").invoke("Weather?")
    assert called.tool_calls and all(Weather.model_validate(call["args"]) for call in called.tool_calls)
    assert isinstance(model.with_structured_output(Trip, method="json_schema").invoke("Plan."), Trip)


def test_litellm_calls_tools_and_gets_json(up: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """LiteLLM calls tools and gets JSON of the schema that it asks for."""
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    litellm = pytest.importorskip("litellm", reason=NOT_INSTALLED)
    common = {
        "model": f"openai/{up.model_id}", "api_base": f"{up.base_url}/v1", "api_key": "none", "max_tokens": 600,
        "messages": [{"role": "user", "content": "Weather?"}],
    }  # fmt: skip
    called = litellm.completion(**common, tools=[TOOL], tool_choice="required")
    assert all(Weather.model_validate_json(call.function.arguments) for call in called.choices[0].message.tool_calls)
    answer = litellm.completion(**common, response_format=Trip)
    assert Trip.model_validate(json.loads(answer.choices[0].message.content))


def test_instructor_parses_structured_output(up: Live) -> None:
    instructor = pytest.importorskip("instructor", reason="not installed: its releases need openai below version 3")
    client = instructor.from_openai(_openai(up), mode=instructor.Mode.TOOLS)
    assert isinstance(
        client.chat.completions.create(
            model=up.model_id, response_model=Weather, messages=[{"role": "user", "content": "x"}]
        ),
        Weather,
    )
