"""What is learned of a server before a run, from one that knows the extensions and from one that refuses them."""

import asyncio
from typing import Any

import pytest
from aiohttp import web

from launcher.http.client import new_session
from launcher.http.streams import BenchFailed
from launcher.load import plan as load_plan
from launcher.load.probe import Probed, probe
from launcher.load.settings import LoadSettings


def learn(
    known: set[str], *, status: int = 200, counts: bool = True, **values: Any
) -> tuple[Probed, list[dict[str, Any]]]:
    """Probe a server that takes the fields in `known` beside OpenAI's; a word is two tokens there, a template three."""
    bodies: list[dict[str, Any]] = []

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m", "max_model_len": 700}]})

    async def generate(request: web.Request) -> web.Response:
        body = await request.json()
        bodies.append(body)
        if status != 200:
            return web.json_response({"error": {"message": "no"}}, status=status)
        if {"return_token_ids", "ignore_eos"} & set(body) - known:
            return web.json_response({"error": {"message": "Unknown parameter"}}, status=400)
        text = body["messages"][0]["content"] if "messages" in body else body["prompt"]
        tokens = 3 + 2 * len(text.split())
        ids = {"prompt_token_ids": list(range(100, 100 + tokens))} if "return_token_ids" in body else {}
        usage = {"usage": {"prompt_tokens": tokens, "completion_tokens": 1}} if counts else {}
        return web.json_response({"choices": [{"text": "a", **ids}], **usage})

    async def scene() -> Probed:
        app = web.Application()
        app.add_routes([web.get("/v1/models", models), web.post("/v1/completions", generate)])
        app.add_routes([web.post("/v1/chat/completions", generate)])
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            async with new_session(silence_s=None) as session:
                url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1/"
                return await probe(session, url, "sk-1", "", **values)
        finally:
            await runner.cleanup()

    return asyncio.run(scene()), bodies


def planned(probed: Probed) -> tuple[load_plan.LoadPlan, list[Any]]:
    settings = LoadSettings(prompt_tokens="103", warmup_s=0.0)
    plan = load_plan.make_plan(settings, load_plan.tenants_of(settings), probed.target.context_tokens)
    prompts = probed.prompts(settings, plan)
    return plan, [prompts.make(one) for one in plan.requests]


def test_token_ids_are_used_if_offered() -> None:
    """Prompts are token ids if the server returns token ids."""
    probed, _ = learn({"return_token_ids", "ignore_eos"})
    assert len(probed.pool) > 20 and 100 not in probed.pool
    assert (probed.target.model, probed.target.context_tokens) == ("m", 700)
    assert probed.target.ignore_eos and probed.target.token_ids
    _, prompts = planned(probed)
    assert {len(prompt) for prompt in prompts} == {103}
    assert {token for prompt in prompts for token in prompt} <= set(probed.pool)


def test_words_are_counted_without_token_ids() -> None:
    """Prompts are sized by words with measured tokens per word if the server gives no token ids."""
    probed, bodies = learn({"ignore_eos"})
    assert not probed.pool and not probed.target.token_ids and probed.target.ignore_eos
    assert (probed.tokens_per_word, probed.overhead_tokens) == (2.0, 3.0)
    _, prompts = planned(probed)
    assert {3 + 2 * len(prompt.split()) for prompt in prompts} == {103}
    probed, bodies = learn(set())
    assert not probed.target.ignore_eos and "ignore_eos" not in bodies[-1]
    probed, bodies = learn({"return_token_ids", "ignore_eos"}, chat=True)
    assert not probed.pool and "messages" in bodies[0] and probed.target.chat
    probed, _ = learn(set(), counts=False)
    assert probed.tokens_per_word == 1.0


def test_unusable_server_is_reported() -> None:
    """A server that refuses or cannot be reached ends the probe with a message."""
    with pytest.raises(BenchFailed, match=r"completions: HTTP 503: .*no"):
        learn(set(), status=503)

    async def nobody() -> None:
        async with new_session(silence_s=None) as session:
            await probe(session, "http://127.0.0.1:1", "", "")

    with pytest.raises(BenchFailed, match="cannot be reached"):
        asyncio.run(nobody())
