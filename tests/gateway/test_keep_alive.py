"""A stream's headers come with its first token, or after a silence, and comments follow while there is nothing to say."""

import asyncio
import json

import httpx
import openai
import pytest

from gateway.streams.types import StreamLimits
from launcher.http.client import new_session
from launcher.http.streams import stream_completion
from launcher.load.client import StreamReader
from launcher.load.records import RequestRecord
from proto.errors import Reject
from proto.messages import TokenItem, Tokens
from tests.gateway.fakes import ANSWER, DECODER, MODEL, Site, make_site, rejecting, served
from tests.gateway.http_words import ANSWER_TOKENS, events, on_site, post
from tests.helpers import until

COMMENT = ": keep-alive\n\n"
BODY = {"model": MODEL, "prompt": "Hi", "max_tokens": 200, "stream": True}


def test_headers_come_after_silence() -> None:
    """A stream's headers and keep-alive comments come while it waits for its first token, after a silence."""

    async def body() -> None:
        site = make_site(keep_alive_s=0.01)
        site.cluster.hold = True
        async with (
            served(site) as url,
            httpx.AsyncClient(base_url=url, timeout=60) as client,
            client.stream("POST", "/v1/completions", json=BODY) as answer,
        ):
            assert answer.status_code == 200
            assert answer.headers["content-type"].startswith("text/event-stream")
            text, released = "", False
            async for part in answer.aiter_text():
                text += part
                if not released and len(text) >= 3 * len(COMMENT):
                    assert not text.replace(COMMENT, "")
                    released = True
                    site.cluster.release()
        texts = [json.loads(event[6:])["choices"][0]["text"] for event in text.split("\n\n")[:-2] if event[0] == "d"]
        assert text.endswith("data: [DONE]\n\n") and "".join(texts) == ANSWER

    asyncio.run(body())


def test_comments_come_between_tokens() -> None:
    """Keep-alive comments come between tokens, and none come if they are turned off."""

    async def streamed(keep_alive_s: float) -> str:
        site = make_site(keep_alive_s=keep_alive_s)
        site.cluster.gap_s = 0.03
        async with served(site) as url, httpx.AsyncClient(base_url=url, timeout=60) as client:
            return (await client.post("/v1/completions", json={**BODY, "max_tokens": 5})).text

    async def body() -> None:
        assert COMMENT + "data: {" in await streamed(0.005)
        assert COMMENT not in await streamed(0)

    asyncio.run(body())


def test_clients_ignore_comments() -> None:
    """OpenAI's client and crossdock's own ignore keep-alive comments."""

    async def body() -> None:
        site = make_site(keep_alive_s=0.001)
        site.cluster.gap_s, site.cluster.batch = 0.01, 1
        async with served(site) as url:
            async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as client:
                parts = await client.completions.create(model=MODEL, prompt="a", stream=True, max_tokens=20)
                assert "".join([part.choices[0].text async for part in parts]) == ANSWER[:20]
            usage = {"stream_options": {"include_usage": True}, "ignore_eos": True}
            async with new_session(url) as plain:
                async with plain.post("/v1/completions", json=BODY | usage) as answer:
                    content = await answer.read()
                stream = await stream_completion(plain, MODEL, "a", 20)
        assert content.count(COMMENT.encode()) > 10
        record = RequestRecord(0, "t", 0.0, 9, 3)
        StreamReader(record, 0.0).feed(content, 1.0)
        assert record.tokens == ANSWER_TOKENS and record.first_s == 1.0
        assert len(stream.arrivals) == 20

    asyncio.run(body())


@pytest.mark.parametrize("with_text", [False, True])
def test_failure_after_headers_is_an_event(with_text: bool) -> None:
    """A failure after the headers is an error event, and one before them is a status."""

    async def test(site: Site) -> None:
        site.cluster.hold = True
        site.cluster.reject = rejecting(Reject.QUEUE_FULL)
        assert (await post(site, "/v1/completions", prompt="Hi", stream=True)).status_code == 429
        site.cluster.reject = lambda _submit: None
        reading = asyncio.create_task(post(site, "/v1/completions", prompt="Hi", stream=True))
        await until(lambda: len(site.cluster.submits) == 2)
        await asyncio.sleep(0)
        submit, _ = site.cluster.submits[1]
        key = (submit.request_id, submit.attempt)
        if with_text:
            site.gateway.backend.worker_message(DECODER, Tokens((TokenItem(*key, 0, 0, (70, 71)),)), b"")
        late = rejecting(Reject.EXPIRED)(submit)
        site.gateway.backend.coordinator_message(site.cluster, late, b"")
        answer = await reading
        assert answer.status_code == (200 if with_text else 503)
        assert answer.text.count("data: ") == 2 * with_text
        assert '"code":"queue_timeout"' in answer.text.replace(": ", ":")

    on_site(test)


def test_text_is_delivered_before_failure() -> None:
    """Tokens and the end come in one batch, before the stream's reader runs: the first tokens of the stream, and later ones."""

    async def test(site: Site) -> None:
        site.cluster.hold = True
        backend = site.gateway.backend
        for expected in ("@A", "@A" + "BC"):
            reading = asyncio.create_task(events(site, "/v1/completions", return_token_ids=True))
            count = len(site.cluster.submits)
            await until(lambda count=count: len(site.cluster.submits) == count + 1)
            submit, _ = site.cluster.submits[-1]
            ids = site.gateway.models[0].tokenizer.encode(expected, add_special_tokens=False)
            for start in range(0, len(ids), 2):
                item = TokenItem(submit.request_id, 1, 0, start, tuple(ids[start : start + 2]))
                if start:
                    await asyncio.sleep(0.01)
                backend.worker_message(DECODER, Tokens((item,)), b"")
            failed = rejecting(Reject.LOSES_WORKERS)(submit)
            backend.coordinator_message(site.cluster, failed, b"")
            chunks, done = await reading
            assert not done and chunks[-1]["error"]["code"] == "loses_workers"
            assert "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1]) == expected

    on_site(test, limits=StreamLimits(attempts_max=1))
