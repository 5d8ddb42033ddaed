"""Files and batches: what clients see, over a fake cluster."""

from pathlib import Path

from tests.gateway.batch_words import Desk, jsonl, on_desk, request


def test_a_batch_runs_and_each_line_has_one_result(tmp_path: Path) -> None:
    async def body(desk: Desk) -> None:
        desk.start()
        lines = [request(f"r{number}") for number in range(30)]
        lines[7]["body"]["temperature"] = 9
        batch = await desk.ended(await desk.batch(jsonl(lines), metadata={"a": "b"}))
        assert batch["status"] == "completed" and batch["metadata"] == {"a": "b"}
        assert batch["request_counts"] == {"total": 30, "completed": 29, "failed": 1}
        output = await desk.lines_of(batch["output_file_id"])
        assert [line["custom_id"] for line in output] == [f"r{number}" for number in range(30) if number != 7]
        assert {line["response"]["body"]["choices"][0]["text"][:4] for line in output} == {"The "}
        (error,) = await desk.lines_of(batch["error_file_id"])
        assert (error["custom_id"], error["response"]["status_code"]) == ("r7", 400)
        assert error["response"]["body"]["error"]["param"] == "temperature"

    on_desk(body, tmp_path / "batches.sqlite")
