"""Every bad input gets its status and OpenAI's error shape, reaches no worker and leaves nothing behind."""

import asyncio

import pytest

from tests.gateway.bad_requests import BadRequest, table
from tests.gateway.fakes import BODY_BYTES_MAX, CONTEXT_TOKENS, MODEL, make_site
from tests.tiny_models import VOCAB

ROWS = table(model=MODEL, context_tokens=CONTEXT_TOKENS, vocab_size=VOCAB, body_bytes_max=BODY_BYTES_MAX)


AT_ONCE = [row for row in ROWS if not row.compiled]


@pytest.mark.parametrize("row", AT_ONCE, ids=[row.name for row in AT_ONCE])
def test_bad_request_gets_its_error(row: BadRequest) -> None:
    """Each bad request gets its status and error, and no worker sees it."""
    asyncio.run(_check([row]))


def test_bad_grammars_get_their_errors() -> None:
    """All requests with bad grammars get their errors on one site."""
    asyncio.run(_check([row for row in ROWS if row.compiled]))


async def _check(rows: list[BadRequest]) -> None:
    site = make_site()
    try:
        async with site.client() as client:
            for row in rows:
                answer = await client.request(row.method, row.path, content=row.body, headers=row.headers)
                error = answer.json()["error"]
                found = (answer.status_code, error["param"], error["code"])
                assert found == (row.status, row.param, row.code), (row.name, error)
                assert set(error) == {"message", "type", "param", "code", "request_id"}
                assert error["request_id"] == answer.headers["x-request-id"]
                assert error["type"] == "invalid_request_error"
                assert error["message"]
                assert len(answer.content) < 2000
                assert not site.cluster.submits
                assert not site.gateway.backend.keeper.streams
    finally:
        await site.gateway.models[0].grammars.close()


def test_bad_request_table_is_wide_enough() -> None:
    """The table has at least 150 bad requests with names of their own."""
    assert len({row.name for row in ROWS}) == len(ROWS) >= 150
