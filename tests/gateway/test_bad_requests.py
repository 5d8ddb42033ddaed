"""Every bad input gets its status and OpenAI's error shape, reaches no worker and leaves nothing behind."""

import asyncio

import pytest

from tests.gateway.bad_requests import BadRequest, table
from tests.gateway.fakes import BODY_BYTES_MAX, CONTEXT_TOKENS, MODEL, make_site
from tests.tiny_models import VOCAB

ROWS = table(model=MODEL, context_tokens=CONTEXT_TOKENS, vocab_size=VOCAB, body_bytes_max=BODY_BYTES_MAX)


@pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
def test_bad_request(row: BadRequest) -> None:
    async def body() -> None:
        site = make_site()
        async with site.client() as client:
            answer = await client.request(row.method, row.path, content=row.body, headers=row.headers)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"], error["code"]) == (row.status, row.param, row.code), error
        assert set(error) == {"message", "type", "param", "code", "request_id"}
        assert error["request_id"] == answer.headers["x-request-id"]
        assert error["type"] == "invalid_request_error"
        assert error["message"]
        assert len(answer.content) < 2000
        assert not site.cluster.submits
        assert not site.gateway.backend.keeper.streams

    asyncio.run(body())


def test_the_table_is_wide_enough() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS) >= 40
