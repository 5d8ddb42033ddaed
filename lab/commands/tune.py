"""`crossdock tune`: which workers serve a traffic best, on the terminal, as JSON and as a page."""

import contextlib
import math
import multiprocessing
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from lab.advise import Slo
from lab.commands import cards, page, show
from lab.commands.profiles.show import error_words
from lab.commands.settings import TuneSettings, parse_slos
from lab.commands.traffic import TuneTraffic, block_tokens, context_tokens, fitted_traffic, profile_of
from lab.goals import Goals
from lab.layouts import cards_enough, cluster_toml, context_kept
from lab.play.options import RunOptions
from lab.play.outcome import PlayedOutcome
from lab.play.plays import Each
from lab.play.request import Sent
from lab.profile import ControlCost, Profile
from lab.search import FULL, QUICK, Candidate, Effort, Found, Scored, Space, search
from lab.traffic import per_minute, summary
from launcher import reports
from proto.parts import STALL_SHARE
from runtime.process.version import version_of
from runtime.settings.options import SettingsError
from runtime.settings.types import SLO_PERCENTILE

FORMAT = 4
POOL_REQUESTS = 5_000  # to be played, from which on starting processes for all cores saves time
ORIGINS = {
    "calibrated": "The profile was measured {}; runs differ by {}.",
    "estimated": "The profile is an estimate {}, {}.",
    "from a server": "The profile was fitted to requests of another server {}; times differ by {}.",
}
PROFILE_DAYS = 30  # a younger profile is shown without its age


def run(settings: TuneSettings) -> int:
    for path, option in ((settings.out, "--out"), (settings.html, "--html")):
        reports.check_writable(path, option)
    console = reports.console_for(settings)
    kinds: Mapping[int, Profile] = {}
    if cards.is_asked(settings):
        kinds = cards.profiles_of(settings)
        settings = settings.model_copy(update={"workers": cards.budget_of(settings)})
    profile = cards.widest(kinds) if kinds else profile_of(settings)
    goals = goals_of(settings)
    report = report_of(settings, profile, goals, console, kinds)
    written = {settings.out: encoded(report), settings.html: page.rendered(report) if settings.html else ""}
    for path, text in written.items():
        if path:  # before anything is printed, because the reader of the output may go away
            Path(path).expanduser().write_text(text, encoding="utf-8")
    show.show(report, console)
    for path in filter(None, written):
        console.print(f"Written: {path}", highlight=False, soft_wrap=True)
    reports.write_json(settings, report)
    return 0


def goals_of(settings: TuneSettings) -> Goals:
    return parse_slos(settings.slo, Slo(settings.slo_ttft_ms, settings.slo_tpot_ms, SLO_PERCENTILE))


def check_classes(goals: Goals, sent: Sequence[Sent]) -> None:
    """Raises `SettingsError`."""
    classes = {one.priority for one in sent}
    if unknown := goals.by_class.keys() - classes:
        raise SettingsError(
            f"--slo: no request is of the class {min(unknown)}; the classes of this traffic: {', '.join(sorted(classes))}"
        )


def encoded(report: Mapping[str, Any]) -> str:
    return msgspec.json.format(msgspec.json.encode(report), indent=1).decode() + "\n"


def own_hardware(profile: Profile) -> Profile:
    """Returns the profile for workers that each have hardware of their own, equal to one worker's here, and take nothing from
    the others."""
    return profile.replaced(
        prefill_cores=0, decode_cores=0, beside_decode=1.0, beside_prefill=1.0, beside_mixed=1.0, control=ControlCost()
    )


def usual_stall_share(profile: Profile) -> float:
    """Returns the default stall share of workers: on GPUs they compute no prompts beside streams."""
    return STALL_SHARE if profile.about.get("device") == "cpu" else 0.0


def caveats(settings: TuneSettings, profile: Profile, played: TuneTraffic, context: str) -> list[str]:
    """Returns notes about facts that are not in the answer and could change it. `context`: that bounds requests, in words."""
    found, cores = [], profile.prefill_cores + profile.decode_cores
    requests = len(played.sent)
    if played.cut:
        found.append(f"{played.cut:,} of {requests:,} requests were made shorter, to fit {context}.")
    if played.left_out:
        found.append(
            f"{played.left_out:,} turns are left out, beside {requests:,} that are played: prompts of their sessions had grown"
            f" beyond {context}."
        )
    if 0 < cores < settings.workers:
        found.append(
            f"All workers are taken to be on one host like the profile's, where they share {cores} cores; more than {cores}"
            " mixed ones are left out. For hardware where each worker has its own: --own-hardware."
        )
    if settings.own_hardware:
        found.append("Each worker is taken to have hardware of its own, and to take nothing from the others.")
    if settings.hit_rate:
        found.append(f"{settings.hit_rate:.0%} of each prompt is taken to be cached (--hit-rate).")
    if settings.prefill_profile:
        found.append("Prefill and decode workers are of different hardware, so none is mixed; each has its own.")
    return found + [line for one in sources_of(profile) if (line := source(one, profile))]


