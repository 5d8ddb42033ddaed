"""Bounds of files and batches, their tenants, and the store on disk."""

import asyncio
import fcntl
import gc
import os
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.batches import batches, files, runner, sqlite_store
from gateway.batches.lines import LINES_MAX
from gateway.batches.sqlite_store import SqliteBatchStore
from gateway.batches.store import Database
from runtime.storage.lock_file import open_lock
from tests.gateway.batch_words import KEYS, TENANTS, Desk, jsonl, left, on_desk, requests
from tests.gateway.fakes import served
from tests.helpers import until

DB = "batches.sqlite"


REFUSED: list[tuple[Callable[[Desk], Any], int, str]] = [
    (lambda desk: desk.upload((b"x" * 60_000 + b"\n") * 20), 413, "file"),
    (lambda desk: desk.upload(b"\n" * (LINES_MAX + 1)), 400, "file"),
    (lambda desk: desk.upload(b"{}\n" + b"x" * 70_000), 400, "file"),
    (lambda desk: desk.upload(b""), 400, "file"),
    (lambda desk: desk.upload(b"\n \r\n"), 400, "file"),
    (lambda desk: desk.upload(b"{}\n", purpose="fine-tune"), 400, "purpose"),
    (lambda desk: desk.upload(b"{}\n", purpose="x" * 2000), 400, "purpose"),
    (lambda desk: desk.upload(b"{}\n", more="x"), 400, "more"),
    (lambda desk: desk.upload(b"{}\n", **{"expires_after[seconds]": "1"}), 400, "expires_after.anchor"),
    (lambda desk: desk.ask("POST", "/v1/files", files={"purpose": (None, "batch")}), 400, "file"),
    (lambda desk: desk.ask("POST", "/v1/files", json={"purpose": "batch"}), 415, None),  # type: ignore[list-item]
    (lambda desk: desk.ask("POST", "/v1/files", content=b"--x--", headers={"Content-Encoding": "gzip",  # type: ignore[list-item]
                           "Content-Type": "multipart/form-data; boundary=x"}), 415, None),
    (lambda desk: desk.ask("POST", "/v1/files", content=b"--x", headers={"Content-Type": "multipart/form-data; boundary=x"}),  # type: ignore[list-item]
     400, None),
    (lambda desk: desk.create("file-none"), 404, "input_file_id"),
    (lambda desk: desk.create("file-none", endpoint="/v1/embeddings"), 400, "endpoint"),
    (lambda desk: desk.create("file-none", completion_window="24"), 400, "completion_window"),
    (lambda desk: desk.create("file-none", completion_window="169h"), 400, "completion_window"),
    (lambda desk: desk.create("file-none", metadata={"k" * 65: ""}), 400, None),  # type: ignore[list-item]
    (lambda desk: desk.create("file-none", more=1), 400, "more"),
    (lambda desk: desk.ask("GET", "/v1/files?limit=0"), 400, "limit"),
    (lambda desk: desk.ask("GET", "/v1/files?order=up"), 400, "order"),
    (lambda desk: desk.ask("GET", "/v1/files?purpose=vision"), 400, "purpose"),
    (lambda desk: desk.ask("GET", "/v1/files?after=file-none"), 404, "after"),
    (lambda desk: desk.ask("GET", "/v1/batches?limit=101"), 400, "limit"),
    (lambda desk: desk.ask("GET", "/v1/batches/batch_none"), 404, "batch_id"),
    (lambda desk: desk.ask("POST", "/v1/batches/batch_none/cancel"), 404, "batch_id"),
    (lambda desk: desk.ask("GET", "/v1/files/file-none/content"), 404, "file_id"),
    (lambda desk: desk.ask("DELETE", "/v1/files/file-none"), 404, "file_id"),
]  # fmt: skip


@pytest.mark.parametrize(("ask", "status", "param"), REFUSED)
def test_wrong_batch_request_leaves_nothing(
    place: Path | str, ask: Callable[[Desk], Any], status: int, param: str | None
) -> None:
    """A wrong request for a file or batch is refused with its parameter and leaves no rows."""

    async def body(desk: Desk) -> None:
        answer = await ask(desk)
        assert answer.status_code == status, answer.text
        if param is not None:
            assert answer.json()["error"]["param"] == param, answer.text
        assert not any((await left(desk)).values())

    on_desk(body, place)


