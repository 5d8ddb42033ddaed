"""`crossdock tune check`: predictions beside live runs of the same traffic."""

import csv
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import uvloop
from pydantic import ValidationError
from rich.console import Console

from lab.advise import Slo, Workers
from lab.commands.settings import TrafficSettings, TuneCheckSettings, TuneSettings
from lab.commands.traffic import profile_of, traffic
from lab.commands.tune import FORMAT
from lab.commands.verdict import verdict
from lab.goals import Goals
from lab.play.options import RunOptions
from lab.play.outcome import PlayedOutcome
from lab.play.plays import Play, outcome_of
from lab.play.request import Sent
from lab.profile import Profile
from launcher import reports, tables
from launcher.bench.serve import measure, started
from launcher.load import traces
from launcher.load.plan import make_plan
from launcher.load.settings import LoadSettings
from launcher.load.tenants import LoadTenant, Ratio
from launcher.local.lifetime import until_interrupted
from launcher.models import resolve
from runtime.process.exits import INTERRUPTED_EXIT
from runtime.settings.options import SettingsError
from runtime.settings.types import SLO_PERCENTILE

RATIOS_MAX = 3
NOT_HELD = 3  # exit status: another ratio was better live
METRICS = "ttft_ms", "tpot_ms", "e2e_ms"
RANKS = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
RECOMMENDATION_BYTES_MAX = 64 << 20


def run(settings: TuneCheckSettings) -> int:
    report = _read(settings.recommendation)
    tuned = _tuned(report["settings"], settings.recommendation)
    if tuned.cards or tuned.layouts:
        raise SettingsError(f"{settings.recommendation}: of layouts of GPUs; only ratios can be run on this machine")
    profile = profile_of(tuned)
    console = reports.console_for(settings)
    ratios, recommended = _ratios(settings, report), str(report["ranked"][0]["workers"]) if report["ranked"] else ""
    if left_out := _not_played(tuned):
        names = ", ".join(left_out)
        console.print(f"[dim]Neither run live nor part of the prediction: {names}[/dim]", highlight=False)
    return uvloop.run(until_interrupted(_run(settings, tuned, recommended, profile, ratios, console), console))


def _read(path: str) -> dict[str, Any]:
    file = Path(path).expanduser()
    try:
        if file.stat().st_size > RECOMMENDATION_BYTES_MAX:
            raise SettingsError(f"{path}: larger than {RECOMMENDATION_BYTES_MAX} bytes")
        report = msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror}; crossdock tune --out makes one") from None
    except msgspec.DecodeError as error:
        raise SettingsError(f"{path}: not a file of crossdock tune --out: {error}") from None
    if report.get("format") != FORMAT or not isinstance(report.get("settings"), dict) or "ranked" not in report:
        raise SettingsError(f"{path}: not a file of this version's crossdock tune --out")
    return report


