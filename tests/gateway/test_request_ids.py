"""Every answer has a request id, the client's own where it can be used, and every request has one line in the log."""

import asyncio
import json
from typing import Any

import pytest
from structlog.testing import capture_logs

from gateway.http import request_log
from proto.errors import Reject
from tests.gateway.fakes import MODEL, Site, make_site, rejecting, served
from tests.gateway.http_words import ANSWER_TOKENS, events, on_site, post
from tests.gateway.test_slow_clients import TIMEOUT_S

KEY = "sk-secret-key-0123456789"
PROMPT = "canary-prompt"


async def send(site: Site, client_id: str | None = None, path: str = "/v1/completions", **fields: Any) -> Any:
    headers = {"Authorization": f"Bearer {KEY}"} | ({"X-Request-Id": client_id} if client_id is not None else {})
    async with site.client() as client:
        return await client.post(path, json={"model": MODEL, "prompt": PROMPT, **fields}, headers=headers)


@pytest.mark.parametrize("client_id", ["abc", "A-b_c.d:e/f+g=h@i", "x" * 128])
def test_client_request_id_is_returned(client_id: str) -> None:
    """A client's request id comes back in the header, and the answer keeps an id of its own."""

    async def test(site: Site) -> None:
        answers = await asyncio.gather(*(send(site, client_id) for _ in range(3)))
        assert {answer.headers["x-request-id"] for answer in answers} == {client_id}
        ids = {answer.json()["id"] for answer in answers}
        assert len(ids) == 3 and ids == {submit.request_id for submit, _ in site.cluster.submits}
        site.cluster.reject = rejecting(Reject.QUEUE_FULL)
        refused = await send(site, client_id)
        assert refused.headers["x-request-id"] == refused.json()["error"]["request_id"] == client_id

    on_site(test)


@pytest.mark.parametrize("client_id", [None, "", "x" * 129, "two words", 'quo"te', "semi;colon", "\x7f"])
def test_unusable_request_id_is_replaced(client_id: str | None) -> None:
    """A missing or unusable request id is replaced by the answer's own."""

    async def test(site: Site) -> None:
        answer = await send(site, client_id)
        assert answer.headers["x-request-id"] == answer.json()["id"]

    on_site(test)


def test_errors_carry_the_request_id() -> None:
    """Errors carry the request id in the header and the body, or in the event of a stream."""

    async def test(site: Site) -> None:
        for answer in (
            await send(site, "mine", "/v1/nothing"),
            await send(site, "mine", temperature=3),
            await send(site, "mine", n=2, best_of=1),
        ):
            assert answer.headers["x-request-id"] == answer.json()["error"]["request_id"] == "mine"
        site.cluster.interrupt_at = dict.fromkeys(range(1, 9), 4)
        chunks, _ = await events(site, "/v1/completions")
        assert chunks[-1]["error"]["request_id"] == chunks[0]["id"]

    on_site(test)


def test_missing_key_error_carries_an_id() -> None:
    """The error for a missing key carries a request id."""

    async def test(site: Site) -> None:
        answer = await post(site, "/v1/completions", prompt="Hi")
        assert answer.status_code == 401
        assert answer.headers["x-request-id"] == answer.json()["error"]["request_id"] != ""

    on_site(test, api_keys=(KEY,))


@pytest.mark.parametrize(
    ("said", "status"),
    [(b"nonsense\r\n\r\n", 400), (b"GET / HTTP/1.1\r\nX: " + b"y" * (70 << 10), 431), (b"GET / HTTP/1.1\r\n", 408)],
)
def test_http_level_errors_carry_an_id(said: bytes, status: int) -> None:
    """Requests refused by the HTTP server itself carry a request id."""

    async def body() -> None:
        site = make_site(client_timeout_s=TIMEOUT_S)
        async with served(site) as url:
            reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rsplit(":", 1)[1]))
            writer.write(said)
            head, _, content = (await asyncio.wait_for(reader.read(), 20)).partition(b"\r\n\r\n")
            writer.close()
        assert head.startswith(b"HTTP/1.1 %d " % status)
        request_id = json.loads(content)["error"]["request_id"]
        assert f"x-request-id: {request_id}".encode() in head and request_id

    asyncio.run(body())


# --- the access log ---------------------------------------------------------------------------------------------------


def test_access_log_omits_prompts_and_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request has one line in the log, with neither the prompt nor the key."""

    async def test(site: Site) -> None:
        answer = await send(site, "mine", user="u1", max_tokens=200)
        await send(site, max_tokens=200, stream=True)
        site.cluster.reject = rejecting(Reject.QUEUE_FULL)
        await send(site)
        async with site.client() as client:
            await client.get(f"/v1/nothing%0Ahere?key={KEY}")
            await client.get("/health")
            await client.get(f"/v1/models/{PROMPT}", headers={"Authorization": f"Bearer {KEY}"})
        whole, stream, refused, lost, probe, model = lines
        common = {
            "event": "request",
            "method": "POST",
            "path": "/v1/completions",
            "tenant": "default",
            "log_level": "info",
        }
        tokens = {"prompt_tokens": len(PROMPT), "output_tokens": ANSWER_TOKENS, "status": 200}
        assert whole.items() >= {**common, **tokens, "request_id": "mine", "internal_id": answer.json()["id"]}.items()
        assert whole["end_user"] == "u1" and 0 <= whole["ttft_ms"] <= whole["duration_ms"]
        assert stream.items() >= {**common, **tokens}.items() and stream["request_id"].startswith("cmpl-")
        assert 0 <= stream["ttft_ms"] <= stream["duration_ms"]
        assert refused.items() >= {**common, "status": 429, "error": "queue_full"}.items()
        assert (lost["status"], lost["path"], lost["error"]) == (404, "other", "not_found")
        assert (model["status"], model["path"]) == (404, "/v1/models/{model_id}")
        assert probe["log_level"] == "debug"
        assert KEY not in str(lines) and PROMPT not in str(lines)

    with capture_logs() as lines:
        monkeypatch.setattr(request_log, "_log", request_log.log.get("crossdock.test"))  # type: ignore[attr-defined]
        on_site(test, api_keys=(KEY,), access_log=True)


def test_access_log_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """No request is logged if the access log is turned off."""

    async def test(site: Site) -> None:
        await send(site)
        assert lines == []

    with capture_logs() as lines:
        monkeypatch.setattr(request_log, "_log", request_log.log.get("crossdock.test"))  # type: ignore[attr-defined]
        on_site(test, access_log=False)
