"""Traces of a real cluster, at a collector of the test: their parts sum to what the client measured."""

import http.client
import json
import signal
import statistics
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.e2e.collector import Collector, attributes, collector, seconds
from tests.e2e.live import Live, live

REQUESTS = 30
AT_ONCE = 3
PROMPT_TOKENS = 250
UNTIL_FIRST_TOKEN = {"gateway", "cold_start", "queue", "prefill", "deliver"}


@pytest.fixture(scope="module")
def up(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Live, Collector]]:
    with collector() as there:
        options = ("--otlp-endpoint", there.url, "--trace-sample", "0")
        with live(tiny, tmp_path_factory.mktemp("traced"), *options, STEP_TOKENS="64") as cluster:
            yield cluster, there


def ask(
    up: Live, trace_id: str, tokens: int = 8, sampled: bool = True, prompt_tokens: int = PROMPT_TOKENS
) -> tuple[float, dict[str, str]]:
    """Returns the seconds until the client had its first token, and the answer's headers."""
    connection = http.client.HTTPConnection(urlsplit(up.base_url).netloc, timeout=120)
    connection.connect()
    prompt = [(7 * int(trace_id, 16) + n) % 90 + 5 for n in range(prompt_tokens)]
    body = {"model": up.model_id, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "stream": True}
    traceparent = f"00-{trace_id}-00f067aa0ba902b7-0{int(sampled)}"
    started = time.monotonic()
    connection.request(
        "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json", "traceparent": traceparent}
    )
    answer = connection.getresponse()
    answer.readline()
    ttft_s = time.monotonic() - started
    assert answer.status == 200
    assert b"[DONE]" in answer.read()
    connection.close()
    return ttft_s, dict(answer.headers)


def round_trip_s(up: Live) -> float:
    """The seconds of a request that needs no work: on a busy machine mostly the time until each end gets a core."""
    connection = http.client.HTTPConnection(urlsplit(up.base_url).netloc, timeout=120)
    connection.connect()
    started = time.monotonic()
    connection.request("GET", "/health")
    connection.getresponse().read()
    taken_s = time.monotonic() - started
    connection.close()
    return taken_s


def trace(up: tuple[Live, Collector], trace_id: str) -> list[Any]:
    cluster, there = up
    cluster.wait_for(f"trace {trace_id}", lambda: trace_id in there.traces(), 20.0)
    return there.traces()[trace_id]


def root_of(spans: list[Any]) -> Any:
    (root,) = (span for span in spans if "gen_ai.operation.name" in attributes(span))
    return root


def parts_of(spans: list[Any]) -> list[Any]:
    root = root_of(spans)
    found = [span for span in spans if span.parent_span_id == root.span_id]
    return sorted(found, key=lambda span: (span.start_time_unix_nano, span.end_time_unix_nano))


def test_parts_sum_to_clients_ttft(up: tuple[Live, Collector]) -> None:
    """The parts until the first token sum to the trace's TTFT, and that is what the client measured, without the way there and
    back."""
    ids = [f"{number:032x}" for number in range(1, REQUESTS + 1)]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = list(pool.map(lambda one: (round_trip_s(up[0]), *ask(up[0], one)), ids))
    errors = []
    for trace_id, (way_s, client_s, headers) in zip(ids, answers, strict=True):
        spans = trace(up, trace_id)
        root, parts = root_of(spans), parts_of(spans)
        about = attributes(root)
        ttft_s = about["gen_ai.response.time_to_first_chunk"]
        assert sum(seconds(part) for part in parts if part.name in UNTIL_FIRST_TOKEN) == pytest.approx(ttft_s, abs=1e-5)
        assert about["gen_ai.usage.input_tokens"] == PROMPT_TOKENS and about["gen_ai.usage.output_tokens"] == 8
        assert root.parent_span_id.hex() == "00f067aa0ba902b7", "the client's span is its parent"
        (prefill,) = (part for part in parts if part.name == "prefill")
        chunks = [span for span in spans if span.parent_span_id == prefill.span_id]
        assert sum(attributes(chunk)["crossdock.tokens"] for chunk in chunks) == PROMPT_TOKENS
        assert all(part.end_time_unix_nano <= root.end_time_unix_nano for part in parts)
        assert headers["x-crossdock-wait"].startswith("own_queue=")
        errors.append((client_s - ttft_s - way_s) / max(0.001, 0.01 * client_s))
    assert statistics.median(errors) <= 1, f"within 1 ms or 1 %: {errors}"


def test_resumed_request_is_always_traced(up: tuple[Live, Collector]) -> None:
    """A request whose decode worker is killed is traced with both attempts and the pause between, though not sampled."""
    cluster, trace_id = up[0], f"{0xABC:032x}"
    stream = threading.Thread(target=ask, args=(cluster, trace_id, 480, False, 20))
    stream.start()
    cluster.wait_for("it decodes", lambda: cluster.status().running.get("decoding", 0) > 0)
    cluster.one("decode_worker").send_signal(signal.SIGKILL)
    stream.join(120)
    spans = trace(up, trace_id)
    parts = parts_of(spans)
    assert attributes(root_of(spans))["crossdock.attempts"] > 1
    names = [part.name for part in parts]
    assert names[:3] == ["gateway", "queue", "prefill"] and "pause" in names and names.count("queue") > 1
    (pause, *_) = (part for part in parts if part.name == "pause")
    assert seconds(pause) > 0 and attributes(pause)["crossdock.outcome"].startswith("interrupted")
    following = [part for part in parts if part.start_time_unix_nano == pause.end_time_unix_nano and part is not pause]
    assert [part.name for part in following] == ["queue"]


def test_unremarkable_request_is_not_traced(up: tuple[Live, Collector]) -> None:
    """With --trace-sample 0, a request that the client does not sample is not sent, and one that fails is."""
    cluster, there = up
    ask(cluster, f"{0xDEF:032x}", sampled=False)
    ask(cluster, f"{0xDF0:032x}")
    trace(up, f"{0xDF0:032x}")
    assert f"{0xDEF:032x}" not in there.traces()
