"""Files and batches: what clients see, and what the runner does, over a fake cluster."""

import asyncio
import fcntl
import gc
import json
import os
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from gateway.batches import batches, files, runner
from gateway.batches.lines import ERRORS_MAX, LINES_MAX
from gateway.batches.service import BatchService
from gateway.batches.store import Store
from proto.errors import Reject
from runtime.storage.lock_file import open_lock
from tests.gateway.batch_words import KEYS, TENANTS, Desk, jsonl, on_desk, request
from tests.gateway.fakes import ANSWER, rejecting, served
from tests.helpers import until

DB = "batches.sqlite"


def requests(count: int) -> list[dict[str, Any]]:
    return [request(f"r{number}") for number in range(count)]


def ids(lines: list[dict[str, Any]]) -> list[str]:
    return [line["custom_id"] for line in lines]


def test_batch_gives_one_result_per_line(tmp_path: Path) -> None:
    """Every line of a batch has one result, in the output file or in the error file."""

    async def body(desk: Desk) -> None:
        desk.start()
        lines = requests(30)
        lines[7]["body"]["temperature"] = 9
        content = jsonl(lines)
        batch = await desk.ended(await desk.batch(content, metadata={"a": "b"}))
        assert batch["status"] == "completed" and batch["metadata"] == {"a": "b"}
        assert batch["request_counts"] == {"total": 30, "completed": 29, "failed": 1}
        assert batch["completed_at"] >= batch["in_progress_at"] >= batch["created_at"]
        output = await desk.lines_of(batch["output_file_id"])
        assert ids(output) == [f"r{number}" for number in range(30) if number != 7]
        assert {line["response"]["body"]["choices"][0]["text"] for line in output} == {ANSWER}
        assert {line["response"]["status_code"] for line in output} == {200} and not any(one["error"] for one in output)
        (error,) = await desk.lines_of(batch["error_file_id"])
        assert (error["custom_id"], error["response"]["status_code"]) == ("r7", 400)
        assert error["response"]["body"]["error"]["param"] == "temperature"
        assert (await desk.ask("GET", f"/v1/files/{batch['input_file_id']}/content")).content == content
        listed = (await desk.ask("GET", "/v1/batches")).json()
        assert listed["data"] == [batch] and not listed["has_more"]

    on_desk(body, tmp_path / DB)


@pytest.mark.parametrize(
    ("url", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "prompt": None}),
        ("/v1/responses", {"input": "Hi", "prompt": None, "max_tokens": None, "max_output_tokens": 64}),
    ],
)
def test_batch_line_answers_as_over_http(tmp_path: Path, url: str, body: dict[str, Any]) -> None:
    """A line's answer is the one that its endpoint gives over HTTP."""

    async def test(desk: Desk) -> None:
        desk.start()
        line = request("one", url, **body)
        line["body"] = {name: value for name, value in line["body"].items() if value is not None}
        batch = await desk.ended(await desk.batch(jsonl([line]), endpoint=url))
        (found,) = await desk.lines_of(batch["output_file_id"])
        direct = (await desk.ask("POST", url, json=line["body"])).json()
        assert found["response"]["body"].keys() == direct.keys()
        told = found["response"]["body"].get("choices") or found["response"]["body"]["output"][0]["content"]
        assert told == (direct.get("choices") or direct["output"][0]["content"])

    on_desk(test, tmp_path / DB)


def test_openai_client_runs_a_batch(tmp_path: Path) -> None:
    """OpenAI's client uploads a file, runs a batch and reads the results."""

    async def body(desk: Desk) -> None:
        desk.start()
        desk.site.app = desk.app
        async with served(desk.site) as url:
            client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none")
            file = await client.files.create(file=("in.jsonl", jsonl(requests(3))), purpose="batch")
            assert (file.purpose, file.bytes, file.filename) == ("batch", len(jsonl(requests(3))), "in.jsonl")
            batch = await client.batches.create(
                input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
            )
            async with asyncio.timeout(30):
                while batch.status not in ("completed", "failed"):
                    batch = await client.batches.retrieve(batch.id)
                    await asyncio.sleep(0.01)
            assert batch.status == "completed" and batch.output_file_id is not None
            content = (await client.files.content(batch.output_file_id)).text
            assert ids([json.loads(line) for line in content.splitlines()]) == ["r0", "r1", "r2"]
            assert [one.id async for one in client.batches.list(limit=1)] == [batch.id]
            assert [one.id async for one in client.files.list(purpose="batch")] == [file.id]
            assert (await client.files.delete(file.id)).deleted
            await client.close()

    on_desk(body, tmp_path / DB)


