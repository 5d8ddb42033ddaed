"""`crossdock bench serve`: a realistic load against a server, and how well it was served."""

import contextlib
import hashlib
import os
import platform
import secrets
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console

from launcher import reports
from launcher.http.client import new_session
from launcher.http.streams import BenchFailed
from launcher.load import plot, queue_times, records, show
from launcher.load.figures import LoadSlo, figures
from launcher.load.plan import LoadPlan, make_plan, tenants_of
from launcher.load.probe import Probed, probe
from launcher.load.records import RunFile
from launcher.load.run import LoadRun, drive
from launcher.load.settings import LoadSettings, ServeBenchSettings, ServerSettings, TargetSettings
from launcher.load.tenants import LoadTenant, Ratio
from launcher.local import registry
from launcher.local.lifetime import running, until_interrupted
from launcher.models import resolve
from launcher.models.resolve import ReadyModel
from runtime.process.exits import INTERRUPTED_EXIT
from runtime.process.version import version_of
from runtime.settings.options import SettingsError
from runtime.settings.serve import EveryServeOption

READY_TIMEOUT_S = 600.0
_PRIORITY_CLASSES = '["interactive", "standard", "batch"]'


@dataclass(frozen=True)
class BenchSite:
    """A server to measure."""

    base_url: str
    key: str
    tenants: tuple[LoadTenant, ...]  # with keys that it takes
    event_log: str = ""


def run(settings: ServeBenchSettings) -> int:
    tenants = tenants_of(settings)
    check_files(settings)
    console = reports.console_for(settings)
    return uvloop.run(until_interrupted(_run(settings, tenants, console), console))


def check_files(settings: LoadSettings) -> None:
    """Checks the files before minutes are spent. Raises `SettingsError`."""
    plot.check(settings.plot)


async def _run(settings: ServeBenchSettings, tenants: Sequence[LoadTenant], console: Console) -> int:
    async with contextlib.AsyncExitStack() as stack:
        if settings.start:
            model = resolve.ready(settings.model, "", console)
            ratio = Ratio.parse(*settings.start)
            site = await stack.enter_async_context(started(settings, ratio, tenants, model, console))
        else:
            site = named(settings, tenants)
        result = await measure(settings, site, "" if settings.start else settings.model, console)
    show.show(result.figures, console)
    finish(settings, [(result.about["model"], result)], result, console)
    return INTERRUPTED_EXIT if result.about["interrupted"] else 0


def named(settings: ServerSettings, tenants: Sequence[LoadTenant]) -> BenchSite:
    """Returns the server that `--url` names, or the one cluster of this machine. Raises `SettingsError`."""
    keyed = tuple(replace(tenant, key=_key(tenant, settings.api_key)) for tenant in tenants)
    base_url = settings.url
    if not base_url:
        found = registry.clusters()
        if len(found) != 1:
            many = "several clusters run" if found else "no cluster runs"
            raise SettingsError(f"--url: needed, or --start: {many} on this machine")
        base_url = found[0].base_url
    if not base_url.startswith(("http://", "https://")):
        raise SettingsError(f"--url: {base_url} does not begin with http:// or https://")
    return BenchSite(base_url, keyed[0].key, keyed)


def _key(tenant: LoadTenant, default: str) -> str:
    """Raises `SettingsError`."""
    if not tenant.key.startswith("$"):
        return tenant.key or default
    found = os.environ.get(tenant.key[1:])
    if not found:
        raise SettingsError(f"--tenant: {tenant.key[1:]}, named as the key of {tenant.name}, is not in the environment")
    return found


@contextlib.asynccontextmanager
async def started(
    settings: TargetSettings, ratio: Ratio, tenants: Sequence[LoadTenant], model: ReadyModel, console: Console
) -> AsyncIterator[BenchSite]:
    """Yields a cluster that runs during the context, with a key for each tenant if there are others than the default one."""
    with tempfile.TemporaryDirectory(prefix="crossdock-") as folder:
        event_log = Path(folder) / "event_log"
        serve: dict[str, Any] = {
            "port": 0,
            "prefill": ratio.prefill,
            "decode": ratio.decode,
            "mixed": ratio.mixed,
            "device": settings.device,
            "ready_timeout_s": READY_TIMEOUT_S,
            "event_log": str(event_log),
            **settings.engine_options(),
        }
        keyed = tuple(tenants)
        if [tenant.name for tenant in tenants] != ["default"]:
            keyed = tuple(replace(tenant, key=secrets.token_hex(32)) for tenant in tenants)
            file = Path(folder) / "tenants.toml"
            file.write_text(_tenants_toml(keyed), encoding="utf-8")
            serve |= {"tenants": str(file), "usage_db": str(Path(folder) / "usage.db")}
        cores = os.sched_getaffinity(0)
        async with running(EveryServeOption(**serve), model, console) as up:
            try:
                if up.cluster.plan.control:
                    # The client must not take time from the streams it measures.
                    os.sched_setaffinity(0, up.cluster.plan.control)
                yield BenchSite(up.cluster.base_url, up.cluster.key, keyed, str(event_log))
            finally:
                os.sched_setaffinity(0, cores)  # the plan of the next cluster may use all of them


