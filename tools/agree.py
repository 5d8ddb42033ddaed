"""Compares the load generator's figures with those of another load generator. `scripts/agree_with` starts this.

Both send the same requests (bodies as long, at the same times) to the same server, in turn, several rounds, the order changing
from round to round. The other one is AIPerf (`pip install aiperf`, into an environment of its own); it plays the plan as a
trace with its fixed schedule. Without --url the server is one of known timing, which also tells when it wrote each token.
Another server's own measurements may be read with --metrics.
"""

import asyncio
import json
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import httpx
import uvloop
from prometheus_client.parser import text_string_to_metric_families
from pydantic import Field, model_validator
from rich.console import Console
from rich.table import Table

from launcher.http.client import new_session
from launcher.load import plan as load_plan
from launcher.load import run as load_run
from launcher.load.figures import tails, values
from launcher.load.plan import LoadPlan
from launcher.load.probe import Probed, probe
from launcher.load.prompts import Prompts
from launcher.load.settings import LoadSettings
from launcher.load.tenants import LoadTenant
from launcher.local.lifetime import until_interrupted
from runtime.settings.command_line import run_role
from runtime.settings.options import SettingsError

WITHIN = 0.03
OTHER_S_MAX = 900.0
SERIES = {
    "ttft": "time_to_first_token_seconds",
    "itl": "inter_token_latency_seconds",
    "tpot": "time_per_output_token_seconds",
}
"""The figures that are compared, and their names in servers' metrics."""
SHOWN = ("mean", "p50", "p90", "p95")
Measured = dict[str, list[float]]


class AgreeSettings(LoadSettings):
    """Compare this load generator with AIPerf, on the same server and load; exit status 1 if they differ by over 3 %."""

    url: str = Field("", description="Server, like http://127.0.0.1:8000; empty: one of known timing, started here.")
    api_key: str = Field("", description="Key, if the server wants one.")
    metrics: str = Field(
        "",
        description="URL of the metrics of --url, like http://127.0.0.1:9401/metrics of a gateway: each side's means are then"
        " taken in parts of the server's own, since no two runs find a machine in the same mood. Needs --warmup-s 0.",
    )
    aiperf: str = Field("aiperf", description="The other generator's command.")
    aiperf_tokenizer: str = Field(
        "", description="Folder of a tokenizer, which it wants although it is told all counts."
    )
    rounds: int = Field(3, ge=1, le=100, description="Rounds; each sends the load twice.")

    @model_validator(mode="after")
    def _check_metrics(self) -> Self:
        if self.metrics and (self.warmup_s or not self.url):
            raise ValueError("--metrics: is of --url, and counts every request: say --url and --warmup-s 0")
        return self


