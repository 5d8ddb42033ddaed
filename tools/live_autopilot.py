"""The gain of the autopilot on a real cluster of four workers, beside fixed ratios: `scripts/autopilot_gain`."""

import argparse
import asyncio
import csv
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import uvloop
from rich.console import Console
from rich.table import Table

from lab.advise import Slo
from lab.commands import calibrate
from lab.commands.settings import CalibrateSettings
from launcher.bench import serve as bench
from launcher.bench.serve import BenchSite, measure
from launcher.load.records import OK, RequestRecord
from launcher.load.settings import LoadSettings
from launcher.load.tenants import LoadTenant, Ratio
from launcher.local.lifetime import until_interrupted
from launcher.models import resolve as models
from launcher.models.resolve import ReadyModel
from runtime.settings.serve import ServeSettings
from tests import tiny_models
from tests.lab import core_shares
from tests.lab.driving import Phase, arrivals

CONTEXT_TOKENS = 4096


@dataclass
class Outcome:
    """The result of one run."""

    name: str
    asked: list[int]  # requests sent in each phase
    good: list[int]  # those of them that kept both limits
    errors: int = 0
    changes: list[str] = field(default_factory=list)  # role changes, in words

    @property
    def goodput(self) -> int:
        return sum(self.good)


@dataclass(frozen=True)
class Bench:
    arguments: argparse.Namespace
    model: ReadyModel
    profile: str
    folder: Path
    console: Console

    @property
    def slo(self) -> Slo:
        return Slo(self.arguments.slo_ttft_ms, self.arguments.slo_tpot_ms)

    async def run(
        self, ratio: Ratio, phases: Sequence[Phase], name: str, mode: Literal["on", "off"] = "off"
    ) -> Outcome:
        self.console.rule(name, align="left")
        settings = self._load(phases)
        serve: dict[str, Any] = {"port": 0, "prefill": ratio.prefill, "decode": ratio.decode, "autopilot": mode}
        if mode == "on":
            serve |= {"profile": self.profile, "slo_ttft_ms": self.slo.ttft_ms, "slo_tpot_ms": self.slo.tpot_ms}
        cores = os.sched_getaffinity(0)
        running = core_shares.running_with(self.arguments.share)
        async with running(ServeSettings(**serve), self.model, self.console) as up:
            try:
                os.sched_setaffinity(0, up.cluster.plan.control or cores)
                site = BenchSite(up.cluster.base_url, up.cluster.key, (LoadTenant("default"),))
                begin = time.time()
                result = await measure(settings, site, "", self.console)
                log = up.log_dir / "autopilot.log"
                changes = changes_of(await asyncio.to_thread(log.read_text), begin) if mode == "on" else []
            finally:
                os.sched_setaffinity(0, cores)
        found = judged(name, phases, result.requests, self.slo)
        found.changes = changes
        self._say(found)
        if result.about["interrupted"]:
            raise asyncio.CancelledError  # the load took it for the end of its own run
        return found

    def _load(self, phases: Sequence[Phase]) -> LoadSettings:
        trace = self.folder / "trace.csv"
        write_trace(trace, phases, self.arguments.seed)
        seconds = sum(one.seconds for one in phases)
        return LoadSettings(
            trace=str(trace), duration_s=seconds, warmup_s=0.0,
            slo_ttft_ms=self.slo.ttft_ms, slo_tpot_ms=self.slo.tpot_ms,
        )  # fmt: skip

    def _say(self, found: Outcome) -> None:
        shares = ", ".join(f"{good:,} of {asked:,}" for good, asked in zip(found.good, found.asked, strict=True))
        self.console.print(f"{found.name}: within the SLO by phase: {shares}; {found.errors} failed", highlight=False)
        for line in found.changes:
            self.console.print(f"  {line}", highlight=False, soft_wrap=True)


def changes_of(log: str, begin: float) -> list[str]:
    """Returns the changes of roles that the autopilot ordered."""
    found = []
    for line in filter(None, log.splitlines()):
        said = json.loads(line)
        if said.get("event") == "changes a role":
            after_s = datetime.fromisoformat(said["timestamp"]).timestamp() - begin
            found.append(f"{after_s:4.0f} s: {said['worker']} to {said['role']}: {said['why']}")
    return found


