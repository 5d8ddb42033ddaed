"""Sessions of the two vendors' command-line agents, as far as their requests are public: agents/*.json has those, put down by
hand. A session is what the agent asks when it starts, a request with tools, the calls, their results, and the last answer."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import httpx

AGENTS = Path(__file__).parent / "agents"
Json = dict[str, Any]


def events_of(text: str) -> list[Json]:
    """As a client has them that splits lines as Unicode does."""
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


async def session(
    client: httpx.AsyncClient, name: str, model: str, *, first: Json, last: Json
) -> tuple[list[Json], str]:
    """(the calls, the last answer's text). `first` and `last`: fields that the two requests have besides."""
    agent = json.loads((AGENTS / f"{name}.json").read_text())
    for probe in agent["probes"]:
        body = {"json": {"model": model, **probe["body"]}} if "body" in probe else {}
        answer = await client.request(probe["method"], probe["path"], headers=agent["headers"], **body)  # type: ignore[arg-type]
        assert answer.status_code == 200, (probe, answer.text)
    turn = _claude_turn if name == "claude_code" else _codex_turn
    body = {"model": model, **agent["body"]}  # type: ignore[dict-item]
    calls, _, body = turn(await _ask(client, agent, body | first), body, agent["results"])
    assert calls
    more, text, _ = turn(await _ask(client, agent, body | last), body, agent["results"])
    assert not more
    return calls, text


async def _ask(client: httpx.AsyncClient, agent: Json, body: Json) -> list[Json]:
    answer = await client.post(agent["path"], headers=agent["headers"], json=body)
    assert answer.status_code == 200, answer.text
    return events_of(answer.text)


def _claude_turn(events: list[Json], body: Json, results: list[Json]) -> tuple[list[Json], str, Json]:
    blocks: list[Json] = []
    for event in events:
        assert event["type"] != "error", event
        delta = event.get("delta", {})
        match event["type"], delta.get("type"):
            case "content_block_start", _:
                blocks.append(dict(event["content_block"]))
            case "content_block_delta", "input_json_delta":
                blocks[-1]["json"] = blocks[-1].get("json", "") + delta["partial_json"]
            case "content_block_delta", kind:
                field = kind.removesuffix("_delta")
                blocks[-1][field] += delta[field]
    (end,) = [event for event in events if event["type"] == "message_delta"]
    calls = [block for block in blocks if block["type"] == "tool_use"]
    assert (end["delta"]["stop_reason"] == "tool_use") == bool(calls) and events[-1]["type"] == "message_stop"
    for call in calls:
        call["input"] = json.loads(call.pop("json", "{}"))
    given = [{**results[0], "tool_use_id": call["id"]} for call in calls] + results[1:]
    turns = [{"role": "assistant", "content": blocks}, {"role": "user", "content": given}]
    text = "".join(block["text"] for block in blocks if block["type"] == "text")
    return [{"name": call["name"], "arguments": call["input"]} for call in calls], text, _with(body, "messages", turns)


def _codex_turn(events: list[Json], body: Json, results: list[Json]) -> tuple[list[Json], str, Json]:
    items = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert events[-1]["type"] in ("response.completed", "response.incomplete") and events[-1]["response"]["usage"]
    calls = [item for item in items if item["type"] == "function_call"]
    given = [{**results[0], "call_id": call["call_id"]} for call in calls]
    sent_back = [{name: value for name, value in item.items() if name not in ("id", "status")} for item in items]
    text = "".join(part["text"] for item in items if item["type"] == "message" for part in item["content"])
    names = [call.get("namespace", "") + call["name"] for call in calls]
    found = [{"name": n, "arguments": json.loads(c["arguments"])} for n, c in zip(names, calls, strict=True)]
    return found, text, _with(body, "input", [*sent_back, *given])


def _with(body: Json, name: str, more: list[Json]) -> Json:
    return {**body, name: [*deepcopy(body[name]), *more]}