def test_batch_lines_run_in_batch_class(tmp_path: Path) -> None:
    """Lines run in the priority class batch, with the end of the batch as their deadline."""

    async def body(desk: Desk) -> None:
        desk.start()
        batch_id = await desk.batch(jsonl([request("a", priority="interactive", deadline_ms=5)]), KEYS["acme"])
        await desk.ended(batch_id, KEYS["acme"])
        ((submit, _),) = desk.site.cluster.submits
        assert (submit.tenant, submit.priority_class) == ("acme", "batch")
        assert 86_000_000 < submit.deadline_ms <= 86_400_000
        slo = desk.site.gateway.metrics.slo
        assert not [sample for family in slo.collect() for sample in family.samples], "no SLO is missed by waiting"

    on_desk(body, tmp_path / DB, tenants=TENANTS)


# --- kills and restarts ---------------------------------------------------------------------------------------------


def test_killed_gateway_reruns_unfinished_lines(tmp_path: Path) -> None:
    """Lines without a result run again after a kill, and no others do."""

    async def body(desk: Desk) -> None:
        desk.site.cluster.gap_s = 0.01
        desk.start()
        batch_id = await desk.batch(jsonl(requests(40)))
        for least in (5, 15, 25):
            await desk.reached(batch_id, lambda batch, least=least: batch["request_counts"]["completed"] >= least)
            await desk.kill()
            done = (await left(desk))["results"]
            submitted = len(desk.site.cluster.submits)
            desk.restart()
        batch = await desk.ended(batch_id)
        assert batch["request_counts"] == {"total": 40, "completed": 40, "failed": 0}
        assert ids(await desk.lines_of(batch["output_file_id"])) == [f"r{number}" for number in range(40)]
        assert len(desk.site.cluster.submits) - submitted == 40 - done

    on_desk(body, tmp_path / DB)


