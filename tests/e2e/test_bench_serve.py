"""`crossdock bench serve` as a user runs it, on a tiny model, ended by itself and by Ctrl-C."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from launcher.load import records as load_records
from tests.e2e.live import Live

LOAD = ["--prompt-tokens", "uniform:10-60", "--output-tokens", "uniform:4-12"]
ROOT = Path(__file__).parents[2]


def bench(cluster: Live, *arguments: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "launcher.cli", "bench", "serve", "--url", cluster.base_url, *LOAD, *arguments]
    environment = {**os.environ, "COLUMNS": "200", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def test_short_load_is_measured(cluster: Live, tmp_path: Path) -> None:
    """A short load gives a record with exact lengths, outcomes and figures."""
    file = tmp_path / "run.json"
    load = ["--rate", "8", "--duration", "5", "--warmup-s", "1", "--cancel-share", "0.2", "--prefix-share", "0.5"]
    process = bench(cluster, *load, "--prefix-tokens", "32", "--json")
    written, said = process.communicate(timeout=300)
    file.write_text(written)
    assert process.returncode == 0, said
    assert "Goodput" in said and "The generator itself fell behind" in said
    run = load_records.read(str(file))
    outcomes = {record.outcome for record in run.requests}
    assert outcomes == {"ok", "cancelled"}, run.figures["error_details"]
    ended = [record for record in run.requests if record.outcome == "ok"]
    assert all(record.prompt_tokens == record.prompt_asked for record in ended), "prompts have their exact lengths"
    assert all(record.tokens == record.output_asked for record in ended), "and so have answers"
    assert any(record.cached_tokens for record in ended), "common prefixes are found in the cache"
    assert all(record.request_id.startswith("cmpl-") for record in ended)
    assert run.about["token_id_prompts"] and not run.about["interrupted"]
    cluster.wait_idle()


def test_ctrl_c_prints_partial_results(cluster: Live, tmp_path: Path) -> None:
    """A load that Ctrl-C ends prints and writes the figures measured so far."""
    file = tmp_path / "run.json"
    ended = sum(cluster.status().finished.values())
    process = bench(cluster, "--rate", "20", "--duration", "600", "--warmup-s", "0", "--json")
    # More than the probe's own, so that the load itself has begun.
    cluster.wait_for("requests ended", lambda: sum(cluster.status().finished.values()) >= ended + 5)
    process.send_signal(signal.SIGINT)
    written, said = process.communicate(timeout=120)
    file.write_text(written)
    assert process.returncode == 130, said
    assert "Latency at the client" in said or "Ended:" in said
    assert load_records.read(str(file)).about["interrupted"]
    cluster.wait_idle()


def test_sessions_are_played_turn_by_turn(cluster: Live) -> None:
    load = ["--sessions", "2", "--turns", "3", "--system-tokens", "40", "--new-tokens", "20", "--output-tokens", "16"]
    command = [
        sys.executable,
        "-m",
        "launcher.cli",
        "bench",
        "agents",
        "--url",
        cluster.base_url,
        "--think-s",
        "0.1",
        *load,
    ]
    environment = {**os.environ, "COLUMNS": "200", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--json"], cwd=ROOT, env=environment, text=True, capture_output=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)["figures"]
    assert (figures["turns"], figures["ok"]) == (6, 6) and figures["turns_per_s"] > 0
    assert figures["ttft_first_ms"]["count"] == 2 and figures["ttft_later_ms"]["count"] == 4
    assert figures["cached_share"] > 0.3, "a turn's prompt begins with the turn before"
    assert "turns/s" in done.stderr
    cluster.wait_idle()