def test_tenant_storage_is_bounded(place: Path | str) -> None:
    """A tenant's files, results and batches have bounded room; more is refused."""
    most = 20 * files.FILE_COST_BYTES

    async def body(desk: Desk) -> None:
        count = 0
        while (answer := await desk.upload(jsonl(requests(20)))).status_code == 200 and count < 30:
            count += 1
        assert answer.status_code == 403 and answer.json()["error"]["code"] == "storage_quota_exceeded"
        file_id = (await desk.ask("GET", "/v1/files?limit=1")).json()["data"][0]["id"]
        assert (await desk.create(file_id)).status_code == 403
        for file in (await desk.ask("GET", f"/v1/files?after={file_id}")).json()["data"][:4]:
            assert (await desk.ask("DELETE", f"/v1/files/{file['id']}")).status_code == 200
        batch_id = (await desk.create(file_id)).json()["id"]
        await desk.service.store.write(
            lambda db: db.execute("UPDATE files SET bytes = ? WHERE id = ?", (most, file_id))
        )
        desk.start()
        batch = await desk.ended(batch_id)
        assert batch["request_counts"]["failed"] == 20 and not desk.site.cluster.submits
        errors = await desk.lines_of(batch["error_file_id"])
        assert {one["error"]["code"] for one in errors} == {"storage_quota_exceeded"}
        assert 10 < count <= 20

    on_desk(body, place, tenant_bytes_max=most)


def test_files_and_batches_are_tenant_private(place: Path | str) -> None:
    """Files and batches of one tenant are not found by another."""

    async def body(desk: Desk) -> None:
        desk.start()
        acme, bell = KEYS["acme"], KEYS["bell"]
        batch_id = await desk.batch(jsonl(requests(2)), acme)
        batch = await desk.ended(batch_id, acme)
        own = (await desk.ask("GET", "/v1/files", acme)).json()["data"]
        assert {file["purpose"] for file in own} == {"batch", "batch_output"}
        for file in own:
            for method, path in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
                assert (await desk.ask(method, f"/v1/files/{file['id']}{path}", bell)).status_code == 404
        assert (await desk.ask("GET", f"/v1/batches/{batch_id}", bell)).status_code == 404
        assert (await desk.ask("POST", f"/v1/batches/{batch_id}/cancel", bell)).status_code == 404
        assert (await desk.create(batch["input_file_id"], bell)).status_code == 404
        for path in ("files", "batches", f"files?after={own[0]['id']}", f"batches?after={batch_id}"):
            answer = await desk.ask("GET", f"/v1/{path}", bell)
            assert answer.status_code == 404 if "after" in path else answer.json()["data"] == []
        assert (await desk.ask("GET", "/v1/files")).status_code == 401
        assert (await desk.upload(b"{}\n")).status_code == 401
        answer = await desk.create(batch["output_file_id"], acme)
        assert answer.json()["error"]["code"] == "invalid_purpose"

    on_desk(body, place, tenants=TENANTS)


def test_lists_come_in_pages(place: Path | str) -> None:
    """Lists of files come page by page, in either order."""

    async def body(desk: Desk) -> None:
        made = []
        for number in range(5):
            made.append(await desk.file(b"%d\n" % number))
            await asyncio.sleep(0.002)
        for order, expected in (("asc", made), ("desc", made[::-1])):
            found: list[str] = []
            more = True
            while more:
                after = f"&after={found[-1]}" if found else ""
                page = (await desk.ask("GET", f"/v1/files?limit=2&order={order}{after}")).json()
                found += [file["id"] for file in page["data"]]
                more = page["has_more"]
            assert found == expected

    on_desk(body, place)


def test_needed_file_cannot_be_deleted(place: Path | str) -> None:
    """A file cannot be deleted while a batch needs it, and can be afterwards."""

    async def body(desk: Desk) -> None:
        file_id = await desk.file(jsonl(requests(1)))
        batch_id = (await desk.create(file_id)).json()["id"]
        answer = await desk.ask("DELETE", f"/v1/files/{file_id}")
        assert answer.status_code == 409 and batch_id in answer.json()["error"]["message"]
        desk.start()
        batch = await desk.ended(batch_id)
        for each in (file_id, batch["output_file_id"]):
            assert (await desk.ask("DELETE", f"/v1/files/{each}")).status_code == 200
            assert (await desk.ask("GET", f"/v1/files/{each}")).status_code == 404
        assert await left(desk) == {"files": 0, "lines": 0, "batches": 1, "results": 0}

    on_desk(body, place)