def write_trace(file: Path, phases: Sequence[Phase], seed: int) -> None:
    source = random.Random(seed)
    with file.open("w", newline="", encoding="utf-8") as opened:
        writer = csv.writer(opened)
        writer.writerow(("arrival_s", "prompt_tokens", "output_tokens"))
        for at, _, phase in arrivals(phases, seed):
            prompt, output = (
                max(2, round(one * source.uniform(0.5, 1.5))) for one in (phase.prompt_tokens, phase.output_tokens)
            )
            writer.writerow((f"{at:.4f}", prompt, output))


def judged(name: str, phases: Sequence[Phase], records: Sequence[RequestRecord], slo: Slo) -> Outcome:
    """Counts each request in the phase in which it was due."""
    found = Outcome(name, [0] * len(phases), [0] * len(phases))
    ends = [sum(one.seconds for one in phases[: number + 1]) for number in range(len(phases))]
    for record in records:
        phase = next((number for number, end in enumerate(ends) if record.due_s < end), len(phases) - 1)
        found.asked[phase] += 1
        if record.outcome != OK:
            found.errors += 1
        elif (record.ttft_ms or 0.0) <= slo.ttft_ms and (record.tpot_ms or 0.0) <= slo.tpot_ms:
            found.good[phase] += 1
    return found


def show(driven: Outcome, fixed: Sequence[Outcome], oracle: Sequence[Outcome], console: Console) -> None:
    table = Table(title="Requests within the SLO", title_justify="left")
    for heading in ("", "all", "light", "prefill-heavy", "decode-heavy", "failed"):
        table.add_column(heading, justify="right" if heading else "left")
    best = Outcome("oracle", driven.asked, [one.goodput for one in oracle]) if oracle else None
    asked = Outcome("asked", driven.asked, driven.asked)
    for one in (asked, *filter(None, [best]), driven, *fixed):
        table.add_row(one.name, *(f"{number:,}" for number in (one.goodput, *one.good, one.errors)))
    console.print(table)
    top = best.goodput if best is not None else sum(driven.asked)
    words = f"The autopilot: {driven.goodput / top:.1%} of {'the oracle' if best else 'all that was asked'}"
    if fixed:
        words += f", {driven.goodput / max(1, *(one.goodput for one in fixed)):.2f} times the best fixed ratio"
    console.print(words, highlight=False)


async def _compare(
    arguments: argparse.Namespace, begin: Ratio, ratios: Sequence[Ratio], model: str, profile: str, folder: Path,
    console: Console,
) -> int:  # fmt: skip
    phases = (
        Phase(arguments.phase_s / 4, arguments.light, arguments.prompt_tokens, 20),
        Phase(arguments.phase_s, arguments.prefill_heavy, arguments.prompt_tokens, 20),
        Phase(arguments.phase_s, arguments.decode_heavy, 60, arguments.output_tokens),
    )
    made = Bench(arguments, models.ready(model, "", console), profile, folder, console)
    driven = await made.run(begin, phases, f"autopilot, from {begin}", "on")
    fixed = [await made.run(ratio, phases, str(ratio)) for ratio in ratios if not arguments.no_fixed]
    oracle = []
    if arguments.oracle:
        for number, phase in enumerate(phases):
            best = ratios[max(range(len(ratios)), key=lambda at: fixed[at].good[number])]
            oracle.append(await made.run(best, [phase], f"oracle, phase {number + 1}: {best}"))
    show(driven, fixed, oracle, console)
    if arguments.json_out:
        found = {
            "autopilot": asdict(driven),
            "fixed": [asdict(one) for one in fixed],
            "oracle": [asdict(one) for one in oracle],
        }
        await asyncio.to_thread(Path(arguments.json_out).write_text, json.dumps(found, indent=2), encoding="utf-8")
    return 0


