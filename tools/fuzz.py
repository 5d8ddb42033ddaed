"""Fuzz a real cluster's three ports with frames that are almost messages, and the HTTP API with requests made of its own
description."""

import argparse
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from engine.model.loader import load_engine
from proto.messages import Role
from tests import tiny_models
from tests.e2e.parts import Parts, listening, parts
from tests.fuzz_frames import through_a_port, through_the_codec

GROWTH_BYTES_MAX = 96 << 20
WARMING_FRAMES = 2_000
PROMPT, TOKENS = [30, 31, 32], 24
STREAM_MODEL = "fuzz"  # the model of workers that are not real, so that no other requests go to them


@dataclass
class Port:
    name: str
    process: str
    address: str
    roles: tuple[Role, ...]
    model: str
    fingerprint: str = ""

    def throw(self, frames: int, seed: int) -> Counter[str]:
        return through_a_port(
            self.address, frames, seed, roles=self.roles, model=self.model, fingerprint=self.fingerprint
        )


@dataclass
class Outcome:
    name: str
    counts: Counter[str]
    seconds: float
    grown_bytes: int
    served: int  # requests of others, answered rightly meanwhile
    fault: str = ""


def ports_of(up: Parts) -> list[Port]:
    gateway, decode = (listening(up, name) for name in ("gateway", "decode_worker"))
    fingerprint = load_engine(
        str(up.model), device="cpu", dtype="auto", block_size=16, kv_bytes=1 << 24
    ).info.fingerprint
    workers = (Role.PREFILL, Role.DECODE)
    control = (*workers, Role.GATEWAY, Role.OBSERVER)
    return [
        Port("control", "coordinator", up.coordinator, control, STREAM_MODEL),
        Port("token", "gateway", gateway, workers, up.model_id),
        Port("KV", "decode_worker", decode, (Role.PREFILL,), up.model_id, fingerprint),
    ]


def attack(up: Parts, port: Port, frames: int, seed: int, expected: list[int]) -> Outcome:
    """Sends frames to one port while others are served, and looks at what became of the process."""
    process = psutil.Process(up.processes[port.process].pid)
    port.throw(WARMING_FRAMES, seed + 1)
    before, started = process.memory_info().rss, time.monotonic()
    done = threading.Event()
    answers: list[list[int]] = []

    def ask() -> None:
        while not done.is_set():
            answers.append(up.token_ids(PROMPT, TOKENS, ignore_eos=True))

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        counts = port.throw(frames, seed)
    finally:
        done.set()
        asking.join(120)
    seconds = time.monotonic() - started
    faults = []
    if up.processes[port.process].poll() is not None:
        return Outcome(port.name, counts, seconds, 0, len(answers), "the process ended")
    grown = process.memory_info().rss - before
    if grown > GROWTH_BYTES_MAX:
        faults.append("memory grew")
    if asking.is_alive() or not answers or any(answer != expected for answer in answers):
        faults.append("others were not served rightly")
    return Outcome(port.name, counts, seconds, grown, len(answers), ", ".join(faults))


def attack_all(frames: int, seed: int, say: Callable[[str], None]) -> list[Outcome]:
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_models.make("llama", Path(folder) / "tiny-llama")
        with parts(model, kind=Parts) as up:
            up.hears_garbage = True
            for role in ("coordinator", "gateway", "prefill_worker", "decode_worker"):
                up.start(role, "--log-level", "error")
            up.wait_registered(2)
            expected = up.token_ids(PROMPT, TOKENS, ignore_eos=True)
            outcomes = []
            for port in ports_of(up):
                say(f"{port.name} port: {frames:,} frames")
                outcomes.append(attack(up, port, frames, seed, expected))
                if outcomes[-1].fault:
                    say("".join(up.output[-30:]))
            try:
                up.wait_idle()
            except AssertionError:
                outcomes[-1].fault += " blocks or requests were left over"
            return outcomes


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/fuzz", description=__doc__)
    parser.add_argument("--frames", type=int, default=100_000, help="frames for the codec, and for each port")
    parser.add_argument("--requests", type=int, default=2_000, help="HTTP requests of each kind; 0: none")
    parser.add_argument("--seed", type=int, default=6, help="the same seed makes the same frames and requests")
    parser.add_argument(
        "--minutes",
        type=float,
        default=0.0,
        help="instead: cases of all kinds (bodies, grammars, frames, messages to cores in random states) for so long, beside"
        " other tenants' streams. Status 1 if a process ends or grows, an event loop stands still for 250 ms of CPU time, or a"
        " request of others fails.",
    )
    parser.add_argument("--case", type=int, metavar="SEED", help="only the case of --minutes that has this seed")
    parser.add_argument("--log", default="fuzz.jsonl", metavar="FILE", help="where each case of --minutes gets a line")
    asked = parser.parse_args()
    console = Console(highlight=False)
    if asked.minutes or asked.case is not None:
        from tools.attacks.long_fuzz import run

        return run(asked.seed, asked.minutes, asked.case, asked.log, console)
    started = time.monotonic()
    counts = through_the_codec(asked.frames, asked.seed)
    outcomes = [Outcome("codec", counts, time.monotonic() - started, 0, 0)]
    outcomes += attack_all(asked.frames, asked.seed, console.print)
    table = Table(title=f"Frames, seed {asked.seed}", title_justify="left")
    for heading in ("through", "frames", "seconds", "refused", "let in", "memory, MiB", "others served", "fault"):
        table.add_column(heading, justify="left" if heading in ("through", "fault") else "right")
    for one in outcomes:
        refused = one.counts["refused"] + one.counts["Refused"]
        let_in = one.counts["taken"] + one.counts["Welcome"]
        numbers = (asked.frames, round(one.seconds), refused, let_in, one.grown_bytes >> 20, one.served)
        table.add_row(one.name, *(f"{number:,}" for number in numbers), one.fault or "none")
    console.print(table)
    failed = any(one.fault for one in outcomes)
    return 1 if _requests(asked.requests, asked.seed, console) or failed else 0


def _requests(number: int, seed: int, console: Console) -> bool:
    """Whether the API failed."""
    if number == 0:
        return False
    from tests.gateway.api_fuzz import BOTH, fake_server, send_generated_requests

    found: dict[str, Any] = {}
    console.print(f"API: {number:,} requests of each kind")
    try:
        with fake_server() as url:
            found = send_generated_requests(url, seed, number, BOTH)
    except AssertionError as error:
        console.print(f"the API failed: {error}")
        return True
    table = Table(title="Requests by status", title_justify="left")
    table.add_column("kind")
    table.add_column("statuses")
    for name, counts in found.items():
        table.add_row(name, ", ".join(f"{status}: {count:,}" for status, count in sorted(counts.items())))
    console.print(table)
    return False


if __name__ == "__main__":
    sys.exit(main())
