"""Batches in a real PostgreSQL: who runs them, what a gateway that was cut off may write, and an outage of the database."""

import asyncio
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from gateway.batches import batches, files, runner
from gateway.batches.store import BatchService, Database
from runtime.storage.errors import StorageError, StorageUnavailable
from tests.gateway.batch_words import Desk, jsonl, on_desk, request, requests
from tests.helpers import until
from tests.postgres_server import PostgresServer

module: Any = pytest.importorskip("gateway.batches.postgres_store")
pool: Any = pytest.importorskip("gateway.postgres_pool")


async def leading(store: Any) -> int:
    """Wait until the store leads; returns its term."""
    async with asyncio.timeout(30):
        while True:
            if term := await store.lead():
                return int(term)
            await asyncio.sleep(0.05)


def test_old_term_writes_no_result(pg_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The database refuses results of a gateway whose lease has passed to another, and takes those of the other."""
    monkeypatch.setattr(module, "LEASE_S", 1.0)

    async def body(desk: Desk) -> None:
        one: Any = desk.service.store
        two = module.PostgresBatchStore(pg_url, "two")
        assert await leading(one) == 1 and await two.lead() == 0
        await desk.batch(jsonl(requests(1)))
        (batch,) = await one.read(batches.open_batches)
        await one.write(batches.start, batch, 1, 0)
        monkeypatch.setattr(one._lease._table, "renew", lambda term: True)  # a host that is cut off finds out late
        assert await leading(two) == 2
        with pytest.raises(StorageError, match="term 1 is over") as refused:
            await one.write(batches.put_result, batch, 1, False, b"late\n")
        assert not isinstance(refused.value, StorageUnavailable)
        assert await two.write(batches.put_result, batch, 1, False, b"in time\n")
        await two.write(batches.finish, batch, "completed", 0)
        found = await desk.get(batch.id)
        content = await desk.ask("GET", f"/v1/files/{found['output_file_id']}/content")
        assert content.content == b"in time\n" and found["request_counts"]["completed"] == 1
        await two.give_up()
        await two.close()

    on_desk(body, pg_url)


def test_stalled_write_delays_no_takeover(pg_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A transaction that stands still in the term before is ended by the next leader, and leaves nothing."""
    monkeypatch.setattr(module, "LEASE_S", 1.0)
    begun, go_on = threading.Event(), threading.Event()

    def stall(db: Database) -> None:
        db.execute("UPDATE files SET name = 'changed'").rowcount  # noqa: B018 - waits for the answer
        begun.set()
        go_on.wait(30)

    async def body(desk: Desk) -> None:
        one: Any = desk.service.store
        two = module.PostgresBatchStore(pg_url, "two")
        assert await leading(one) == 1
        file_id = await desk.file(b"{}\n")
        stalled = asyncio.create_task(one.write(stall))
        await asyncio.to_thread(begun.wait, 30)
        monkeypatch.setattr(one._lease._table, "renew", lambda term: True)
        began = time.monotonic()
        assert await leading(two) == 2 and time.monotonic() - began < 5.0
        go_on.set()
        with pytest.raises(StorageError):
            await stalled
        assert (await desk.ask("GET", f"/v1/files/{file_id}")).json()["filename"] == "in.jsonl"
        await two.give_up()
        await two.close()

    on_desk(body, pg_url)


def test_outage_loses_no_answer(pg_server: PostgresServer, pg_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the database restarts, clients get 503 with Retry-After, and answers wait for it; no line runs again."""
    monkeypatch.setattr(runner, "POLL_S", 0.05)

    async def body(desk: Desk) -> None:
        desk.site.cluster.gap_s = 0.02
        desk.start()
        batch_id = await desk.batch(jsonl(requests(8)))
        await until(lambda: len(desk.site.cluster.submits) == 8)
        await asyncio.to_thread(pg_server.stop)
        try:
            for ask in (desk.ask("GET", f"/v1/batches/{batch_id}"), desk.upload(b"{}\n"), desk.create("file-x")):
                answer = await ask
                assert answer.status_code == 503 and int(answer.headers["retry-after"]) >= 1
                assert answer.json()["error"]["code"] == "batch_store_failed"
            await until(lambda: not desk.site.gateway.backend.keeper.streams)
        finally:
            await asyncio.to_thread(pg_server.start)
        await asyncio.sleep(pool.RETRY_S + 0.1)
        batch = await desk.ended(batch_id)
        assert batch["request_counts"] == {"total": 8, "completed": 8, "failed": 0}
        assert len(desk.site.cluster.submits) == 8 and len(await desk.lines_of(batch["output_file_id"])) == 8

    on_desk(body, pg_url)


def test_lost_lease_stops_the_lines(pg_server: PostgresServer, pg_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway whose database stands still stops its lines before another may run them; one of both ends the batch."""
    monkeypatch.setattr(runner, "POLL_S", 0.05)
    monkeypatch.setattr(module, "LEASE_S", 2.0)

    async def body(desk: Desk) -> None:
        other = Desk(desk.site, BatchService(module.PostgresBatchStore(pg_url, "two"), 1 << 20, 8 << 20, 1000))
        desk.site.cluster.hold = True
        desk.start()
        batch_id = await desk.batch(jsonl(requests(6)))
        await until(lambda: len(desk.site.cluster.submits) == 6)
        other.start()
        streams = desk.site.gateway.backend.keeper.streams
        await asyncio.to_thread(pg_server.signal_all, signal.SIGSTOP)
        try:
            began = time.monotonic()
            await until(lambda: not streams)
            assert time.monotonic() - began < 2.0
        finally:
            await asyncio.to_thread(pg_server.signal_all, signal.SIGCONT)
        desk.site.cluster.hold = False
        batch = await desk.ended(batch_id)
        assert batch["request_counts"] == {"total": 6, "completed": 6, "failed": 0}
        assert len(desk.site.cluster.submits) == 12
        await other.kill()
        await other.service.store.close()

    on_desk(body, pg_url)


def test_dead_gateway_gives_the_lease_up(pg_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lease of a gateway that renews no more passes to another after its time, not before."""
    monkeypatch.setattr(module, "LEASE_S", 1.0)

    async def body(desk: Desk) -> None:
        one: Any = desk.service.store
        two = module.PostgresBatchStore(pg_url, "two")
        assert await leading(one) == 1
        await asyncio.sleep(1.5)
        assert await two.lead() == 0, "it is renewed"
        one._lease._keeping.cancel()
        began = time.monotonic()
        assert await leading(two) == 2 and 0.7 < time.monotonic() - began < 3.0
        await asyncio.gather(one._lease._keeping, return_exceptions=True)
        await two.give_up()
        assert await leading(one) == 3
        await two.close()

    on_desk(body, pg_url)


@pytest.mark.parametrize("path", ["files/file-%00", "files/file-%00/content", "batches/%00", "batches?after=%00"])
def test_odd_ids_are_not_found(pg_url: str, path: str) -> None:
    """What PostgreSQL takes in no text is an id that is not there, or a name with another character in its place."""

    async def body(desk: Desk) -> None:
        assert (await desk.ask("GET", f"/v1/{path}")).status_code == 404
        odd = {"file": ("a\0b.jsonl", b"{}\n")}
        answer = await desk.ask("POST", "/v1/files", files=odd, data={"purpose": "batch"})
        assert answer.status_code == 400 or "\0" not in answer.json()["filename"]

    on_desk(body, pg_url)


def test_files_are_read_in_pieces(place: Any) -> None:
    """A transaction reads about as much of a file as it may, at least one line, and each line once."""
    large = jsonl([request(f"r{number}", prompt="x" * 50_000) for number in range(20)])

    async def read(desk: Desk, piece: Callable[[Database, int], tuple[int, bytes]]) -> list[bytes]:
        after, found = 0, []
        while (got := await desk.service.store.read(piece, after))[1]:
            after = got[0]
            found.append(got[1])
        return found

    async def body(desk: Desk) -> None:
        file_id = await desk.file(large)
        file = await desk.service.store.read(files.get, "default", file_id)
        for most in (1, 120_000):
            found = await read(desk, lambda db, after, most=most: files.content(db, file, after, most))  # type: ignore[misc]
            assert b"".join(found) == large and max(map(len, found)) <= most + 51_000

    on_desk(body, place)
