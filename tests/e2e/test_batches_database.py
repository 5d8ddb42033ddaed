"""Two gateways over one database: the one that runs a batch is killed, and the other goes on with it."""

import json
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from launcher.local.ports import free_port
from tests.e2e.parts import Parts, parts
from tests.e2e.test_batches import bodies, token_ids, write
from tests.postgres_server import postgres_server, query

COUNT = 24
TAKEOVER_S = 20.0  # The lease, a look of the next gateway, and what a busy machine adds


def begin_gateway(up: Parts, name: str, database: str) -> httpx.Client:
    """A gateway that is ready, and a client of it."""
    up.port = free_port("127.0.0.1")
    up.base_url = f"http://127.0.0.1:{up.port}"
    up.start("gateway", "--database", database, "--batch-lines-max", "4", name=name)
    up.wait_ready()
    return httpx.Client(base_url=up.base_url, timeout=120.0, trust_env=False)


def asked(client: httpx.Client, method: str, path: str, **options: Any) -> Any:
    answer = client.request(method, path, **options)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.timeout(240)
def test_batch_outlives_its_gateway(tiny: Path, tmp_path: Path) -> None:
    """Every line is answered once and as its reference, and the other gateway has file, batch and results."""
    with postgres_server() as server, parts(tiny) as up:
        for role in ("coordinator", "prefill_worker", "decode_worker"):
            up.start(role)
        one = begin_gateway(up, "gateway-one", server.url)
        up.wait_for(
            "it leads", lambda: query(server.url, "SELECT holder FROM batch_lease")[0][0].startswith("gateway-one")
        )
        two = begin_gateway(up, "gateway-two", server.url)
        requests = bodies(up.model_id, COUNT)
        expected = [token_ids(asked(two, "POST", "/v1/completions", json=body)) for body in requests]
        write(tmp_path / "in.jsonl", requests)
        content = (tmp_path / "in.jsonl").read_bytes()
        form = {"files": {"file": ("in.jsonl", content)}, "data": {"purpose": "batch"}}
        file_id = asked(one, "POST", "/v1/files", **form)["id"]
        assert two.get(f"/v1/files/{file_id}/content").content == content
        wanted = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
        path = f"/v1/batches/{asked(one, 'POST', '/v1/batches', json=wanted)['id']}"

        def done() -> int:
            return int(asked(two, "GET", path)["request_counts"]["completed"])

        up.wait_for("it runs", lambda: done() >= 3)
        up.kill("gateway-one")
        killed_at, before = time.monotonic(), done()
        assert before < COUNT, "the batch is too short"
        up.wait_for("the other goes on", lambda: done() > before)
        assert time.monotonic() - killed_at < TAKEOVER_S
        up.wait_for("the batch ends", lambda: asked(two, "GET", path)["status"] == "completed")
        batch = asked(two, "GET", path)
        assert batch["request_counts"] == {"total": COUNT, "completed": COUNT, "failed": 0}
        output = two.get(f"/v1/files/{batch['output_file_id']}/content").text.splitlines()
        lines = [json.loads(line) for line in output]
        assert [line["custom_id"] for line in lines] == [f"request-{number}" for number in range(COUNT)]
        assert [token_ids(line["response"]["body"]) for line in lines] == expected
        assert two.get(f"/v1/files/{file_id}/content").content == content
