"""Short words for requests to the API over a fake cluster."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable
from itertools import chain
from typing import Any

from tests.gateway.fakes import ANSWER, MODEL, Site, make_site
from tests.helpers import until

ANSWER_TOKENS = len(ANSWER.encode()) + 1
"""The tests' tokenizer has one token per byte; the end-of-sequence token comes after them."""
Json = dict[str, Any]


def flat(parts: Iterable[list[Any]]) -> list[Any]:
    return list(chain.from_iterable(parts))


def on_site(test: Callable[[Site], Awaitable[None]], **options: Any) -> None:
    async def body() -> None:
        site = make_site(**options)
        await test(site)
        await until(lambda: not site.gateway.backend.keeper.streams)
        await until(lambda: site.gateway.intake.idle)
        site.gateway.threads.shutdown()

    asyncio.run(body())


async def post(site: Site, path: str, **fields: Any) -> Any:
    async with site.client() as client:
        return await client.post(path, json={"model": MODEL, **fields}, timeout=20)


async def completion(site: Site, **fields: Any) -> Json:
    answer = await post(site, "/v1/completions", **{"prompt": "Hi", "max_tokens": 200, **fields})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


async def chat(site: Site, **fields: Any) -> Json:
    answer = await post(site, "/v1/chat/completions", **{"messages": [{"role": "user", "content": "Hi"}], **fields})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


async def events(site: Site, path: str, **fields: Any) -> tuple[list[Json], bool]:
    """The events of a stream, and whether it ended with `[DONE]`."""
    default = {"prompt": "Hi"} if path.endswith("v1/completions") else {"messages": [{"role": "user", "content": "Hi"}]}
    answer = await post(site, path, **{**default, "max_tokens": 200, "stream": True, **fields})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = answer.text.split("\n\n")
    assert lines.pop() == ""
    assert all(line.startswith("data: ") for line in lines)
    done = lines[-1] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines[: -1 if done else None]], done
