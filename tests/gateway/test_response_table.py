"""Responses that gateways keep in a real PostgreSQL: found by their tenant at any gateway, within bounds of bytes and time, and
what happens while the database does not answer."""

import asyncio
import hashlib
import signal
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import openai
import pytest

from gateway.http.errors import ApiError
from gateway.response_store import COST_BYTES_MIN
from tests.gateway.fakes import ANSWER, MODEL, Site, make_site, served
from tests.gateway.test_responses import TENANTS, prompt_of
from tests.helpers import printed, until
from tests.postgres_server import PostgresServer

psycopg = pytest.importorskip("psycopg")
module: Any = pytest.importorskip("gateway.response_table")
postgres_pool: Any = pytest.importorskip("gateway.postgres_pool")
HOLD = b"x" * COST_BYTES_MIN


def with_tables(url: str, test: Callable[..., Awaitable[None]], *keeps_s: float, **options: Any) -> None:
    """`keeps_s`: of each table, as of gateways of their own."""

    async def body() -> None:
        tables = [module.ResponseTable(url, keep_s=keep_s, **options) for keep_s in keeps_s]
        try:
            await test(*tables)
        finally:
            for table in tables:
                table.close()

    asyncio.run(body())


async def kept(table: Any, names: str, tenant: str = "") -> list[bool]:
    """Whether each response is there; `tenant` empty: each is of the tenant with its name."""
    return [await table.get(tenant or name, name) is not None for name in names.split()]


def test_response_is_found_at_another_gateway(pg_url: str) -> None:
    """A response is found, read and deleted at another gateway, byte for byte; several gateways may make the table."""

    async def test(one: Any, two: Any) -> None:
        await asyncio.gather(one.put("a", "r", b'"\\u0000"', b"{}"), two.put("a", "s", b"[]", b""))
        found = await two.get("a", "r")
        assert (found.items, found.response) == (b'"\\u0000"', b"{}")
        assert await kept(one, "r s none", "a") == [True, True, False]
        assert await one.delete("a", "s") and not await two.delete("a", "s")
        for odd in ("r\0", "\ud800", "r" * 200):  # what no gateway made
            assert await one.get("a", odd) is None and not await one.delete("a", odd)
        assert await kept(two, "r s", "a") == [True, False]

    with_tables(pg_url, test, 60.0, 60.0)


def test_response_belongs_to_its_tenant(pg_url: str) -> None:
    """Nobody but its tenant reads or deletes a response, also not another user of its organisation."""

    async def test(table: Any) -> None:
        await table.put("acme/ann", "r", b"[]", b"{}")
        for other in ("acme", "acme/bob", "x"):
            assert await table.get(other, "r") is None and not await table.delete(other, "r")
        assert await table.get("acme/ann", "r") is not None

    with_tables(pg_url, test, 60.0)


def test_table_is_bounded(pg_url: str) -> None:
    """All responses, and those of one organisation, are bounded in bytes; those that hold most lose their oldest."""

    async def test(table: Any, _: Any) -> None:
        await table.put("a", "huge", 2 * HOLD + b"x", b"")
        for number in range(4):
            await table.put("a", f"a{number}", HOLD, b"")
        assert await kept(table, "huge a0 a1 a2 a3", "a") == [False, False, False, True, True]
        for user in ("ann", "bob"):
            await table.put(f"acme/{user}", "r", b"", b"small")
        await table.put("acme/ann", "s", b"", b"")
        assert await kept(table, "r s", "acme/ann") == [False, True]
        assert await kept(table, "r", "acme/bob") == [True], "ann held more"
        for tenant in "bcdef":
            await table.put(tenant, tenant, HOLD, b"")
        assert await kept(table, "b c d e f") == 5 * [True]
        assert await kept(table, "a2 a3", "a") == [False, True], "a held most"

    with_tables(pg_url, test, 60.0, 60.0, bytes_max=8 * COST_BYTES_MIN)


def test_expired_responses_are_deleted(pg_url: str) -> None:
    """A response that is over its time is not found, and is deleted without another request."""

    async def test(short: Any, long: Any) -> None:
        await short.put("a", "old", b"[]", b"{}")
        await long.put("a", "new", b"[]", b"{}")
        assert await kept(long, "old new", "a") == [True, True]
        await asyncio.sleep(0.5)
        assert await kept(long, "old new", "a") == [False, True] and not await long.delete("a", "old")
        tidying = asyncio.create_task(long.run())
        with psycopg.connect(pg_url, autocommit=True) as db:
            await until(lambda: db.execute("SELECT response_id FROM crossdock.responses").fetchall() == [("new",)])
        tidying.cancel()

    with_tables(pg_url, test, 0.5, 60.0)