def context_words(profile: Profile) -> str:
    """Returns the context that bounds the requests: the model's, or what the largest workers of cards have memory for."""
    context, cards = context_tokens(profile), profile.about.get("cards", 0)
    if not cards or not context_kept(profile, 0):
        return f"the model's context of {context:,} tokens"
    return f"a context of {context:,} tokens: the largest workers here, of {cards} card{'s' * (cards > 1)}, hold two of those"


def sources_of(profile: Profile) -> list[Mapping[str, Any]]:
    """Returns the source of each kind of hardware in the profile, as `Profile.about`."""
    about = profile.about
    return [about["prefill"], about["decode"]] if "prefill" in about else [about]


def source(about: Mapping[str, Any], profile: Profile) -> str:
    """Where a profile comes from, in a sentence."""
    made = [f"of {about['model']}"] if about.get("model") else []
    made += [f"on {cpu}"] if (cpu := about.get("machine", {}).get("cpu")) else []
    made += [f"{days} days ago"] if (days := _age_days(about.get("when", ""))) > PROFILE_DAYS else []
    if not made:
        return ""
    origin = about.get("origin", profile.origin)
    return ORIGINS[origin].format(", ".join(made), error_words(about, profile))


def _age_days(when: str) -> int:
    try:
        measured = datetime.fromisoformat(when)
    except ValueError:
        return 0
    return (datetime.now(measured.tzinfo) - measured).days


def searched(
    settings: TuneSettings,
    profile: Profile,
    goals: Goals,
    sent: Sequence[Sent],
    console: Console,
    kinds: Mapping[int, Profile],
) -> tuple[Found, Profile]:
    """Returns what was found, and the profile of the recommended workers."""
    space = Space(
        settings.workers,
        (settings.mixed or settings.workers == 1) and not settings.prefill_profile,
        tuple(settings.step_tokens or [profile.step_tokens]),
        tuple(settings.seqs_max or [0]),
        mixed_max=profile.prefill_cores + profile.decode_cores,
    )
    if kinds:
        space = cards.space_of(settings, space, kinds, sent)
    options = RunOptions(
        hit_rate=settings.hit_rate, block_tokens=block_tokens(settings), stall_share=usual_stall_share(profile)
    )
    effort = QUICK if settings.quick else FULL
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with (
        Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar,
        on_all_cores(len(space.candidates()), len(sent), effort) as each,
    ):
        task = bar.add_task("playing", total=None)

        def tell(what: str, done: int, of: int) -> None:
            bar.update(task, description=what, completed=done, total=of)

        found = search(profile, sent, goals, space, options, effort=effort, each=each, tell=tell, seed=settings.seed)
    return found, space.profile_of(profile, found.best.candidate)


def report_of(
    settings: TuneSettings, profile: Profile, goals: Goals, console: Console, kinds: Mapping[int, Profile] | None = None
) -> dict[str, Any]:
    """Everything that is shown. `kinds`: profiles by degree of tensor parallelism. Raises `SettingsError`."""
    kinds = kinds or {}
    played = fitted_traffic(settings, profile)
    sent = played.sent
    profile = own_hardware(profile) if settings.own_hardware else profile
    check_classes(goals, sent)
    began = time.perf_counter()
    context = context_words(profile)
    found, profile = searched(settings, profile, goals, sent, console, kinds)
    best = found.best
    assert best.outcome is not None
    seen = as_it_came(sent, best.outcome)
    report: dict[str, Any] = plain(
        {
            "format": FORMAT,
            "about": _about(settings, profile),
            "settings": settings.model_dump(exclude={"as_json"}),
            "traffic": summary(seen) | {"per_minute": per_minute(seen)},
            "slo": {
                "ttft_ms": goals.default.ttft_ms,
                "tpot_ms": goals.default.tpot_ms,
                "percentile": goals.percentile,
                "classes": {name: [slo.ttft_ms, slo.tpot_ms] for name, slo in goals.by_class.items()},
            },
            "recommendation": entry(best, found),
            "disaggregate": not best.candidate.workers.mixed,
            "kept": best.attainment >= goals.percentile,
            "ranked": [entry(one, found) for one in found.ranked],
            "by_workers": [entry(one, found) for one in found.first],
            "what_if": [
                {"load": load, "attainment": share, "goodput_requests_per_s": found.rates[load] * share}
                for load, share in found.at_loads.items()
            ],
            "what_if_requests": found.part_requests,
            "headroom": found.headroom,
            "cards_enough": cards_enough(best.candidate, found.headroom) if kinds else 0,
            "candidates": len(found.first),
            "caveats": caveats(settings, profile, played, context) + cards.caveats(settings, kinds, sent, profile),
            "apply": apply_cards(best.candidate, profile, sent) if kinds else apply_lines(best, profile),
            "seconds": round(time.perf_counter() - began, 1),
        }
    )
    return report


