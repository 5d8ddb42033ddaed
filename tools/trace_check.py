"""`scripts/trace_check`: do the spans of traces account for the time that clients waited, and what does tracing cost?

`parts` sends streams to a real cluster with a tiny model, some of them turns of sessions, and kills decode workers meanwhile.
Each request is traced to a collector here, and its spans are compared with the client's own clock. `cost` compares the CPU time
of a request with and without tracing, in turn. The client is a process of its own and goes before the cluster's processes, as
a client on another machine does.
"""

import argparse
import asyncio
import json
import multiprocessing
import random
import signal
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Thread
from typing import Any, Final
from urllib.parse import urlsplit

import uvloop
from rich.console import Console

from launcher.http.streams import percentile
from tests import tiny_models
from tests.e2e.collector import Collector, attributes, collector, seconds
from tests.e2e.live import Live

CONTEXT: Final = 4096
SIZES: Final = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 8, "head_dim": 64}
NICE: Final = ("nice", "-n", "0", sys.executable, "-m", "launcher.cli")
ANSWER_TOKENS: Final = (8, 64)
PROMPT_TOKENS: Final = (50, 900)
TURNS: Final = 4
SESSION_SHARE: Final = 0.3
TRACES_WAIT_S: Final = 30.0
KILL_EVERY_S: Final = 6.0


@dataclass
class Seen:
    """One stream as its client saw it; seconds of this machine's monotonic clock, and from the request's first byte on."""

    trace_id: str
    turn: int  # of its session; 0: it has none
    sent_at: float
    ttft_s: float = 0.0
    total_s: float = 0.0
    tokens: list[int] = field(default_factory=list)
    fault: str = ""


@dataclass(frozen=True)
class Parts:
    """The figures of one trace, in seconds."""

    seen: Seen
    attempts: int
    until_first: float  # the parts until the first token was written to the client's connection, together
    duration: float  # of the root span
    unattributed: float  # how much of it no part covers
    lead: float  # from the client's first byte to the begin of the root span

    @property
    def error(self) -> float:
        return self.seen.ttft_s - self.until_first

    @property
    def fits(self) -> bool:
        return abs(self.error) <= max(0.001, 0.01 * self.seen.ttft_s)


# --- the client ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Load:
    address: tuple[str, int]
    model: str
    requests: int
    at_once: int
    seed: int
    traced: bool
    answer_tokens: int  # 0: drawn from ANSWER_TOKENS


async def _stream(load: Load, prompt: list[int], tokens: int, seen: Seen, session: str) -> None:
    reader, writer = await asyncio.open_connection(*load.address, limit=1 << 20)
    body = {"model": load.model, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "stream": True}
    encoded = json.dumps(body | {"temperature": 0, "return_token_ids": True, "service_tier": "flex"}).encode()
    lines = [
        "POST /v1/completions HTTP/1.1", "Host: localhost", "Content-Type: application/json", "Connection: close",
        f"Content-Length: {len(encoded)}",
        *([f"traceparent: 00-{seen.trace_id}-00f067aa0ba902b7-01"] if load.traced else ()),
        *([f"X-Session-Id: {session}"] if session else ()),
    ]  # fmt: skip
    seen.sent_at = time.monotonic()
    writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + encoded)
    answer = b""
    while b"data: " not in answer and (part := await reader.read(1 << 16)):
        answer += part
    seen.ttft_s = time.monotonic() - seen.sent_at
    while part := await reader.read(1 << 16):
        answer += part
    seen.total_s = time.monotonic() - seen.sent_at
    writer.close()
    if b"data: [DONE]" not in answer:
        seen.fault = answer[:500].decode(errors="replace")
    for line in answer.split(b"\n"):
        if line.startswith(b"data: {"):
            for choice in json.loads(line[6:]).get("choices", ()):
                seen.tokens += choice.get("token_ids") or ()


