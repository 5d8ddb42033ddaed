"""The API is described, by what it checks requests with, and nothing that can be made of the description makes it fail."""

import pytest

from gateway.app import ROUTES
from gateway.http.errors import ApiError
from gateway.openai.request_types import MESSAGES_MAX, ChatRequest, validate
from tests.gateway.api_fuzz import BOTH, fake_server, send_generated_requests
from tests.gateway.fakes import Site
from tests.gateway.http_words import on_site
from tools import openapi

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


def test_openapi_file_is_current() -> None:
    """The served description equals what tools.openapi makes."""

    async def test(site: Site) -> None:
        async with site.client() as client:
            answer = await client.get("/openapi.json")
        assert answer.headers["content-type"] == "application/json"
        assert answer.text == openapi.text(), "run: python -m tools.openapi gateway/openai/openapi.json"

    on_site(test)


def test_every_route_is_described() -> None:
    """The description has every route, except for itself and other spellings of a path."""
    routes = {
        f"{method} {route.path.replace(':path', '')}"
        for route in ROUTES
        for method in (route.methods or set()) - {"HEAD"}
    }
    assert routes - openapi.ABOUT.keys() == {"GET /openapi.json", "GET /v1/models/"}
    assert openapi.ABOUT.keys() <= routes
    assert sum(map(len, openapi.paths().values())) == len(openapi.ABOUT)
    prompt = openapi.schemas(openapi.models())["TokenizeRequest"]["properties"]["prompt"]
    assert "array" not in str(prompt), "it is one text"


def test_too_many_messages_are_a_400() -> None:
    """A chat with one message more than allowed is refused with status 400."""
    messages = [{"role": "user", "content": ""}] * MESSAGES_MAX
    validate(ChatRequest, {"model": "m", "messages": messages})
    with pytest.raises(ApiError) as caught:
        validate(ChatRequest, {"model": "m", "messages": [*messages, messages[0]]})
    assert (caught.value.status, caught.value.param) == (400, "messages")
