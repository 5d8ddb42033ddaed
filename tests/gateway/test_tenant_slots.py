"""One tenant cannot keep the others out in front of the scheduler: not with slow bodies, not with many prompts."""

import asyncio
import json
from contextlib import asynccontextmanager
from typing import Any

import pytest

from gateway.http.body import owner_of
from tests.gateway.fakes import ANSWER, MODEL, Site
from tests.gateway.http_words import on_site
from tests.gateway.test_tenancy import FILE, KEY
from tests.helpers import until

OTHER = "sk-own"
CROWD = 2_100


def scope(key: str, client: str) -> dict[str, Any]:
    headers = [
        (b"host", b"127.0.0.1"),
        (b"content-type", b"application/json"),
        (b"authorization", f"Bearer {key}".encode()),
    ]
    path = "/v1/completions"
    return {
        "type": "http", "http_version": "1.1", "method": "POST", "path": path, "raw_path": path.encode(), "root_path": "",
        "scheme": "http", "query_string": b"", "headers": headers, "client": (client, 9), "server": ("127.0.0.1", 80),
    }  # fmt: skip


async def ask(site: Site, key: str, body: bytes | None, client: str = "10.0.0.1", **fields: Any) -> tuple[int, Any]:
    """(status, answer). `body` None: it never comes, and the client leaves when it is cancelled."""
    messages: list[Any] = []
    received = False

    async def receive() -> dict[str, Any]:
        nonlocal received
        if body is None or received:
            await asyncio.Event().wait()
        received = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        messages.append(message)

    await site.app(scope(key, client), receive, send)
    content = b"".join(message.get("body", b"") for message in messages[1:])
    return messages[0]["status"], json.loads(content)


@asynccontextmanager
async def slow_crowd(site: Site, key: str, client: str = "10.0.0.1"):
    """Requests whose bodies do not come; yields the tasks, after all have begun."""
    tasks = [asyncio.create_task(ask(site, key, None, client)) for _ in range(CROWD)]
    for _ in range(20):
        await asyncio.sleep(0)
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


BODY = json.dumps({"model": MODEL, "prompt": "Hi", "max_tokens": 200}).encode()


def test_slow_bodies_leave_slots_for_tenants() -> None:
    """Slow bodies of one tenant leave slots for other tenants."""

    async def test(site: Site) -> None:
        async with slow_crowd(site, KEY) as crowd:
            status, answer = await ask(site, OTHER, BODY)
            assert (status, answer["choices"][0]["text"]) == (200, ANSWER)
            refused = [task.result() for task in crowd if task.done()]
            assert refused and {(status, error["error"]["code"]) for status, error in refused} == {
                (429, "too_many_open_requests")
            }

    on_site(test, tenants=FILE, api_keys=(OTHER,), client_timeout_s=600.0)


def test_slow_bodies_leave_slots_for_addresses() -> None:
    """Slow bodies of one address leave slots for other addresses if there are no keys."""

    async def test(site: Site) -> None:
        async with slow_crowd(site, "", "10.0.0.1"):
            assert (await ask(site, "", BODY, "10.0.0.2"))[0] == 200
            assert (await ask(site, "", BODY, "10.0.0.1"))[0] == 429

    on_site(test, client_timeout_s=600.0)


def test_every_prompt_takes_a_slot() -> None:
    """A request counts with all its prompts towards its tenant's slots."""

    async def test(site: Site) -> None:
        site.cluster.hold = True
        many = json.dumps({"model": MODEL, "prompt": ["a"] * 64}).encode()
        crowd = [asyncio.create_task(ask(site, KEY, many)) for _ in range(70)]
        await until(lambda: sum(task.done() for task in crowd) == 70 - 21)
        assert len(site.cluster.submits) == 64 * 21, "of a third of the slots, which a user of an organisation may hold"
        site.cluster.hold = False
        assert (await ask(site, OTHER, BODY))[0] == 200
        for task in crowd:
            task.cancel()
        await asyncio.gather(*crowd, return_exceptions=True)

    on_site(test, tenants=FILE, api_keys=(OTHER,))


def test_bodies_leave_memory_for_tenants(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unfinished bodies of one tenant leave memory for other tenants."""

    async def test(site: Site) -> None:
        site.gateway.intake._bytes.capacity = 3 * len(BODY)
        held = asyncio.Event()

        async def unfinished() -> None:
            sent = False

            async def receive() -> dict[str, Any]:
                nonlocal sent
                if sent:
                    await held.wait()
                sent = True
                return {"type": "http.request", "body": BODY, "more_body": True}

            async def send(_message: Any) -> None:
                return

            await site.app(scope(KEY, "x"), receive, send)

        crowd = [asyncio.create_task(unfinished()) for _ in range(3)]
        await asyncio.sleep(0.01)
        assert (await ask(site, KEY, BODY))[0] == 429
        assert (await ask(site, OTHER, BODY))[0] == 200
        for task in crowd:
            task.cancel()
        await asyncio.gather(*crowd, return_exceptions=True)

    on_site(test, tenants=FILE, api_keys=(OTHER,))


@pytest.mark.parametrize(
    ("tenant", "one", "other", "same"),
    [
        ("acme", "10.0.0.1", "10.0.0.2", True),
        ("", "10.0.0.1", "10.0.0.2", False),
        ("", "2001:db8::1", "2001:db8::ffff:1", True),
        ("", "2001:db8::1", "2001:db8:0:1::1", False),
        ("", "::ffff:10.0.0.1", "::ffff:10.0.0.2", False),
        ("", "::ffff:10.0.0.1", "10.0.0.1", True),
        ("", "fe80::1%eth0", "fe80::2%eth0", True),
    ],
)
def test_request_counts_for_tenant_or_address(tenant: str, one: str, other: str, same: bool) -> None:
    """A request counts for its tenant, or without one for its IPv4 address or IPv6 network."""
    assert (owner_of(tenant, one) == owner_of(tenant, other)) is same
