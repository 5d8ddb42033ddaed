"""Two gateways over one database: a response that one has made is continued at the other, and after both were restarted."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from launcher.local.ports import free_port
from tests.e2e.parts import Parts, parts
from tests.postgres_server import postgres_server


def ask(up: Parts, port: int, text: str, previous: str | None = None) -> dict[str, Any]:
    body = {
        "model": up.model_id,
        "input": text,
        "max_output_tokens": 8,
        "temperature": 0,
        "previous_response_id": previous,
    }
    answer = httpx.post(f"http://127.0.0.1:{port}/v1/responses", json=body, timeout=60.0, trust_env=False)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def begin_gateways(up: Parts, ports: tuple[int, ...], database: str) -> None:
    for port in ports:
        up.port, up.base_url = port, f"http://127.0.0.1:{port}"
        up.start("gateway", "--database", database, name=f"gateway-{port}")
    up.wait_for("both are registered", lambda: len(up.status().gateways) == 2 and len(up.status().workers) == 2)
    for port in ports:
        up.base_url = f"http://127.0.0.1:{port}"
        up.wait_ready()


@pytest.mark.timeout(180)
def test_response_outlives_its_gateway(tiny: Path) -> None:
    """The continued answer is the same at either gateway, before and after both are killed."""
    with postgres_server() as server, parts(tiny) as up:
        for role in ("coordinator", "prefill_worker", "decode_worker"):
            up.start(role)
        ports = (free_port("127.0.0.1"), free_port("127.0.0.1"))
        begin_gateways(up, ports, server.url)
        first = ask(up, ports[0], "Which city is it?")
        assert ask(up, ports[1], "Why?")["usage"]["input_tokens"] < first["usage"]["total_tokens"]
        before = [ask(up, port, "Why?", first["id"]) for port in ports]
        for port in ports:
            up.kill(f"gateway-{port}")
        begin_gateways(up, ports, server.url)
        after = [ask(up, port, "Why?", first["id"]) for port in ports]
        answers = {one["output"][0]["content"][0]["text"] for one in (*before, *after)}
        prompts = {one["usage"]["input_tokens"] for one in (*before, *after)}
        assert len(answers) == len(prompts) == 1 and prompts.pop() > first["usage"]["total_tokens"]