async def _client(load: Load) -> list[Seen]:
    rng = random.Random(load.seed)
    found: list[Seen] = []

    async def one(prompt: list[int], turn: int = 0, session: str = "") -> Seen:
        seen = Seen(f"{rng.getrandbits(127) + 1:032x}", turn, 0.0)
        found.append(seen)
        await _stream(load, prompt, load.answer_tokens or rng.randint(*ANSWER_TOKENS), seen, session)
        return seen

    async def works() -> None:
        while len(found) < load.requests:
            prompt = [rng.randrange(10, 250) for _ in range(rng.randint(*PROMPT_TOKENS))]
            if rng.random() > SESSION_SHARE / TURNS:
                await one(prompt)
                continue
            session = f"s{rng.getrandbits(60)}"
            for turn in range(1, TURNS + 1):
                prompt += (await one(prompt, turn, session)).tokens + [rng.randrange(10, 250) for _ in range(40)]

    await asyncio.gather(*(works() for _ in range(load.at_once)))
    return found


def _run_client(into: Any, load: Load) -> None:
    into.send(uvloop.run(_client(load)))


def drive(up: Live, requests: int, at_once: int, seed: int, traced: bool = True, answer_tokens: int = 0) -> list[Seen]:
    """Send so many requests, or a few more, from a process of its own, and return each as its client saw it."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    load = Load(
        ("127.0.0.1", urlsplit(up.base_url).port or 0), up.model_id, requests, at_once, seed, traced, answer_tokens
    )
    child = spawn.Process(target=_run_client, args=(theirs, load))
    child.start()
    theirs.close()
    found: list[Seen] = ours.recv()
    child.join()
    return found


# --- spans beside the client --------------------------------------------------------------------------------------------


def parts_of(seen: Seen, spans: list[Any]) -> Parts:
    """Raises `ValueError` where the trace has no root span."""
    (root,) = (span for span in spans if "gen_ai.operation.name" in attributes(span))
    parts = [span for span in spans if span.parent_span_id == root.span_id]
    delivered = min((part.end_time_unix_nano for part in parts if part.name == "deliver"), default=0)
    offset_s = time.time() - time.monotonic()
    return Parts(
        seen,
        int(attributes(root)["crossdock.attempts"]),
        _covered((p.start_time_unix_nano, min(p.end_time_unix_nano, delivered)) for p in parts),
        seconds(root),
        seconds(root) - _covered((part.start_time_unix_nano, part.end_time_unix_nano) for part in parts),
        root.start_time_unix_nano / 1e9 - offset_s - seen.sent_at,
    )


def _covered(intervals: Any) -> float:
    """The seconds that any of the intervals, in nanoseconds, has."""
    total = until = 0
    for start, end in sorted(intervals):
        total += max(0, end - max(start, until))
        until = max(until, end)
    return total / 1e9


def _killing(up: Live, enough: Event, kills: int) -> Iterator[None]:
    for _ in range(kills):
        if enough.wait(KILL_EVERY_S):
            return
        workers = up.processes()["decode_worker"]
        if len(workers) > 1:
            workers[0].send_signal(signal.SIGKILL)
            yield


def parts(model: Path, home: Path, requests: int, at_once: int, kills: int, seed: int) -> list[Parts]:
    """Traces of all requests beside what their clients saw. Raises `AssertionError` for a stream that failed or has none."""
    with ExitStack() as stack:
        there: Collector = stack.enter_context(collector())
        options = ("--decode", "2", "--otlp-endpoint", there.url, "--trace-sample", "0")
        up = Live(model, home, *options, command=NICE)
        stack.callback(up.stop)
        drive(up, 20, at_once, seed + 1)  # so that step times are known
        enough = Event()
        killer = Thread(target=lambda: list(_killing(up, enough, kills)))
        killer.start()
        seen = drive(up, requests, at_once, seed)
        enough.set()
        killer.join()
        assert not (faults := [one.fault for one in seen if one.fault]), faults
        wanted = {one.trace_id for one in seen}
        up.wait_for("all traces", lambda: wanted <= there.traces().keys(), TRACES_WAIT_S)
        time.sleep(1.0)  # spans of one trace may come in two messages
        traces = there.traces()
    return [parts_of(one, traces[one.trace_id]) for one in seen]


def show(found: list[Parts], console: Console) -> None:
    kinds = {
        "all": found,
        "resumed": [one for one in found if one.attempts > 1],
        "later turns of sessions": [one for one in found if one.seen.turn > 1],
    }
    for name, some in kinds.items():
        if not some:
            continue
        errors = sorted(1000 * one.error for one in some)
        shares = sorted(100 * one.unattributed / one.duration for one in some)
        ttft = statistics.median(1000 * one.seen.ttft_s for one in some)
        leads = sorted(1000 * one.lead for one in some)
        fitting = sum(one.fits for one in some) / len(some)
        console.print(
            f"{name}: {len(some):,}; TTFT p50 {ttft:.0f} ms. Client's TTFT less its parts: {_spread(errors)} ms,"
            f" {fitting:.1%} within 1 ms or 1 %; of it before the trace begins: {_spread(leads)} ms."
            f" Unattributed: {_spread(shares)} %",
            highlight=False,
            soft_wrap=True,
        )


def _spread(values: list[float]) -> str:
    figures = (percentile(values, share) for share in (0.5, 0.9, 0.99))
    return "p50/p90/p99/max " + " / ".join(f"{value:.2f}" for value in (*figures, values[-1]))


# --- the cost -----------------------------------------------------------------------------------------------------------


def _cpu_s(up: Live) -> dict[str, float]:
    found: dict[str, float] = {}
    for role, processes in up.processes().items():
        found[role] = sum(sum(one.cpu_times()[:2]) for one in processes)
    return found


def cost(
    model: Path, home: Path, requests: int, at_once: int, rounds: int, answer_tokens: int, console: Console
) -> None:
    """Prints milliseconds of CPU per request and requests/s: without tracing, at the usual sample, and with all traced."""
    samples = {"off": "", "0.01": "0.01", "1": "1"}
    figures: dict[str, list[tuple[float, float, dict[str, float]]]] = {name: [] for name in samples}
    with ExitStack() as stack:
        there = stack.enter_context(collector())
        ups = {}
        for name, share in samples.items():
            options = ("--otlp-endpoint", there.url, "--trace-sample", share) if share else ()
            ups[name] = Live(model, home / name, *options, command=NICE)
            stack.callback(ups[name].stop)
            drive(ups[name], 20, at_once, 1, traced=False)
        for number in range(rounds):
            for name in (*samples, *samples)[number % 3 :][:3]:
                before, began = _cpu_s(ups[name]), time.monotonic()
                drive(ups[name], requests, at_once, number, False, answer_tokens)
                took_s, after = time.monotonic() - began, _cpu_s(ups[name])
                spent = {role: 1000 * (after[role] - before[role]) / requests for role in after}
                figures[name].append((sum(spent.values()), requests / took_s, spent))
                there.spans.clear()
        for role, processes in ups["off"].processes().items():
            mib = sum(one.memory_info().rss for one in processes) / (1 << 20)
            console.print(f"{role}: {len(processes)}, {mib:.0f} MiB", highlight=False)
    base = [total for total, _, _ in figures["off"]]
    for name, rows in figures.items():
        roles = {role: statistics.median(row[2][role] for row in rows) for role in rows[0][2]}
        by_role = ", ".join(f"{role} {ms:.2f}" for role, ms in roles.items())
        ratios = sorted(row[0] / one for row, one in zip(rows, base, strict=True))
        console.print(
            f"sample {name}: {statistics.median(row[0] for row in rows):.2f} ms of CPU a request ({by_role}),"
            f" {statistics.median(ratios):.3f} of that without tracing ({ratios[0]:.3f} to {ratios[-1]:.3f});"
            f" {statistics.median(row[1] for row in rows):.1f} requests/s",
            highlight=False,
            soft_wrap=True,
        )


def main() -> int:
    parser = argparse.ArgumentParser(prog="trace_check", description=__doc__)
    parser.add_argument("what", choices=("parts", "cost"))
    parser.add_argument("--requests", type=int, default=1000, help="of cost: of each round")
    parser.add_argument("--at-once", type=int, default=6, help="streams at the same time")
    parser.add_argument("--kills", type=int, default=6, help="of parts: decode workers that are killed")
    parser.add_argument("--rounds", type=int, default=3, help="of cost")
    parser.add_argument("--answer-tokens", type=int, default=0, help="of cost; 0: 8 to 64, at random")
    parser.add_argument("--seed", type=int, default=1)
    said = parser.parse_args()
    console = Console()
    with TemporaryDirectory() as folder:
        model = tiny_models.make("llama", Path(folder, "tiny"), max_position_embeddings=CONTEXT, **SIZES)
        if said.what == "parts":
            show(parts(model, Path(folder), said.requests, said.at_once, said.kills, said.seed), console)
        else:
            cost(model, Path(folder), said.requests, said.at_once, said.rounds, said.answer_tokens, console)
    return 0


if __name__ == "__main__":
    sys.exit(main())