def _about(settings: TuneSettings, profile: Profile) -> dict[str, Any]:
    return {
        "crossdock": version_of("crossdock"),
        "profile": profile.about,
        "profile_file": settings.profile,
        "sources": [line for one in sources_of(profile) if (line := source(one, profile))],
    }


@contextlib.contextmanager
def on_all_cores(candidates: int, requests: int, effort: Effort) -> Iterator[Each]:
    """Yields a `map` that uses all cores, if there is enough to play."""
    count = len(os.sched_getaffinity(0))
    first, second, _ = (min(part, requests) for part in effort.parts(candidates))
    if count < 2 or candidates * first + 10 * second < POOL_REQUESTS:
        yield map
        return
    with ProcessPoolExecutor(count, multiprocessing.get_context("spawn")) as pool:
        yield pool.map


def as_it_came(sent: Sequence[Sent], outcome: PlayedOutcome) -> list[Sent]:
    """Returns the requests with the times at which the recommended ratio got them: turns of sessions come when answers have
    come."""
    if not outcome.clients or len(outcome.clients) < len(sent):
        return list(sent)
    moved = [one._replace(at_s=at_s) for one, at_s in zip(sent, outcome.at_s.tolist(), strict=True)]
    return sorted(moved, key=lambda one: one.at_s)


def plain(value: Any) -> Any:
    """Replaces NaN and infinity, which JSON does not have, by None."""
    if isinstance(value, Mapping):
        return {key: plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def entry(result: Scored, found: Found) -> dict[str, Any]:
    candidate, per_s, outcome = result.candidate, found.requests_per_s_of(result), result.outcome
    assert outcome is not None
    cost = result.price if found.has_costs else 0.0
    keeps = result.attainment >= result.percentile
    low, high = (per_s * float(value) for value in np.quantile(result.shares[1.0][1:], (0.05, 0.95)))
    return {
        "workers": str(candidate),
        "prefill": candidate.workers.prefill,
        "decode": candidate.workers.decode,
        "mixed": candidate.workers.mixed,
        "total": candidate.all_cards,
        "cost_per_hour": cost or None,
        "good_per_cost": 3600 * per_s * result.attainment / cost if cost else None,
        "step_tokens": candidate.step_tokens,
        "seqs_max": candidate.seqs_max,
        "simulated_requests": result.requests,
        "attainment": result.attainment,
        "keeps": keeps,
        "load_kept": result.load_kept,
        "load_about": float(result.loads_kept[0]),
        "goodput_requests_per_s": per_s * result.attainment,
        "goodput_low": low,
        "goodput_high": high,
        "strain": result.strain,
        "binds": " or ".join((result.limit.name, *result.limit.equals)) or ("nothing" if keeps else ""),
        "limit_gain": result.limit.gain,
        "limit_hurts": result.limit.hurts,
        "probability": result.probability if result.whole else None,
        "prefill_busy": outcome.prefill_busy,
        "decode_busy": outcome.decode_busy,
        "link_busy": outcome.link_busy,
        "batch_mean": outcome.batch_mean,
        **{
            metric: dict(zip(("p50", "p90", "p99"), outcome.percentiles(metric, (0.5, 0.9, 0.99)), strict=True))
            for metric in ("ttft_ms", "tpot_ms")
        },
    }


def apply_cards(candidate: Candidate, profile: Profile, sent: Sequence[Sent]) -> dict[str, Any]:
    """A whole `cluster.toml`, and the command that starts its first host."""
    model = str(profile.about["model"])
    lines = cluster_toml(candidate, model, profile, cards.longest_of(sent))
    if "/" not in model and not Path(model).is_dir():
        lines[0] += f"  # write its folder, or its name on Hugging Face like ORG/{model}"
    return {
        "workers": str(candidate),
        "command": "crossdock up cluster.toml --host gpu0",
        "cluster_toml": lines,
        "model": model,
    }


def apply_lines(result: Scored, profile: Profile) -> dict[str, Any]:
    """The command for one machine, and lines of `cluster.toml`."""
    candidate = result.candidate
    workers = candidate.workers
    model = profile.about.get("model", "")
    counts = {"prefill": workers.prefill, "decode": workers.decode, "mixed": workers.mixed}
    command = " ".join(["crossdock serve", *(f"--{role} {count}" for role, count in counts.items() if count)])
    lines = ["[hosts.NAME]", f'workers = "{workers}"']
    if profile.about.get("engine") == "vllm":
        command += " --engine vllm"
        lines += ["", "[worker]", 'engine = "vllm"']
    if candidate.step_tokens != profile.step_tokens:
        command = f"CROSSDOCK_STEP_TOKENS={candidate.step_tokens} {command}"
        lines += ["", "[coordinator]", f"step_tokens = {candidate.step_tokens}"]
    if candidate.seqs_max:
        if workers.decode:
            lines += ["", "[decode]", f"max_seqs = {candidate.seqs_max}"]
        if workers.mixed:
            lines += ["", "[mixed]", f"max_seqs = {candidate.seqs_max}"]
    return {"workers": str(workers), "command": command, "cluster_toml": lines, "model": str(model)}
