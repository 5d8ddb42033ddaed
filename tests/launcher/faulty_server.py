"""A small OpenAI server that breaks one stream, in a way of its own, for each line in a file. Tokens are single letters."""

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from aiohttp import web

TOKEN_S = 0.004
FAULT_AT = range(12, 20)  # of a stream's tokens, so that enough come before and after a fault


class FaultyServer:
    """`orders`: a file to which a kill command adds a line; each makes the next of `faults` happen, to one stream."""

    def __init__(self, orders: Path, faults: list[str], owned_by: str, *, steady: bool = True) -> None:
        self.orders, self.faults, self.owned_by, self.steady = orders, faults, owned_by, steady
        self.url = ""
        self.bodies: list[dict[str, Any]] = []
        self.happened: list[str] = []

    def _due(self) -> str:
        """The fault that has been ordered and has not happened yet."""
        ordered = len(self.orders.read_text().splitlines()) if self.orders.exists() else 0
        return self.faults[len(self.happened)] if len(self.happened) < min(ordered, len(self.faults)) else ""

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "letters", "owned_by": self.owned_by}]})

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        if self._due() == "refuse":
            if body["max_tokens"] > 1:
                self.happened.append("refuse")
            return web.json_response({"error": {"message": "the engine is dead"}}, status=503)
        source = random.Random(f"{body['prompt']} {body.get('seed')} {self.steady or len(self.bodies)}")
        tokens = source.choices(range(ord("a"), ord("z") + 1), k=body["max_tokens"])
        if not body.get("stream"):
            usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": len(tokens)}
            return web.json_response({"choices": [{"index": 0, "text": "a"}], "usage": usage})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await self._stream(response, tokens, with_ids=body.get("return_token_ids", False))
        return response

    async def _stream(self, response: web.StreamResponse, tokens: list[int], *, with_ids: bool) -> None:
        sound = True
        for index, token in enumerate(tokens):
            sent = [token]
            if sound and index in FAULT_AT and (fault := self._due()) not in ("", "refuse"):
                self.happened.append(fault)
                sound = False
                if fault == "drop":
                    return
                sent = {"repeat": [tokens[index - 1], token], "change": [ord("#")], "lose": []}[fault]
            for one in sent:
                choice = {"index": 0, "text": chr(one)} | ({"token_ids": [one]} if with_ids else {})
                await response.write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
            await asyncio.sleep(TOKEN_S)
        await response.write(b"data: [DONE]\n\n")


@contextlib.asynccontextmanager
async def serving(server: FaultyServer) -> AsyncIterator[FaultyServer]:
    app = web.Application()
    app.add_routes([web.get("/v1/models", server.models), web.post("/v1/completions", server.complete)])
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield server
    finally:
        await runner.cleanup()
