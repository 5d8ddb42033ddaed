"""Coordinators that wait for a lease in PostgreSQL: who gets it when, and when its holder stops."""

import asyncio
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from coordinator.policy_keeper import PolicyStoreError
from coordinator.postgres.leader_lease import LeaderLease, NotLeader
from runtime.lease.lease import LEASE_S, MARGIN
from runtime.process import clock
from runtime.process.driver import Stop
from runtime.process.exits import ConfigError
from tests.postgres_server import PostgresServer, query


def run(pg_server: PostgresServer, body: Callable[[LeaderLease, LeaderLease], Awaitable[None]]) -> None:
    async def scene() -> None:
        one, two = (LeaderLease(pg_server.url, name) for name in ("one", "two"))
        try:
            async with asyncio.timeout(60):
                await body(one, two)
        finally:
            await one.give_up()
            await two.give_up()

    asyncio.run(scene())
    query(pg_server.url, "DROP SCHEMA crossdock CASCADE")


def test_released_lease_passes_at_once(pg_server: PostgresServer) -> None:
    """A standby waits while the leader renews its lease, and gets it soon after the leader has given it up."""

    async def body(one: LeaderLease, two: LeaderLease) -> None:
        assert await one.acquire(Stop())
        waiting = asyncio.ensure_future(two.acquire(Stop()))
        await asyncio.sleep(LEASE_S + 1.0)
        assert not waiting.done() and one.is_held(clock.now()) and not one.lost.is_set()
        await one.give_up()
        gave_up_at = time.monotonic()
        assert await waiting and time.monotonic() - gave_up_at < 1.0
        assert two.is_held(clock.now()) and not one.is_held(clock.now())

    run(pg_server, body)


def test_leader_stops_before_standby_leads(pg_server: PostgresServer) -> None:
    """A leader whose database does not answer stops by itself, before the lease could be another's."""

    async def body(one: LeaderLease, two: LeaderLease) -> None:
        assert await one.acquire(Stop())
        assert not await two.acquire(stopped_soon())
        await asyncio.to_thread(pg_server.signal_all, signal.SIGSTOP)
        stopped_at = time.monotonic()
        try:
            async with asyncio.timeout(LEASE_S):
                await one.lost.wait()
            assert time.monotonic() - stopped_at <= LEASE_S * (1 - MARGIN) + 0.3
            assert not one.is_held(clock.now())
        finally:
            await asyncio.to_thread(pg_server.signal_all, signal.SIGCONT)
        assert await two.acquire(Stop())
        assert not one.is_held(clock.now())

    run(pg_server, body)


def stopped_soon() -> Stop:
    stop = Stop()
    asyncio.get_running_loop().call_later(0.5, stop.set)
    return stop


def test_lease_survives_restart_of_database(pg_server: PostgresServer) -> None:
    """A restart that is shorter than the lease goes unnoticed; after a longer one somebody leads again."""

    async def body(one: LeaderLease, two: LeaderLease) -> None:
        assert await one.acquire(Stop())
        waiting = asyncio.ensure_future(two.acquire(Stop()))
        await asyncio.to_thread(pg_server.stop)
        async with asyncio.timeout(LEASE_S):
            await one.lost.wait()
        again = asyncio.ensure_future(one.acquire(Stop()))
        await asyncio.sleep(1.0)
        assert not waiting.done() and not again.done()
        await asyncio.to_thread(pg_server.start)
        await asyncio.wait({waiting, again}, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.sleep(1.0)
        assert waiting.done() != again.done(), "one of them leads"
        for one_of in (waiting, again):
            one_of.cancel()

    run(pg_server, body)


def test_terms_are_fenced_from_each_other(pg_server: PostgresServer) -> None:
    """The stores of a leader cannot be written once another has led, even if the first one leads again."""

    async def body(one: LeaderLease, two: LeaderLease) -> None:
        assert await one.acquire(Stop())
        _, policies = one.stores()
        policies.write(b"{}")
        await one.give_up()
        assert await one.acquire(Stop())
        for _ in range(2):  # the first one finds that its session was ended
            with pytest.raises(PolicyStoreError) as refused:
                policies.write(b"[]")
        assert "term 1 is over" in str(refused.value)

    run(pg_server, body)


def test_foreign_tables_are_refused(pg_server: PostgresServer) -> None:
    """A database with tables of another version is refused with its name."""

    async def body(one: LeaderLease, two: LeaderLease) -> None:
        assert await one.acquire(Stop())
        await one.give_up()
        query(pg_server.url, "UPDATE lease SET version = 99")
        with pytest.raises(NotLeader, match=r"postgresql://127\.0\.0\.1/postgres: its tables are of version 99"):
            await two.acquire(Stop())

    run(pg_server, body)


def test_missing_psycopg_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("coordinator.postgres.database", "runtime.storage.postgres"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.delattr("coordinator.postgres.database", raising=False)
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(ConfigError, match=r"--database: needs psycopg 3; install crossdock\[postgresql\]"):
        LeaderLease("postgresql://h/d", "one")


def test_password_stays_out_of_messages(tmp_path: Path) -> None:
    """The name of a database in messages has neither user nor password."""
    pytest.importorskip("psycopg")
    assert LeaderLease("postgresql://u:secret@h:5/d?passfile=/p", "one").name == "postgresql://h/d"
