"""A batch through kills of every kind of process and restarts of the whole cluster: each result once, equal to its reference.
40 requests, two kills and one restart here; 500, ten and two take minutes."""

import itertools
import json
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.live import ROLES, Live, at_once, live

TOKENS = 160
SETTINGS = {"HEARTBEAT_MS": "300", "STEP_TOKENS": "64", "BATCH_LINES_MAX": "4"}


def bodies(model_id: str, count: int) -> list[dict[str, Any]]:
    """Greedy requests, and every third one with a seed."""
    made = []
    for number in range(count):
        drawn = {"temperature": 1.0, "seed": number} if number % 3 == 0 else {"temperature": 0}
        prompt = [1 + (number * 7 + place) % 90 for place in range(5 + number % 40)]
        made.append(
            {
                "model": model_id,
                "prompt": prompt,
                "max_tokens": TOKENS,
                "return_token_ids": True,
                "ignore_eos": True,
                **drawn,
            }
        )
    return made


def write(path: Path, requests: list[dict[str, Any]]) -> None:
    lines = (
        {"custom_id": f"request-{number}", "method": "POST", "url": "/v1/completions", "body": body}
        for number, body in enumerate(requests)
    )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def token_ids(body: dict[str, Any]) -> list[int]:
    ids: list[int] = body["choices"][0]["token_ids"]
    return ids


def answered(store: Path) -> tuple[int, bool]:
    """Results that are written, and whether the batch has ended: from the file, since no gateway may be up."""
    with closing(sqlite3.connect(f"file:{store}?mode=ro", uri=True, timeout=10)) as db:
        return db.execute("SELECT completed + failed, ended_s IS NOT NULL FROM batches").fetchone() or (0, False)


