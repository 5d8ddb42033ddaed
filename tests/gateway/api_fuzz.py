"""Requests made up from the API's own description, right ones and wrong ones, sent to a server on a real port."""

import asyncio
import contextlib
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode

from gateway.app import create_app
from gateway.batches.sqlite_store import SqliteBatchStore
from gateway.batches.store import DAY_S, BatchService
from tests.gateway.fakes import MODEL, make_site, served

BOTH = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)


@contextmanager
def fake_server() -> Iterator[str]:
    """The gateway over a cluster that is played, on a thread of its own; yields the base URL."""
    urls: list[str] = []
    up, stop = threading.Event(), threading.Event()

    async def serve() -> None:
        site = make_site(client_timeout_s=5.0)
        with TemporaryDirectory() as folder:
            store = SqliteBatchStore(f"{folder}/batches.sqlite")
            await store.open()
            site.app = create_app(site.gateway, BatchService(store, 1 << 20, 1 << 26, DAY_S))
            async with served(site) as url:
                urls.append(url)
                up.set()
                await asyncio.to_thread(stop.wait)
            await store.close()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    assert up.wait(60)
    try:
        yield urls[0]
    finally:
        stop.set()
        thread.join(60)


def operations(document: dict[str, Any], modes: tuple[GenerationMode, ...]) -> Iterator[tuple[str, Any]]:
    """(name, strategy of cases) of each path and method, for each way of making them."""
    schema = schemathesis.openapi.from_dict(document)
    for found in schema.get_all_operations():
        operation = found.ok()
        for mode in modes:
            yield f"{operation.label} {mode.value}", operation.as_strategy(generation_mode=mode)


def send_generated_requests(
    url: str, number: int, examples: int, modes: tuple[GenerationMode, ...]
) -> dict[str, Counter[int]]:
    """`examples` requests of each kind to the server at `url`, the same for the same seed `number`; counts by kind and status.
    Raises `AssertionError` with the smallest request that made the server fail."""
    document = httpx.get(f"{url}/openapi.json", timeout=20.0).json()
    counts: dict[str, Counter[int]] = {}
    with httpx.Client(base_url=url, timeout=60.0) as client:
        for name, strategy in operations(document, modes):
            counts[name] = _one(client, strategy, counts.setdefault(name, Counter()), number, examples)
    return counts


def _one(client: httpx.Client, strategy: Any, count: Counter[int], number: int, examples: int) -> Counter[int]:
    phases = (Phase.generate, Phase.shrink)

    @seed(number)
    @settings(
        max_examples=examples, deadline=None, database=None, phases=phases, suppress_health_check=list(HealthCheck)
    )
    @given(case=strategy)
    def check(case: Any) -> None:
        body = case.body
        if isinstance(body, dict) and isinstance(body.get("model"), str) and len(body["model"]) % 4:
            body = body | {"model": MODEL}  # most are to get further than to the name
        if isinstance(body, dict) and isinstance(body.get("max_tokens"), int) and body["max_tokens"] > 64:
            body = body | {"max_tokens": 64}
        status, text = send(client, case, body)
        count[status] += 1
        assert status < 500, f"{status} for {case.method} {case.formatted_path} {body!r}: {text[:500]}"

    with contextlib.suppress(Unsatisfiable):  # nothing can be wrong with a GET that takes nothing
        check()
    return count


def send(client: httpx.Client, case: Any, body: Any) -> tuple[int, str]:
    """(status, start of the answer); 0 where the request is none that HTTP can carry."""
    kwargs = case.as_transport_kwargs(base_url=str(client.base_url))
    headers = {name: value for name, value in (kwargs.get("headers") or {}).items() if isinstance(value, str)}
    options: dict[str, Any] = {}
    if isinstance(body, bytes):
        options["content"] = body
    elif case.media_type == "multipart/form-data" and isinstance(body, dict):
        options["files"] = {name: ("x" if name == "file" else None, str(value)) for name, value in body.items()}
    elif type(body).__name__ != "NotSet":
        options["json"] = body
    try:
        answer = client.request(kwargs["method"], kwargs["url"], headers=headers, **options)
    except (httpx.LocalProtocolError, httpx.InvalidURL, UnicodeError, ValueError):
        return 0, ""
    return answer.status_code, answer.text