def calibrated(arguments: argparse.Namespace, model: str, profile: str) -> int:
    """Calibrates a profile of workers that have such shares of a core and share no cores. Returns the exit status."""
    settings = CalibrateSettings(model=model, out=profile, rounds=2)
    before = bench.running, calibrate.shared_cores  # type: ignore[attr-defined]
    bench.running, calibrate.shared_cores = core_shares.running_with(arguments.share), lambda device: (0, 0)  # type: ignore[attr-defined, assignment]
    try:
        return calibrate.run(settings)
    finally:
        bench.running, calibrate.shared_cores = before  # type: ignore[attr-defined]


def main() -> int:
    made = argparse.ArgumentParser(
        prog="scripts/autopilot_gain",
        description="Traffic that turns from light to prefill-heavy and then to decode-heavy, at four workers of a tiny model:"
        " with the autopilot, and with fixed ratios. Each worker gets a fixed share of a core, by control groups, so that each"
        " adds compute of its own. Needs root, and takes the machine for about an hour.",
    )
    made.add_argument("--share", type=float, default=0.15, help="of a core, for each worker (default 0.15)")
    made.add_argument("--phase-s", type=float, default=300.0, help="length of the two heavy phases (default 300)")
    made.add_argument("--light", type=float, default=1.0, help="requests/s of the first phase (default 1)")
    made.add_argument("--prefill-heavy", type=float, default=8.0, help="requests/s of the second (default 8)")
    made.add_argument("--decode-heavy", type=float, default=18.5, help="requests/s of the third (default 18.5)")
    made.add_argument(
        "--prompt-tokens", type=int, default=1_200, help="of prompts in the first two, on average (default 1200)"
    )
    made.add_argument(
        "--output-tokens", type=int, default=300, help="of answers in the third, on average (default 300)"
    )
    made.add_argument("--slo-ttft-ms", type=float, default=4_000.0, help="limit of TTFT (default 4000)")
    made.add_argument("--slo-tpot-ms", type=float, default=60.0, help="limit of TPOT (default 60)")
    made.add_argument("--begin", default="1P3D", help="ratio that the autopilot begins with (default 1P3D)")
    made.add_argument("--ratios", default="2P2D,3P1D,1P3D", help="fixed ones (default 2P2D,3P1D,1P3D)")
    made.add_argument("--profile", default="", help="of such workers; empty: calibrate first")
    made.add_argument("--keep-profile", default="", metavar="FILE", help="keep what was calibrated there")
    made.add_argument("--no-fixed", action="store_true", help="run the autopilot alone")
    made.add_argument("--oracle", action="store_true", help="run each phase alone, in the ratio that served it best")
    made.add_argument("--seed", type=int, default=1, help="draws arrivals and lengths (default 1)")
    made.add_argument("--json", dest="json_out", default="", metavar="FILE", help="write what was found there")
    arguments = made.parse_args()
    if not 0.001 <= arguments.share <= 1.0:
        made.error("--share: between 0.001 and 1")
    if arguments.oracle and arguments.no_fixed:
        made.error("--oracle: needs the fixed ratios; leave out --no-fixed")
    try:
        begin, *ratios = [Ratio.parse(text) for text in (arguments.begin, *arguments.ratios.split(","))]
    except ValueError as error:
        made.error(f"--begin or --ratios: {error}")
    try:
        core_shares.check()
    except core_shares.NoShares as error:
        made.error(str(error))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    console = Console(width=None if sys.stdout.isatty() else 160)
    with tempfile.TemporaryDirectory(prefix="crossdock-gain-") as name:
        folder = Path(name)
        model = str(tiny_models.make("llama", folder / "tiny", max_position_embeddings=CONTEXT_TOKENS))
        profile = arguments.profile or arguments.keep_profile or str(folder / "profile.json")
        if not arguments.profile and (status := calibrated(arguments, model, profile)):
            return status
        return uvloop.run(
            until_interrupted(_compare(arguments, begin, ratios, model, profile, folder, console), console)
        )


if __name__ == "__main__":
    raise SystemExit(main())