def _tenants_toml(tenants: Sequence[LoadTenant]) -> str:
    """Writes the tenants file. Users of one organisation are in its table; each name is one tenant."""
    lines = []
    for tenant in tenants:
        organisation, _, user = tenant.name.partition("/")
        table = f'tenants."{organisation}"' + (f'.users."{user}"' if user else "")
        digest = hashlib.sha256(tenant.key.encode()).hexdigest()
        lines += [f"[{table}]", f"weight = {tenant.weight}", f'keys = ["{digest}"]']
        lines += [] if user else [f"priority_classes = {_PRIORITY_CLASSES}"]
    return "\n".join(lines) + "\n"


async def measure(settings: LoadSettings, site: BenchSite, model_id: str, console: Console) -> RunFile:
    """Plays the load once. Raises `BenchFailed` where nothing can be measured; after Ctrl-C it returns what was measured."""
    async with new_session(silence_s=None) as session:
        probed = await probe(
            session, site.base_url, site.key, model_id, chat=settings.endpoint == "chat", ignore_eos=settings.ignore_eos
        )
        plan = make_plan(settings, site.tenants, probed.target.context_tokens)
        prompts = probed.prompts(settings, plan)
        _announce(probed, plan, console)
        done = await drive(session, probed.target, plan.requests, prompts, console)
    if site.event_log:
        note = queue_times.add_waits(Path(site.event_log), done.records)
        if note:
            console.print(f"[dim]{note}[/dim]", highlight=False)
    if not any(record.counted for record in done.records):
        raise BenchFailed("nothing was measured: no request was sent after the warm-up")
    return _result(settings, site, probed, plan, done)


def _announce(probed: Probed, plan: LoadPlan, console: Console) -> None:
    count, last = len(plan.requests), plan.requests[-1].due_s
    tokens = [sum(getattr(one, what) for one in plan.requests) / count for what in ("prompt_tokens", "output_tokens")]
    console.print(
        f"{probed.target.model} at {probed.target.url}: {count} requests in {last:.0f} s,"
        f" {tokens[0]:.0f} prompt and {tokens[1]:.0f} answer tokens on average",
        highlight=False,
        soft_wrap=True,
    )
    if plan.cut:
        console.print(f"[yellow]{plan.cut} requests were made shorter to fit the model's context[/yellow]")
    if not probed.pool:
        how = f"{probed.tokens_per_word:.2f} tokens a word"
        console.print(f"[dim]The server takes no token ids: prompts are words, {how}; lengths are near the plan[/dim]")
    if not probed.target.ignore_eos:
        console.print("[dim]Answers may end before their planned length: the server decides[/dim]")


def _result(settings: LoadSettings, site: BenchSite, probed: Probed, plan: LoadPlan, done: LoadRun) -> RunFile:
    weights = {tenant.name: tenant.weight for tenant in site.tenants}
    about = {
        "command": "crossdock bench serve",
        "crossdock": version_of("crossdock"),
        "aiohttp": version_of("aiohttp"),
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "model": probed.target.model,
        "url": probed.target.url,
        "server": probed.server,
        "token_id_prompts": bool(probed.pool),
        "ignore_eos": probed.target.ignore_eos,
        "cut_to_context": plan.cut,
        "interrupted": done.interrupted,
        "machine": reports.machine() | {"system": platform.platform()},
    }
    slo = LoadSlo.of(settings.model_dump())
    return RunFile(
        records.FORMAT, shown_settings(settings), about, weights, figures(done.records, weights, slo), done.records
    )


def shown_settings(settings: LoadSettings) -> dict[str, Any]:
    """The settings without keys."""
    values = settings.model_dump(exclude={"api_key", "as_json", "plot"})
    values["tenant"] = [":".join((part := text.split(":"))[:1] + part[2:]) for text in settings.tenant]
    values["abuser"] = ":".join((part := settings.abuser.split(":"))[:1] + part[2:])
    return values


def finish(settings: LoadSettings, drawn: Sequence[tuple[str, RunFile]], result: RunFile, console: Console) -> None:
    """JSON and the picture, where asked for."""
    if settings.as_json:
        sys.stdout.write(records.encoded(result))
    if settings.plot:
        plot.draw(settings.plot, drawn)
        console.print(f"Drawn: {settings.plot}", highlight=False, soft_wrap=True)