def test_second_gateway_takes_over_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of two gateways runs the lines, and the other takes over when it is gone."""
    monkeypatch.setattr(runner, "POLL_S", 0.02)

    async def body(desk: Desk) -> None:
        desk.site.cluster.gap_s = 0.01
        store = Store(tmp_path / DB)
        await store.open()
        other = Desk(desk.site, BatchService(store, 1 << 20, 8 << 20, 1000))
        desk.start()
        await asyncio.sleep(0.05)
        other.start()
        batch_id = await other.batch(jsonl(requests(20)))
        await desk.ended(batch_id)
        assert len(desk.site.cluster.submits) == 20
        second = await desk.batch(jsonl(requests(20)))
        await until(lambda: len(desk.site.cluster.submits) > 25)
        await desk.kill()
        assert (await other.ended(second))["request_counts"]["completed"] == 20
        await other.kill()
        await store.close()

    on_desk(body, tmp_path / DB)


def test_line_keeps_its_first_result(tmp_path: Path) -> None:
    """A later result of the same line is not written."""

    async def body(desk: Desk) -> None:
        await desk.batch(jsonl(requests(1)))
        store = desk.service.store
        (batch,) = await store.read(batches.open_batches)
        assert not await store.write(batches.put_result, batch, 1, False, b"too early\n")
        await store.write(batches.start, batch, 1, 0)
        assert await store.write(batches.put_result, batch, 1, False, b"first\n")
        assert not await store.write(batches.put_result, batch, 1, False, b"second\n")
        assert not await store.write(batches.put_result, batch, 1, True, b"third\n")
        await store.write(batches.finish, batch, "completed", 0)
        found = await desk.get(batch.id)
        assert found["request_counts"] == {"total": 1, "completed": 1, "failed": 0} and found["error_file_id"] is None
        assert (await desk.ask("GET", f"/v1/files/{found['output_file_id']}/content")).content == b"first\n"

    on_desk(body, tmp_path / DB)


def test_removed_lock_file_leaves_one_runner(tmp_path: Path) -> None:
    """A lock file that is removed while held lets the next one run, and the first no more."""
    first, second = runner.RunnerLock(str(tmp_path / DB)), runner.RunnerLock(str(tmp_path / DB))
    assert first.take() and not second.take()
    (tmp_path / f"{DB}.lock").unlink()
    assert second.take() and not first.take()
    second.give_up()
    assert first.take()
    first.give_up()


def test_temporarily_refused_lines_run_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines refused because the queue is full run once there is room, after one line has tested it."""
    monkeypatch.setattr(runner, "POLL_S", 0.05)

    async def body(desk: Desk) -> None:
        cluster = desk.site.cluster
        cluster.reject = rejecting(Reject.QUEUE_FULL, 1.0)
        desk.start()
        batch_id = await desk.batch(jsonl(requests(12)))
        await until(lambda: len(cluster.submits) > 8)
        await asyncio.sleep(0.2)
        assert len(cluster.submits) == 9, "8 at once, then one to see whether there is room"
        cluster.reject = lambda submit: None
        batch = await desk.ended(batch_id)
        assert batch["request_counts"] == {"total": 12, "completed": 12, "failed": 0}
        assert len(cluster.submits) == 9 + 12

    on_desk(body, tmp_path / DB)


def test_finally_refused_lines_have_errors(tmp_path: Path) -> None:
    """Lines that are refused for good are in the error file with their status."""

    async def body(desk: Desk) -> None:
        desk.site.cluster.reject = rejecting(Reject.PRIORITY_CLASS)
        desk.start()
        batch = await desk.ended(await desk.batch(jsonl(requests(2))))
        assert batch["status"] == "completed" and batch["request_counts"]["failed"] == 2
        assert batch["output_file_id"] is None
        assert [one["response"]["status_code"] for one in await desk.lines_of(batch["error_file_id"])] == [403, 403]

    on_desk(body, tmp_path / DB)