def test_silent_database_holds_up_nothing(
    pg_server: PostgresServer, pg_url: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """While the database stands still, a put is dropped and a get fails, each in a bounded time, and the event loop runs on;
    afterwards both work again."""
    monkeypatch.setattr(postgres_pool, "ANSWER_S", 0.5)
    monkeypatch.setattr(postgres_pool, "WAIT_S", 1.0)

    async def test(table: Any) -> None:
        await table.put("a", "r", b"[]", b"{}")
        pg_server.signal_all(signal.SIGSTOP)
        try:
            began = time.monotonic()
            ticks, first = 0, asyncio.create_task(table.put("a", "dropped", b"[]", b"{}"))
            while not first.done():
                await asyncio.sleep(0.01)
                ticks += 1
            assert ticks > 10 and time.monotonic() - began < 2.0
            began = time.monotonic()
            with pytest.raises(ApiError) as refused:
                await table.get("a", "r")
            assert time.monotonic() - began < 0.2
        finally:
            pg_server.signal_all(signal.SIGCONT)
        assert refused.value.status == 503 and int(refused.value.headers()["Retry-After"]) >= 1
        assert refused.value.code == "storage_unavailable" and "postgres" not in refused.value.message
        await asyncio.sleep(postgres_pool.RETRY_S + 0.1)
        assert await kept(table, "r", "a") == [True]

    with_tables(pg_url, test, 60.0)
    assert "a response is not kept" in printed(capfd)


def test_tenant_cannot_take_every_call(pg_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls that wait are bounded, and a tenant with many leaves room for others."""
    monkeypatch.setattr(postgres_pool, "CALLS_MAX", 8)

    async def test(table: Any) -> None:
        await table.put("quiet", "r", b"[]", b"{}")
        many = [table.get("busy", "r") for _ in range(50)]
        done = await asyncio.gather(*many, table.get("quiet", "r"), return_exceptions=True)
        assert sum(isinstance(one, ApiError) for one in done) == 46 and done[-1].items == b"[]"
        assert await kept(table, "r", "quiet") == [True], "refusals are no failures of the database"

    with_tables(pg_url, test, 60.0)


def test_conversation_continues_at_other_gateway(pg_server: PostgresServer, pg_url: str) -> None:
    """A response of one gateway, streamed or not, is continued at another, by its tenant alone. Without the database that gets
    503, and everything else goes on."""
    tenants = TENANTS.format(**{name: hashlib.sha256(name.encode()).hexdigest() for name in "ab"})

    async def test(one: Any, two: Any) -> None:
        sites: list[Site] = [make_site(tenants=tenants, response_table=table) for table in (one, two)]
        async with AsyncExitStack() as stack:
            urls = [await stack.enter_async_context(served(site)) for site in sites]
            first, second = [
                await stack.enter_async_context(openai.AsyncOpenAI(base_url=f"{base}/v1", api_key="a", max_retries=0))
                for base in urls
            ]
            events = [e async for e in await first.responses.create(model=MODEL, input="question", stream=True)]
            whole = await second.responses.create(
                model=MODEL, input="next", previous_response_id=events[-1].response.id
            )
            prompt = prompt_of(sites[1])
            assert prompt.index("question") < prompt.index(ANSWER) < prompt.index("next")
            assert (await first.responses.retrieve(whole.id)).output_text == ANSWER
            other = first.with_options(api_key="b")
            with pytest.raises(openai.NotFoundError, match="was not stored, or has expired"):
                await other.responses.create(model=MODEL, input="x", previous_response_id=whole.id)
            await asyncio.to_thread(pg_server.stop)
            try:
                with pytest.raises(openai.InternalServerError, match="cannot be read now") as refused:
                    await second.responses.create(model=MODEL, input="x", previous_response_id=whole.id)
                assert refused.value.status_code == 503 and int(refused.value.response.headers["Retry-After"]) >= 1
                assert (await second.responses.create(model=MODEL, input="alone")).output_text == ANSWER
            finally:
                await asyncio.to_thread(pg_server.start)
            await asyncio.sleep(postgres_pool.RETRY_S + 0.1)
            again = await first.responses.create(model=MODEL, input="x", previous_response_id=whole.id)
            assert prompt_of(sites[0]).count(ANSWER) == 2
            await second.responses.delete(again.id)
            with pytest.raises(openai.NotFoundError):
                await first.responses.retrieve(again.id)
            await until(lambda: all(site.gateway.intake.idle for site in sites))

    with_tables(pg_url, test, 60.0, 60.0)