@asynccontextmanager
async def timed_server() -> AsyncIterator[str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.launcher.timed_server", stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        port = int(await process.stdout.readline())
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        await process.wait()


async def ours(probed: Probed, plan: LoadPlan, prompts: Prompts, console: Console) -> Measured:
    async with new_session(silence_s=None) as session:
        run = await load_run.drive(session, probed.target, plan.requests, prompts, console)
    bad = [record for record in run.records if record.outcome != "ok"]
    if bad:
        raise SettingsError(f"{len(bad)} requests failed: {bad[0].outcome} {bad[0].detail}")
    counted = [record for record in run.records if record.counted]
    return {"ttft": values(counted, "ttft_ms"), "itl": values(counted, "itl_ms"), "tpot": values(counted, "tpot_ms")}


async def theirs(settings: AgreeSettings, base_url: str, probed: Probed, plan: LoadPlan, prompts: Prompts) -> Measured:
    with TemporaryDirectory(prefix="crossdock-") as folder:
        await asyncio.to_thread(_write_trace, Path(folder) / "trace.jsonl", probed, plan, prompts)
        process = await asyncio.create_subprocess_exec(
            *_arguments(settings, base_url, probed, folder),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            cwd=folder,
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(OTHER_S_MAX):
                said, _ = await process.communicate()
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)  # it has processes of its own
                await process.wait()
        if process.returncode:
            raise SettingsError(f"--aiperf: ended with {process.returncode}:\n{said[-3000:].decode(errors='replace')}")
        return await asyncio.to_thread(_read_export, Path(folder) / "out" / "profile_export.jsonl", plan)


def _arguments(settings: AgreeSettings, base_url: str, probed: Probed, folder: str) -> list[str]:
    """Returns the other generator's arguments. Paths are absolute, since it runs in a folder of its own. Raises
    `SettingsError`."""
    command = shutil.which(settings.aiperf)
    if command is None:
        raise SettingsError(f"--aiperf: there is no command {settings.aiperf}")
    tokenizer = Path(settings.aiperf_tokenizer).expanduser().resolve()
    found = [os.path.abspath(command), "profile", "-m", probed.target.model, "--url", base_url, "--streaming"]
    found += ["--endpoint-type", "completions", "--input-file", f"{folder}/trace.jsonl", "--fixed-schedule"]
    found += ["--custom-dataset-type", "mooncake-trace", "--tokenizer", str(tokenizer)]
    found += ["--use-server-token-count", "--ui", "none", "--no-gpu-telemetry", "--no-server-metrics"]
    found += ["--output-artifact-dir", f"{folder}/out", "--workers-max", "1"]
    return found + (["--api-key", settings.api_key] if settings.api_key else [])


def _write_trace(file: Path, probed: Probed, plan: LoadPlan, prompts: Prompts) -> None:
    with file.open("w") as stream:
        for one in plan.requests:
            payload = json.loads(probed.target.body(one, prompts.make(one)))
            stream.write(json.dumps({"timestamp": 1000 * one.due_s, "payload": payload}) + "\n")


def _read_export(file: Path, plan: LoadPlan) -> Measured:
    """Reads the exported requests, sorted by their times, and leaves out the warm-up here too."""
    found = [json.loads(line) for line in file.read_text().splitlines()]
    found.sort(key=lambda one: one["metadata"]["credit_issued_ns"])
    if len(found) != len(plan.requests) or any(one.get("error") for one in found):
        raise SettingsError(f"--aiperf: {len(found)} of {len(plan.requests)} requests, or some that failed")
    measured: Measured = {"ttft": [], "itl": [], "tpot": []}
    for one, planned in zip(found, plan.requests, strict=True):
        if planned.counted:
            metrics = one["metrics"]
            measured["ttft"].append(metrics["time_to_first_token"]["value"])
            measured["itl"] += metrics.get("inter_chunk_latency", {"value": []})["value"]
            measured["tpot"] += [metrics["inter_token_latency"]["value"]] if "inter_token_latency" in metrics else []
    return measured


async def _agree(settings: AgreeSettings, base_url: str, console: Console) -> int:
    async with new_session(silence_s=None) as session:
        probed = await probe(
            session, base_url, settings.api_key, "", chat=settings.endpoint == "chat", ignore_eos=settings.ignore_eos
        )
    plan = load_plan.make_plan(settings, [LoadTenant("default", settings.api_key)], probed.target.context_tokens)
    rounds: list[dict[str, Measured]] = []
    for number in range(settings.rounds):
        found: dict[str, Measured] = {}
        before = await _own_metrics(settings.metrics)
        for side in ("ours", "theirs") if number % 2 == 0 else ("theirs", "ours"):
            # Equally long, but never the same: otherwise the second generator would find the first one's prompts in the
            # server's cache.
            prompts = replace(probed.prompts(settings, plan), seed=settings.seed * 1000 + 2 * number + (side == "ours"))
            if side == "ours":
                found[side] = await ours(probed, plan, prompts, console)
            else:
                found[side] = await theirs(settings, base_url, probed, plan, prompts)
            if not settings.url:
                found[side + ", server"] = await _truth(base_url, plan)
            elif settings.metrics:
                after = await _own_metrics(settings.metrics)
                found[side + ", server"], before = _means(before, after, len(plan.requests)), after
            means = ", ".join(f"{name} {sum(got) / len(got):.2f}" for name, got in found[side].items())
            console.print(f"round {number + 1}, {side}: mean ms {means}", highlight=False)
        rounds.append(found)
    return 0 if show(rounds, console) else 1


async def _truth(base_url: str, plan: LoadPlan) -> Measured:
    """The figures that the server of known timing itself wrote for the requests of the last run, warm-up left out."""
    async with httpx.AsyncClient(trust_env=False) as client:
        times = (await client.get(f"{base_url}/times", timeout=30.0)).json()
    last = sorted(times[-len(plan.requests) :])
    counted = [one for one, planned in zip(last, plan.requests, strict=True) if planned.counted]
    return {
        "ttft": [1000 * (one[1] - one[0]) for one in counted],
        "itl": [1000 * (later - earlier) for one in counted for earlier, later in pairwise(one[1:])],
        "tpot": [1000 * (one[-1] - one[1]) / (len(one) - 2) for one in counted if len(one) > 2],
    }


async def _own_metrics(url: str) -> dict[str, tuple[float, float]]:
    """Sum in ms and count of what the server measured so far, over all its labels; empty without a URL."""
    if not url:
        return {}
    async with httpx.AsyncClient(trust_env=False) as client:
        page = (await client.get(url, timeout=30.0)).text
    found = dict.fromkeys(SERIES, (0.0, 0.0))
    for sample in (sample for family in text_string_to_metric_families(page) for sample in family.samples):
        for name, series in SERIES.items():
            total, count = found[name]
            if sample.name.endswith(f"{series}_sum"):
                found[name] = total + 1000 * sample.value, count
            elif sample.name.endswith(f"{series}_count"):
                found[name] = total, count + sample.value
    return found


def _means(before: dict[str, tuple[float, float]], after: dict[str, tuple[float, float]], requests: int) -> Measured:
    """Returns the means between two readings. Raises `SettingsError` where other requests came between them."""
    sums = {name: (after[name][0] - before[name][0], after[name][1] - before[name][1]) for name in SERIES}
    if sums["ttft"][1] != requests or not all(count for _, count in sums.values()):
        raise SettingsError(f"--metrics: {sums['ttft'][1]:.0f} first tokens there, and {requests} requests were sent")
    return {name: [total / count] for name, (total, count) in sums.items()}


def show(rounds: Sequence[dict[str, Measured]], console: Console) -> bool:
    """Whether means and medians of all rounds together agree. Where the server's own times are known, each side's times are
    divided by the server's for the same run, because the machine differs from run to run. Where only the server's means are
    known, medians are not judged."""
    known = "ours, server" in rounds[0]
    means_only = known and len(rounds[0]["ours, server"]["ttft"]) == 1
    title = "Ours beside AIPerf, all rounds, ms" + ("; by server: in parts of what it wrote" if known else "")
    columns = ("ours", "theirs", "ratio", *(("ours by server", "theirs by server", "ratio") if known else ()))
    rows = Table("", *columns, "in each round", title=title)
    judged, agree = ("mean",) if means_only else ("mean", "p50"), True
    for name in SERIES:
        for what in SHOWN:
            one, other = (_figure(rounds, side, name, what) for side in ("ours", "theirs"))
            sub_blocks = [f"{one:.2f}", f"{other:.2f}", f"{one / other:.4f}"]
            if known and not (means_only and what != "mean"):
                one /= _figure(rounds, "ours, server", name, what)
                other /= _figure(rounds, "theirs, server", name, what)
                sub_blocks += [f"{one:.4f}", f"{other:.4f}", f"{one / other:.4f}"]
            sub_blocks += [""] * (len(columns) - len(sub_blocks))
            each = [_figure([found], "ours", name, what) / _figure([found], "theirs", name, what) for found in rounds]
            rows.add_row(f"{name.upper()} {what}", *sub_blocks, " ".join(f"{ratio:.3f}" for ratio in each))
            agree = agree and (what not in judged or abs(one / other - 1) <= WITHIN)
    console.print(rows)
    console.print(f"{' and '.join(judged)}: {'agree' if agree else 'do not agree'} within {100 * WITHIN:.0f} %")
    return agree


def _figure(rounds: Sequence[dict[str, Measured]], side: str, name: str, what: str) -> float:
    found: Any = tails([value for one in rounds for value in one[side][name]])
    return float(found[what])


async def _run(settings: AgreeSettings, console: Console) -> int:
    if settings.url:
        return await _agree(settings, settings.url.rstrip("/").removesuffix("/v1"), console)
    async with timed_server() as base_url:
        return await _agree(settings, base_url, console)


def run(settings: AgreeSettings) -> int:
    console = Console(width=140)
    return uvloop.run(until_interrupted(_run(settings, console), console))


def main() -> int:
    return run_role("tools.agree", AgreeSettings, run)


if __name__ == "__main__":
    sys.exit(main())
