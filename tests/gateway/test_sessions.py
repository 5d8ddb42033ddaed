"""Which session a request is a turn of, as its client says, and the end of one."""

import pytest

from gateway.text.block_hashes import session_name
from proto.progress import EndSession
from tests.gateway.fakes import MODEL, Site
from tests.gateway.http_words import on_site
from tests.gateway.test_tenancy import BOBS, FILE, KEY
from tests.helpers import until

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
BODIES = {
    "/v1/completions": {"prompt": "Hi"},
    "/v1/chat/completions": CHAT,
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {**CHAT, "max_tokens": 5},
}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("fields", "header", "expected"),
    [
        ({}, "", ""),
        ({"prompt_cache_key": "cache"}, "", "cache"),
        ({"prompt_cache_key": "cache"}, "header", "header"),
        ({"prompt_cache_key": "cache", "session_id": "body"}, "header", "body"),
        ({}, "ü" * 600, "ü" * 600),
    ],
)
def test_client_names_its_session(path: str, fields: dict[str, str], header: str, expected: str) -> None:
    """A submission has the session that a field or the header of its request names."""
    if path == "/v1/messages":
        fields, expected = {}, header  # Anthropic's API has no such fields

    async def test(site: Site) -> None:
        async with site.client() as client:
            headers = {"X-Session-Id": header.encode("latin-1")} if header else {}
            answer = await client.post(path, json={"model": MODEL, **BODIES[path], **fields}, headers=headers)  # type: ignore[arg-type, dict-item]
        assert answer.status_code == 200, answer.text
        ((submit, _),) = site.cluster.submits
        assert submit.session == (session_name(expected) if expected else b"")

    on_site(test)


@pytest.mark.parametrize("session", ["", "x" * 513, 7, ["a"]])
def test_invalid_session_name_is_refused(session: object) -> None:
    """An invalid session_id is refused with status 400, and nothing is submitted."""

    async def test(site: Site) -> None:
        async with site.client() as client:
            answer = await client.post("/v1/chat/completions", json={"model": MODEL, **CHAT, "session_id": session})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "session_id"
        assert not site.cluster.submits

    on_site(test)


def test_client_ends_its_tenants_sessions() -> None:
    """A client can end sessions of its own tenant only, and needs a key."""

    async def test(site: Site) -> None:
        async with site.client() as client:
            assert (await client.delete("/v1/sessions/a")).status_code == 401
            for key, name in ((KEY, "a/b c"), (BOBS, "a/b c")):
                answer = await client.delete(f"/v1/sessions/{name}", headers={"Authorization": f"Bearer {key}"})
                assert answer.json() == {"id": name, "object": "session", "deleted": True}
        await until(lambda: len(site.cluster.ended_sessions) == 2)
        assert site.cluster.ended_sessions == [
            EndSession(tenant, session_name("a/b c")) for tenant in ("acme/ann", "acme/bob")
        ]

    on_site(test, tenants=FILE)


def test_session_end_without_link_is_503() -> None:
    """Ending a session answers 503 if there is no link to the coordinator."""

    async def test(site: Site) -> None:
        async with site.client() as client:
            answer = await client.delete("/v1/sessions/a")
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "not_ready"
        assert answer.headers["retry-after"] == "1"

    on_site(test, connected=False)