class Trial:
    def __init__(self, model: Path, home: Path, count: int, kills: int, restarts: int) -> None:
        self.home = home
        self.store = home / "batches.sqlite"
        self.start: Callable[[], Live] = lambda: Live(
            model,
            home,
            "--gateways",
            "2",
            "--batch-db",
            str(self.store),
            **SETTINGS,  # type: ignore[arg-type]
        )
        self.count, self.kills, self.restarts = count, kills, restarts
        self.up = self.start()

    def run(self) -> None:
        requests = bodies(self.up.model_id, self.count)
        expected = [token_ids(body) for body in at_once(self._ask, requests)]
        self.up.wait_idle()
        write(self.home / "in.jsonl", requests)
        batch_id = self._create()
        between = self.kills // (self.restarts + 1)
        roles = itertools.cycle(ROLES)
        for number in range(self.kills + self.restarts):
            self._wait(number * self.count // (self.kills + self.restarts + 1) + 1)
            assert not answered(self.store)[1], "the batch is too short for so many kills"
            if number % (between + 1) == between:
                self._restart(signal.SIGKILL if number > between else signal.SIGINT)
            else:
                role = next(roles)
                self.up.wait_for(f"a {role}", partial(self._kill, role))
        self.up.wait_for("the batch ends", lambda: answered(self.store)[1], 400)
        self.up.wait_ready()
        self._check(batch_id, expected)

    def _ask(self, body: dict[str, Any]) -> dict[str, Any]:
        answer = httpx.post(f"{self.up.base_url}/v1/completions", json=body, timeout=120.0, trust_env=False)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def _create(self) -> str:
        with httpx.Client(base_url=self.up.base_url, timeout=60.0, trust_env=False) as client:
            file = client.post(
                "/v1/files",
                files={"file": ("in.jsonl", (self.home / "in.jsonl").read_bytes())},
                data={"purpose": "batch"},
            )
            asked = {"input_file_id": file.json()["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
            return str(client.post("/v1/batches", json=asked).json()["id"])

    def _wait(self, results: int) -> None:
        self.up.wait_for(f"{results} results", lambda: answered(self.store)[0] >= results, 200)

    def _kill(self, role: str) -> bool:
        victims = self.up.processes()[role]
        for victim in victims[:1]:
            victim.send_signal(signal.SIGKILL)
        return bool(victims)

    def _restart(self, number: signal.Signals) -> None:
        self.up.stop(number)
        self.up = self.start()

    def _check(self, batch_id: str, expected: list[list[int]]) -> None:
        with httpx.Client(base_url=self.up.base_url, timeout=60.0, trust_env=False) as client:
            batch = client.get(f"/v1/batches/{batch_id}").json()
            assert batch["status"] == "completed", batch
            assert batch["request_counts"] == {"total": self.count, "completed": self.count, "failed": 0}
            lines = client.get(f"/v1/files/{batch['output_file_id']}/content").text.splitlines()
        found = [json.loads(line) for line in lines]
        assert [line["custom_id"] for line in found] == [f"request-{number}" for number in range(self.count)]
        wrong = [
            line["custom_id"]
            for line, ids in zip(found, expected, strict=True)
            if token_ids(line["response"]["body"]) != ids
        ]
        assert not wrong


def through(model: Path, home: Path, count: int, kills: int, restarts: int) -> None:
    trial = Trial(model, home, count, kills, restarts)
    try:
        trial.run()
    finally:
        trial.up.stop()


@pytest.mark.long
def test_batch_results_survive_kills(tiny: Path, tmp_path: Path) -> None:
    """Each request of a batch job gets one result through kills and a restart."""
    through(tiny, tmp_path, 40, 2, 1)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_large_batch_survives_kills(tiny: Path, tmp_path: Path) -> None:
    """A batch job of 500 requests gets one result each through ten kills and two restarts."""
    through(tiny, tmp_path, 500, 10, 2)


@pytest.fixture(scope="module")
def up(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    with live(tiny, tmp_path_factory.mktemp("state"), **SETTINGS) as cluster:
        yield cluster


def command(up: Live, *arguments: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "launcher.cli", "batch", "run", *arguments, "--url", up.base_url],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_batch_command_names_failed_lines(up: Live, tmp_path: Path) -> None:
    """The batch command writes results and errors to files and names the lines that failed."""
    requests = bodies(up.model_id, 6)
    requests[3]["temperature"] = 9
    write(tmp_path / "in.jsonl", requests)
    running = command(up, str(tmp_path / "in.jsonl"))
    said, _ = running.communicate(timeout=120)
    assert running.returncode == 1, said
    assert (
        f"{tmp_path}/in.jsonl:4: request-3: " in said
        and "'temperature'" in said
        and "5 of 6 answered, 1 failed" in said
    )
    lines = (tmp_path / "in.results.jsonl").read_text().splitlines()
    assert [json.loads(line)["custom_id"] for line in lines] == [f"request-{n}" for n in (0, 1, 2, 4, 5)]
    assert len((tmp_path / "in.errors.jsonl").read_text().splitlines()) == 1


def test_wrong_batch_line_is_named_first(up: Live, tmp_path: Path) -> None:
    """A wrong line of a batch file is named before any request is sent."""
    path = tmp_path / "in.jsonl"
    write(path, bodies(up.model_id, 2))
    path.write_text(path.read_text() + "\n{}\n")
    running = command(up, str(path))
    said, _ = running.communicate(timeout=60)
    assert running.returncode == 1 and f"{path}:4: " in said and "custom_id" in said


@pytest.mark.parametrize("cancel", [False, True])
def test_ctrl_c_leaves_or_cancels_batch(up: Live, tmp_path: Path, cancel: bool) -> None:
    """Ctrl-C leaves the batch job running, or cancels it with --cancel."""
    path = tmp_path / "in.jsonl"
    write(path, [body | {"max_tokens": 400 if cancel else 100} for body in bodies(up.model_id, 200)])
    running = command(up, str(path), *(["--cancel"] if cancel else []))
    assert running.stdout is not None
    batch_id = next(line for line in running.stdout if line.startswith("Batch ")).split()[1]
    url = f"{up.base_url}/v1/batches/{batch_id}"
    up.wait_for("it runs", lambda: httpx.get(url, trust_env=False).json()["request_counts"]["completed"] > 3)
    running.send_signal(signal.SIGINT)
    said = running.stdout.read()
    assert running.wait(60) == 130, said
    if cancel:
        assert httpx.get(url, trust_env=False).json()["status"] == "cancelled"
        assert "Cancelled: " in said and len((tmp_path / "in.results.jsonl").read_text().splitlines()) > 3
        return
    assert f"--resume {batch_id}" in said
    resumed = command(up, str(path), "--resume", batch_id)
    said, _ = resumed.communicate(timeout=300)
    assert resumed.returncode == 0 and "200 of 200 answered" in said, said