def test_line_bug_becomes_its_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unexpected exception in one line is a 500 in the error file, and the other lines run."""
    real = runner.answer_offline  # type: ignore[attr-defined]

    async def answer(gateway: Any, tenant: str, endpoint: Any, body: bytes, info: Any, **urgency: Any) -> bytes:
        assert b"Say r1" not in body, "planted"
        return await real(gateway, tenant, endpoint, body, info, **urgency)

    monkeypatch.setattr(runner, "answer_offline", answer)

    async def body(desk: Desk) -> None:
        desk.start()
        batch = await desk.ended(await desk.batch(jsonl(requests(3))))
        (error,) = await desk.lines_of(batch["error_file_id"])
        assert error["custom_id"] == "r1" and error["response"]["status_code"] == 500

    on_desk(body, tmp_path / DB)


def test_cancelled_batch_keeps_its_results(tmp_path: Path) -> None:
    """A cancelled batch ends its streams and keeps the results so far."""

    async def body(desk: Desk) -> None:
        desk.start()
        desk.site.cluster.gap_s = 0.01
        batch_id = await desk.batch(jsonl(requests(40)))
        await until(lambda: len(desk.site.cluster.submits) > 15)
        answer = await desk.ask("POST", f"/v1/batches/{batch_id}/cancel")
        assert answer.json()["status"] == "cancelling"
        batch = await desk.ended(batch_id)
        assert batch["status"] == "cancelled" and batch["cancelled_at"]
        completed = batch["request_counts"]["completed"]
        assert 0 < completed < 40 and len(await desk.lines_of(batch["output_file_id"])) == completed
        await until(lambda: not desk.site.gateway.backend.keeper.streams)
        assert (await desk.ask("POST", f"/v1/batches/{batch_id}/cancel")).json()["error"]["code"] == "batch_has_ended"

    on_desk(body, tmp_path / DB)


def test_unfinished_lines_expire_with_the_batch(tmp_path: Path) -> None:
    """Lines without a result when the window ends are in the error file as batch_expired."""

    async def body(desk: Desk) -> None:
        desk.site.cluster.hold = True
        desk.start()
        batch_id = await desk.batch(jsonl(requests(12)))
        await until(lambda: len(desk.site.cluster.submits) == 8)
        await desk.service.store.write(lambda db: db.execute("UPDATE batches SET expires_s = 5"))
        batch = await desk.ended(batch_id)
        assert batch["status"] == "expired" and batch["request_counts"]["failed"] == 12
        errors = await desk.lines_of(batch["error_file_id"])
        assert ids(errors) == [f"r{number}" for number in range(12)]
        assert {(one["error"]["code"], one["response"]) for one in errors} == {("batch_expired", None)}

    on_desk(body, tmp_path / DB)


# --- what is wrong with lines -----------------------------------------------------------------------------------------


def _without(field: str) -> bytes:
    return json.dumps({name: value for name, value in request("x").items() if name != field}).encode()


WRONG: list[tuple[bytes, str]] = [
    (b"{", "invalid_json_line"),
    (b'{"custom_id": "\xff"}', "invalid_json_line"),
    (b"[]", "invalid_line"),
    (_without("custom_id"), "invalid_line"),
    (_without("body"), "invalid_line"),
    (json.dumps(request("x") | {"more": 1}).encode(), "invalid_line"),
    (json.dumps(request("x") | {"custom_id": 3}).encode(), "invalid_line"),
    (json.dumps(request("")).encode(), "invalid_value"),
    (json.dumps(request("y" * 513)).encode(), "invalid_value"),
    (json.dumps(request("r1")).encode(), "duplicate_custom_id"),
    (json.dumps(request("x") | {"method": "GET"}).encode(), "invalid_method"),
    (json.dumps(request("x", "/v1/embeddings")).encode(), "mismatched_url"),
    (json.dumps(request("x") | {"body": []}).encode(), "invalid_value"),
    (json.dumps(request("x", stream=True)).encode(), "unsupported_parameter"),
    (json.dumps(request("x", model="other")).encode(), "model_not_found"),
    (json.dumps(request("x")).replace('{"model"', "[" * 9000 + '{"model"').encode(), "invalid_json_line"),
]


@pytest.mark.parametrize(("line", "code"), WRONG, ids=[code for _, code in WRONG])
def test_wrong_line_fails_the_batch(tmp_path: Path, line: bytes, code: str) -> None:
    """A batch with a wrong line fails with the line's number and code, and no line runs."""

    async def body(desk: Desk) -> None:
        desk.start()
        batch = await desk.ended(await desk.batch(jsonl(requests(2)) + b"\r\n\n" + line + b"\n"))
        assert batch["status"] == "failed" and batch["failed_at"]
        (error,) = batch["errors"]["data"]
        assert (error["line"], error["code"]) == (5, code)
        assert not desk.site.cluster.submits and batch["output_file_id"] is batch["error_file_id"] is None

    on_desk(body, tmp_path / DB)


def test_errors_of_lines_are_bounded(tmp_path: Path) -> None:
    """A batch lists no more than ERRORS_MAX errors of its lines."""

    async def body(desk: Desk) -> None:
        desk.start()
        batch = await desk.ended(await desk.batch(b"x\n" * 1000))
        assert len(batch["errors"]["data"]) == ERRORS_MAX

    on_desk(body, tmp_path / DB)


def test_crlf_and_bom_are_accepted(tmp_path: Path) -> None:
    """Files with CRLF line ends and a byte order mark run and are kept unchanged."""

    async def body(desk: Desk) -> None:
        desk.start()
        content = b"\xef\xbb\xbf" + jsonl(requests(2)).replace(b"\n", b"\r\n").removesuffix(b"\r\n")
        batch = await desk.ended(await desk.batch(content))
        assert batch["request_counts"]["completed"] == 2
        assert (await desk.ask("GET", f"/v1/files/{batch['input_file_id']}/content")).content == content

    on_desk(body, tmp_path / DB)


