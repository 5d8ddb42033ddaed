"""The API is described, by what it checks requests with, and nothing that can be made of the description makes it fail."""

import asyncio
import inspect
from typing import Any

import msgspec
import pytest
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute

from gateway.app import ROUTERS
from gateway.http.errors import ApiError
from gateway.openai.request_types import MESSAGES_MAX, ChatRequest, validate
from tests.gateway.api_fuzz import BOTH, fake_server, send_generated_requests
from tests.gateway.fakes import Site, make_site

SEED = 6


def test_generated_requests_never_fail_the_server() -> None:
    """Requests generated from the API's description never make the server fail."""
    with fake_server() as url:
        counts = send_generated_requests(url, SEED, 12, BOTH)
    generated = {name: count for name, count in counts.items() if "POST" in name and "{" not in name}
    assert len(generated) == 18, counts
    for name, count in generated.items():
        assert sum(count.values()) >= 10 and set(count) - {0, 404}, (name, count)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_many_generated_requests_never_fail() -> None:
    """Thousands of requests generated from the API's description never make the server fail."""
    with fake_server() as url:
        send_generated_requests(url, SEED + 1, 2_000, BOTH)


def test_every_route_is_described() -> None:
    """The served description has every route and its responses."""

    async def body() -> None:
        site: Site = make_site()
        async with site.client() as client:
            answer = await client.get("/openapi.json")
            assert answer.status_code == 200
        routes = [route for router in ROUTERS for route in router.routes if isinstance(route, APIRoute)]
        assert len(routes) == sum(len(router.routes) for router in ROUTERS)
        paths = {route.path.replace(":path", "") for route in routes if route.include_in_schema}
        assert paths == set(answer.json()["paths"])
        others = {route.path for route in routes if not route.include_in_schema}
        assert {path.removesuffix("/") for path in others} <= paths - others, "only other spellings are left out"
        for path, operations in answer.json()["paths"].items():
            for method, operation in operations.items():
                for media_type, content in operation["responses"]["200"]["content"].items():
                    assert content["schema"], (path, method, media_type)
        schemas = answer.json()["components"]["schemas"]
        assert "array" not in str(schemas["TokenizeRequest"]["properties"]["prompt"]), "it is one text"
        refused = answer.json()["paths"]["/v1/messages"]["post"]["responses"]["400"]["content"]["application/json"]
        assert refused["schema"]["$ref"].endswith("/AnthropicError")
        site.gateway.threads.shutdown()

    asyncio.run(body())


def test_openapi_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The API's description is encoded once, however often it is asked for."""
    made: list[object] = []
    encode = msgspec.json.encode
    monkeypatch.setattr("gateway.openai.openapi.msgspec.json.encode", lambda each: made.append(each) or encode(each))

    async def body() -> None:
        site: Site = make_site()
        async with site.client() as client:
            answers = [await client.get("/openapi.json") for _ in range(3)]
            assert (await client.head("/openapi.json")).status_code == 200
        assert {answer.headers["content-type"] for answer in answers} == {"application/json"}
        assert answers[0].content == answers[2].content
        site.gateway.threads.shutdown()

    asyncio.run(body())
    assert len([each for each in made if isinstance(each, dict) and "openapi" in each]) == 1


def test_no_route_takes_a_thread() -> None:
    """FastAPI runs plain functions on threads of its own: one for each request that is under way."""

    def plain(dependant: Dependant) -> list[str]:
        call: Any = dependant.call
        function = call if inspect.isfunction(call) else call.__call__
        is_async = inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)
        return ([] if is_async else [repr(call)]) + [name for one in dependant.dependencies for name in plain(one)]

    routes = [route for router in ROUTERS for route in router.routes if isinstance(route, APIRoute)]
    assert len(routes) > 10
    assert not [name for route in routes for name in plain(route.dependant)]


def test_too_many_messages_are_a_400() -> None:
    """A chat with one message more than allowed is refused with status 400."""
    messages = [{"role": "user", "content": ""}] * MESSAGES_MAX
    validate(ChatRequest, {"model": "m", "messages": messages})
    with pytest.raises(ApiError) as caught:
        validate(ChatRequest, {"model": "m", "messages": [*messages, messages[0]]})
    assert (caught.value.status, caught.value.param) == (400, "messages")
