"""Files and batches: what clients see, and what the runner does, over a fake cluster."""

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import openai
import pytest

from gateway.batches import batches, runner, sqlite_store
from gateway.batches.lines import ERRORS_MAX
from gateway.batches.store import BatchService
from proto.errors import Reject
from runtime.process import clock
from tests.gateway.batch_words import KEYS, TENANTS, Desk, jsonl, left, on_desk, request, requests, store_at
from tests.gateway.fakes import ANSWER, rejecting, served
from tests.helpers import until

DB = "batches.sqlite"


def ids(lines: list[dict[str, Any]]) -> list[str]:
    return [line["custom_id"] for line in lines]


def test_batch_gives_one_result_per_line(place: Path | str) -> None:
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

    on_desk(body, place)


@pytest.mark.parametrize(
    ("url", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "prompt": None}),
        ("/v1/responses", {"input": "Hi", "prompt": None, "max_tokens": None, "max_output_tokens": 64}),
    ],
)
def test_batch_line_answers_as_over_http(place: Path | str, url: str, body: dict[str, Any]) -> None:
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

    on_desk(test, place)


def test_openai_client_runs_a_batch(place: Path | str) -> None:
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

    on_desk(body, place)


def test_batch_lines_run_in_batch_class(place: Path | str) -> None:
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

    on_desk(body, place, tenants=TENANTS)


# --- kills and restarts ---------------------------------------------------------------------------------------------


def test_killed_gateway_reruns_unfinished_lines(place: Path | str) -> None:
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
        # A write that was under way at the kill may have landed after `done` was read.
        assert len(desk.site.cluster.submits) - submitted <= 40 - done

    on_desk(body, place)


def test_second_gateway_takes_over_batches(place: Path | str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of two gateways runs the lines, and the other takes over when it is gone."""
    monkeypatch.setattr(runner, "POLL_S", 0.02)

    async def body(desk: Desk) -> None:
        desk.site.cluster.gap_s = 0.01
        store = store_at(place)
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

    on_desk(body, place)


def test_line_keeps_its_first_result(place: Path | str) -> None:
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

    on_desk(body, place)


def test_removed_lock_file_leaves_one_runner(tmp_path: Path) -> None:
    """A lock file that is removed while held lets the next one run, and the first no more."""
    first, second = sqlite_store.RunnerLock(str(tmp_path / DB)), sqlite_store.RunnerLock(str(tmp_path / DB))
    assert first.take() and not second.take()
    (tmp_path / f"{DB}.lock").unlink()
    assert second.take() and not first.take()
    second.give_up()
    assert first.take()
    first.give_up()


def test_temporarily_refused_lines_run_later(place: Path | str, monkeypatch: pytest.MonkeyPatch) -> None:
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

    on_desk(body, place)


def test_finally_refused_lines_have_errors(place: Path | str) -> None:
    """Lines that are refused for good are in the error file with their status."""

    async def body(desk: Desk) -> None:
        desk.site.cluster.reject = rejecting(Reject.PRIORITY_CLASS)
        desk.start()
        batch = await desk.ended(await desk.batch(jsonl(requests(2))))
        assert batch["status"] == "completed" and batch["request_counts"]["failed"] == 2
        assert batch["output_file_id"] is None
        assert [one["response"]["status_code"] for one in await desk.lines_of(batch["error_file_id"])] == [403, 403]

    on_desk(body, place)


def test_line_bug_becomes_its_result(place: Path | str, monkeypatch: pytest.MonkeyPatch) -> None:
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

    on_desk(body, place)


def test_cancelled_batch_keeps_its_results(place: Path | str) -> None:
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

    on_desk(body, place)


def test_unfinished_lines_expire_with_the_batch(place: Path | str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines without a result when the window ends are in the error file as batch_expired."""
    monkeypatch.setattr(clock, "SETTLE_S", 0.0)

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

    on_desk(body, place)


def test_clock_jump_deletes_and_expires_nothing(place: Path | str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wall clock that jumps by years while a batch runs neither ends the batch nor deletes a file."""

    async def body(desk: Desk) -> None:
        desk.site.cluster.hold = True
        desk.start()
        kept, batch_id = await desk.file(b"{}\n"), await desk.batch(jsonl(requests(3)))
        await until(lambda: len(desk.site.cluster.submits) == 3)
        monkeypatch.setattr(clock, "unix_time", lambda: time.time() + 1e9)
        await asyncio.sleep(3 * runner.POLL_S)
        assert (await desk.get(batch_id))["status"] == "in_progress"
        assert (await desk.ask("GET", f"/v1/files/{kept}")).status_code == 200

    monkeypatch.setattr(runner, "POLL_S", 0.05)
    on_desk(body, place)


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
def test_wrong_line_fails_the_batch(place: Path | str, line: bytes, code: str) -> None:
    """A batch with a wrong line fails with the line's number and code, and no line runs."""

    async def body(desk: Desk) -> None:
        desk.start()
        batch = await desk.ended(await desk.batch(jsonl(requests(2)) + b"\r\n\n" + line + b"\n"))
        assert batch["status"] == "failed" and batch["failed_at"]
        (error,) = batch["errors"]["data"]
        assert (error["line"], error["code"]) == (5, code)
        assert not desk.site.cluster.submits and batch["output_file_id"] is batch["error_file_id"] is None

    on_desk(body, place)


def test_errors_of_lines_are_bounded(place: Path | str) -> None:
    """A batch lists no more than ERRORS_MAX errors of its lines."""

    async def body(desk: Desk) -> None:
        desk.start()
        batch = await desk.ended(await desk.batch(b"x\n" * 1000))
        assert len(batch["errors"]["data"]) == ERRORS_MAX

    on_desk(body, place)


def test_crlf_and_bom_are_accepted(place: Path | str) -> None:
    """Files with CRLF line ends and a byte order mark run and are kept unchanged."""

    async def body(desk: Desk) -> None:
        desk.start()
        content = b"\xef\xbb\xbf" + jsonl(requests(2)).replace(b"\n", b"\r\n").removesuffix(b"\r\n")
        batch = await desk.ended(await desk.batch(content))
        assert batch["request_counts"]["completed"] == 2
        assert (await desk.ask("GET", f"/v1/files/{batch['input_file_id']}/content")).content == content

    on_desk(body, place)