def _tuned(values: Mapping[str, Any], path: str) -> TuneSettings:
    """Raises `SettingsError` naming the file."""
    try:
        return TuneSettings(**{key: value for key, value in values.items() if key in TuneSettings.model_fields})
    except ValidationError as error:
        [first, *_] = error.errors()
        raise SettingsError(f"{path}: settings.{'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def _not_played(tuned: TuneSettings) -> list[str]:
    """Returns the options of the recommendation that neither the load generator nor a cluster started here can reproduce."""
    options = {"hit-rate": tuned.hit_rate, "slo": tuned.slo}
    options |= {"step-tokens": tuned.step_tokens, "seqs-max": tuned.seqs_max}
    return [f"--{name}" for name, value in options.items() if value]


def _ratios(settings: TuneCheckSettings, report: Mapping[str, Any]) -> list[Ratio]:
    """Raises `SettingsError`."""
    names = settings.ratios or list(dict.fromkeys(one["workers"] for one in report["ranked"]))
    found = []
    for name in names:
        try:
            found.append(Ratio.parse(name))
        except ValueError as error:
            raise SettingsError(f"{'--ratios' if settings.ratios else settings.recommendation}: {error}") from None
    if not found:
        raise SettingsError("--ratios: needed, since the recommendation has none")
    return found if settings.ratios else found[:RATIOS_MAX]


async def _run(
    settings: TuneCheckSettings,
    tuned: TuneSettings,
    recommended: str,
    profile: Profile,
    ratios: Sequence[Ratio],
    console: Console,
) -> int:
    model = resolve.ready(settings.model, "", console)
    rows: list[dict[str, Any]] = []
    interrupted = False
    with tempfile.TemporaryDirectory(prefix="crossdock-") as folder:
        try:
            load = _load(settings, tuned, Path(folder) / "traffic.csv")
        except SettingsError as error:
            raise SettingsError(f"{settings.recommendation}: its traffic cannot be made again: {error}") from None
        goals = Goals(Slo(tuned.slo_ttft_ms, tuned.slo_tpot_ms, SLO_PERCENTILE))
        for ratio in ratios:
            console.print(f"[bold]{ratio}[/bold]", highlight=False)
            tenants = [LoadTenant("default")]
            async with started(load, ratio, tenants, model, console) as site:
                result = await measure(load, site, "", console)
            context = profile.decode_capacity.context_tokens
            plan = make_plan(load, tenants, min(context, profile.prefill_capacity.context_tokens))
            sent = [Sent(one.due_s, one.prompt_tokens, one.output_tokens) for one in plan.requests]
            workers = Workers(ratio.prefill, ratio.decode, ratio.mixed)
            foretold = outcome_of(Play(profile, workers, sent, RunOptions())).since(load.warmup_s)
            rows.append(compared(str(ratio), foretold, goals, result.figures))
            interrupted = bool(result.about["interrupted"])
            if interrupted:
                break
    if not rows:
        return INTERRUPTED_EXIT
    found = verdict(rows, recommended)
    reports.write_json(settings, {"runs": rows, "verdict": found._asdict()})
    for row in rows:
        show(row, console)
    console.print(f"[bold]{found.words}[/bold]", highlight=False, soft_wrap=True)
    return INTERRUPTED_EXIT if interrupted else 0 if found.held else NOT_HELD


def _load(settings: TuneCheckSettings, tuned: TuneSettings, file: Path) -> LoadSettings:
    """The recommendation's traffic, as a trace for the load generator. Raises `SettingsError`."""
    if tuned.sessions_trace or (tuned.trace and traces.has_sessions(tuned.trace)):
        raise SettingsError("it has sessions, which are not run live here; crossdock bench agents plays them")
    whole = TrafficSettings(**tuned.model_dump(include=set(TrafficSettings.model_fields)))
    with file.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(("arrival_s", "prompt_tokens", "output_tokens"))
        writer.writerows((one.at_s, one.prompt_tokens, one.output_tokens) for one in traffic(whole))
    return LoadSettings(
        trace=str(file),
        speed=settings.speed,
        scale_tokens=settings.scale_tokens,
        duration_s=settings.duration_s,
        slo_ttft_ms=tuned.slo_ttft_ms,
        slo_tpot_ms=tuned.slo_tpot_ms,
        model=settings.model,
        device=settings.device,
        seed=tuned.seed,
        **settings.engine_options(),
    )


def compared(ratio: str, foretold: PlayedOutcome, goals: Goals, figures: Mapping[str, Any]) -> dict[str, Any]:
    good, share = figures["goodput"], foretold.attainment(goals)
    per_s = good["judged"] / figures["seconds"] if figures["seconds"] > 0 else 0.0
    row: dict[str, Any] = {
        "ratio": ratio,
        "requests": figures["requests"],
        "attainment": _pair(share, good["attainment"], absolute=True),
        "goodput_per_s": _pair(per_s * share, good["requests_per_s"]),
    }
    for metric in METRICS:
        if tails := figures["latency"][metric]:
            expected = zip(RANKS, foretold.percentiles(metric, tuple(RANKS.values())), strict=True)
            row[metric] = {rank: _pair(value, tails[rank]) for rank, value in expected}
    return row


def _pair(expected: float, measured: float | None, *, absolute: bool = False) -> dict[str, Any]:
    """Returns a figure's prediction beside its measurement. `error`: of the prediction; in points for a share, else
    relative."""
    error = None
    if measured is not None:
        error = expected - measured if absolute else expected / max(measured, 1e-9) - 1
    return {"predicted": expected, "measured": measured, "error": error}


def show(row: Mapping[str, Any], console: Console) -> None:
    table = tables.Table(f"{row['ratio']}: {row['requests']} requests", "figure", "predicted", "measured", "error")
    one, per_s = row["attainment"], row["goodput_per_s"]
    if one["measured"] is not None:
        shares = (f"{100 * one[name]:.1f} %" for name in ("predicted", "measured"))
        table.row("SLO kept", *shares, f"{100 * one['error']:+.1f} points")
        table.row("goodput", *(f"{per_s[name]:.2f} /s" for name in ("predicted", "measured")), f"{per_s['error']:+.1%}")
    for metric in METRICS:
        for rank, one in row.get(metric, {}).items():
            name = f"{metric.removesuffix('_ms').upper()} {rank}"
            table.row(name, f"{one['predicted']:.1f} ms", f"{one['measured']:.1f} ms", f"{one['error']:+.1%}")
    table.show(console)