def test_expired_files_are_deleted(place: Path | str) -> None:
    """Expired files and uploads cut short are deleted, except those that a batch needs."""

    async def body(desk: Desk) -> None:
        store, day = desk.service.store, 86_400
        needed = await desk.file(jsonl(requests(1)))
        await desk.create(needed)
        soon = (
            await desk.upload(b"1\n", **{"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"})
        ).json()
        assert 3600 <= soon["expires_at"] - soon["created_at"] <= 3610, "it counts from the end of the upload"
        await store.write(files.begin, "default", "cut off by a kill", soon["created_at"], 1 << 20)
        assert await store.write(files.prune, soon["created_at"] + 3000, 9) == 0
        assert await store.write(files.prune, soon["created_at"] + 7200, 9) == 2
        assert await store.write(files.prune, soon["created_at"] + 90 * day, 9) == 0
        (batch,) = await store.read(batches.open_batches)
        await store.write(batches.start, batch, 1, 1)
        await store.write(batches.put_result, batch, 1, False, b"{}\n")
        await store.write(batches.finish, batch, "completed", soon["created_at"])
        assert await store.write(batches.prune, soon["created_at"] + 1, 9) == 0, "its results are there"
        assert await store.write(files.prune, soon["created_at"] + 90 * day, 9) == 2
        assert await store.write(batches.prune, soon["created_at"] + 1, 9) == 1
        assert not any((await left(desk)).values())

    on_desk(body, place)


def test_missing_store_gives_a_404(tmp_path: Path) -> None:
    """A gateway without a store answers 404 and names --batch-db."""

    async def body(desk: Desk) -> None:
        async with desk.site.client() as client:
            answer = await client.get("/v1/batches")
            assert answer.status_code == 404 and "--batch-db" in answer.json()["error"]["message"]

    on_desk(body, tmp_path / DB)