# --- bounds and tenants -----------------------------------------------------------------------------------------------


async def left(desk: Desk) -> dict[str, int]:
    """Rows in the store, by table."""
    tables = ("files", "lines", "batches", "results")

    def count(db: sqlite3.Connection) -> dict[str, int]:
        return {name: db.execute(f"SELECT COUNT(*) FROM {name}").fetchone()[0] for name in tables}

    return await desk.service.store.read(count)


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
    tmp_path: Path, ask: Callable[[Desk], Any], status: int, param: str | None
) -> None:
    """A wrong request for a file or batch is refused with its parameter and leaves no rows."""

    async def body(desk: Desk) -> None:
        answer = await ask(desk)
        assert answer.status_code == status, answer.text
        if param is not None:
            assert answer.json()["error"]["param"] == param, answer.text
        assert not any((await left(desk)).values())

    on_desk(body, tmp_path / DB)


def test_tenant_storage_is_bounded(tmp_path: Path) -> None:
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

    on_desk(body, tmp_path / DB, tenant_bytes_max=most)


def test_files_and_batches_are_tenant_private(tmp_path: Path) -> None:
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

    on_desk(body, tmp_path / DB, tenants=TENANTS)


def test_lists_come_in_pages(tmp_path: Path) -> None:
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

    on_desk(body, tmp_path / DB)


def test_needed_file_cannot_be_deleted(tmp_path: Path) -> None:
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

    on_desk(body, tmp_path / DB)


def test_expired_files_are_deleted(tmp_path: Path) -> None:
    """Expired files and uploads cut short are deleted, except those that a batch needs."""

    async def body(desk: Desk) -> None:
        store, day = desk.service.store, 86_400
        needed = await desk.file(jsonl(requests(1)))
        await desk.create(needed)
        soon = (
            await desk.upload(b"1\n", **{"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"})
        ).json()
        assert soon["expires_at"] - soon["created_at"] == 3600
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

    on_desk(body, tmp_path / DB)


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


def test_store_files_are_private(tmp_path: Path) -> None:
    """The store's files have mode 0600."""

    async def body(desk: Desk) -> None:
        await desk.file(b"{}\n")
        modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.glob(f"{DB}*")}  # noqa: ASYNC240
        assert set(modes) >= {DB, f"{DB}-wal"} and set(modes.values()) == {0o600}

    on_desk(body, tmp_path / DB)


@pytest.mark.parametrize("content", [b"\n" * (LINES_MAX - 1) + b"1", b"{}\n" * LINES_MAX, b"[" * (1 << 19)])
def test_large_file_never_blocks_the_loop(tmp_path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the CPU time of the loop's thread in each of its callbacks."""
    slowest: list[float] = []
    run = asyncio.Handle._run

    def timed(self: asyncio.Handle) -> None:
        began = time.thread_time()
        run(self)
        slowest.append(time.thread_time() - began)

    async def body(desk: Desk) -> None:
        desk.start()
        monkeypatch.setattr(asyncio.Handle, "_run", timed)
        async with served(desk.site) as url, httpx.AsyncClient(timeout=60, trust_env=False) as client:
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
        on_desk(on_app, tmp_path / DB, body_bytes_max=1 << 20)
    finally:
        gc.enable()


def test_store_opening_waits_for_its_lock(tmp_path: Path) -> None:
    """Opening the store waits while another gateway holds the lock for opening it."""

    async def body() -> None:
        other = open_lock(tmp_path / f"{DB}.opening")
        fcntl.flock(other, fcntl.LOCK_EX)
        store = Store(tmp_path / DB)
        opening = asyncio.create_task(store.open())
        await asyncio.wait({opening}, timeout=0.3)
        assert not opening.done()
        os.close(other)
        await opening
        await store.close()

    asyncio.run(body())