def test_failing_store_is_a_503(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failing store answers 503, and the batch goes on once the store works again."""
    monkeypatch.setattr(runner, "POLL_S", 0.05)
    monkeypatch.setattr(runner, "_STORE_FAILED_S", 0.0)
    real, failing = batches.put_result, True

    def put_result(*args: Any) -> bool:
        if failing:
            raise sqlite3.OperationalError("database or disk is full")
        return real(*args)

    monkeypatch.setattr(batches, "put_result", put_result)

    async def body(desk: Desk) -> None:
        nonlocal failing
        desk.start()
        batch_id = await desk.batch(jsonl(requests(3)))
        await until(lambda: len(desk.site.cluster.submits) >= 4)
        failing = False
        assert (await desk.ended(batch_id))["request_counts"]["completed"] == 3
        await desk.kill()
        await desk.service.store.close()
        assert (await desk.ask("GET", "/v1/batches")).status_code == 503
        await desk.service.store.open()

    on_desk(body, tmp_path / DB)


def test_locked_store_refuses_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While another process locks the file, writes of clients get 503 with Retry-After soon, and reads are answered."""
    monkeypatch.setattr(sqlite_store, "SOON_S", 0.3)

    async def body(desk: Desk) -> None:
        await desk.file(b"{}\n")
        other = sqlite3.connect(tmp_path / DB, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        began = time.monotonic()
        writing = asyncio.gather(*(desk.upload(b"{}\n") for _ in range(20)), desk.create("file-x"))
        assert (await desk.ask("GET", "/v1/files")).status_code == 200
        assert not writing.done(), "a read overtakes the writes that wait"
        answers = await writing
        assert {(answer.status_code, "retry-after" in answer.headers) for answer in answers} == {(503, True)}
        assert time.monotonic() - began < 5, "20 times 0.3 s if they wait for each other"
        other.execute("ROLLBACK")
        other.close()
        await desk.file(b"{}\n")
        assert (await left(desk))["files"] == 2

    on_desk(body, tmp_path / DB)


def test_slow_write_holds_up_no_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a transaction waits for the disk, later writes get 503 soon, and reads are answered."""
    monkeypatch.setattr(sqlite_store, "SOON_S", 0.3)
    disk, began = threading.Event(), threading.Event()

    def slow(_: Database) -> bool:
        began.set()
        return disk.wait(30)

    async def body(desk: Desk) -> None:
        writing = asyncio.create_task(desk.service.store.write_soon(slow))
        await asyncio.to_thread(began.wait, 30)
        assert (await desk.upload(b"{}\n")).status_code == 503
        assert (await desk.ask("GET", "/v1/files")).status_code == 200
        disk.set()
        assert await writing, "what has begun is waited for"

    on_desk(body, tmp_path / DB)


def test_store_files_are_private(tmp_path: Path) -> None:
    """The store's files have mode 0600."""

    async def body(desk: Desk) -> None:
        await desk.file(b"{}\n")
        modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.glob(f"{DB}*")}  # noqa: ASYNC240
        assert set(modes) >= {DB, f"{DB}-wal"} and set(modes.values()) == {0o600}

    on_desk(body, tmp_path / DB)


@pytest.mark.parametrize("content", [b"\n" * (LINES_MAX - 1) + b"1", b"{}\n" * LINES_MAX, b"[" * (1 << 19)])
def test_large_file_never_blocks_the_loop(place: Path | str, content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the CPU time of the loop's thread in each of its callbacks."""
    slowest: list[float] = []
    run = asyncio.Handle._run

    def timed(self: asyncio.Handle) -> None:
        began = time.thread_time()
        run(self)
        slowest.append(time.thread_time() - began)

    async def body(desk: Desk) -> None:
        desk.start()
        async with served(desk.site) as url, httpx.AsyncClient(timeout=60, trust_env=False) as client:
            monkeypatch.setattr(asyncio.Handle, "_run", timed)  # a new client reads certificates, for tens of ms
            answer = await client.post(f"{url}/v1/files", files={"file": content}, data={"purpose": "batch"})
            assert answer.status_code == 200, answer.text
            made = await desk.create(answer.json()["id"])
            assert (await desk.ended(made.json()["id"]))["status"] == "failed"
        assert max(slowest) < 0.1, "50 ms is the aim"

    def on_app(desk: Desk) -> Any:
        desk.site.app = desk.app
        return body(desk)

    gc.collect()
    gc.disable()  # a gateway has fewer objects than the tests
    try:
        on_desk(on_app, place, body_bytes_max=1 << 20)
    finally:
        gc.enable()


_NAMED = b'--b\r\nContent-Disposition: form-data; name="x"'


@pytest.mark.parametrize(
    "form",
    [
        (_NAMED + b';";' + b";" * 3_900 + b"\r\n\r\nx\r\n") * 14,
        b'--b\r\nContent-Disposition: form-data; name="file"\r\n\r\n' + b"\r\n--bX" * 10_000,
        (_NAMED + b";a" * 31 + b"\r\nA:" + b";" * 4_000 + b"\r\n\r\n\r\n") * 16,
        (_NAMED + b"; filename*=utf-8''" + b"%" * 3_900 + b"\r\n\r\nx\r\n") * 14,
        (_NAMED + b'; filename="' + b"\\\\" * 1_900 + b'"\r\n\r\nx\r\n') * 14,
    ],
    ids=["semicolons", "almost boundaries", "another header", "percent signs", "backslashes"],
)
def test_odd_forms_leave_the_loop_free(tmp_path: Path, form: bytes) -> None:
    """Forms that take long to parse, many at once, cost the loop's thread little."""
    form += b"\r\n--b--"

    async def body(desk: Desk) -> None:
        desk.site.app = desk.app  # type: ignore[assignment]
        began = time.thread_time()
        async with served(desk.site) as url, httpx.AsyncClient(timeout=60, trust_env=False) as client:
            headers = {"Content-Type": "multipart/form-data; boundary=b"}
            sent = [client.post(f"{url}/v1/files", content=form, headers=headers) for _ in range(12)]
            assert {answer.status_code for answer in await asyncio.gather(*sent)} == {400}
        assert time.thread_time() - began < 1.0, "0.1 to 0.3 s with the client; ten times that on the loop"

    on_desk(body, tmp_path / DB)


def test_store_opening_waits_for_its_lock(tmp_path: Path) -> None:
    """Opening the store waits while another gateway holds the lock for opening it."""

    async def body() -> None:
        other = open_lock(tmp_path / f"{DB}.opening")
        fcntl.flock(other, fcntl.LOCK_EX)
        store = SqliteBatchStore(tmp_path / DB)
        opening = asyncio.create_task(store.open())
        await asyncio.wait({opening}, timeout=0.3)
        assert not opening.done()
        os.close(other)
        await opening
        await store.close()

    asyncio.run(body())
