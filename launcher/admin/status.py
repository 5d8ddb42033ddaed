"""`crossdock status`: ask the coordinator what it knows, and show it."""

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec
import uvloop
from msgspec.structs import asdict
from pydantic import Field
from rich.console import Console
from rich.markup import escape

from launcher import tables
from launcher.local import process_states, registry
from launcher.local.process_states import ProcessStates
from proto import limits
from proto.errors import CrossdockError
from proto.messages import Hello, Message, Role, StatusRequest, Welcome
from proto.status import FlipStatus, PredictionError, StatusReport, WorkerStatus
from runtime.link.client import LinkClient
from runtime.link.keys import Keys, keys_for
from runtime.link.server import LinkSettings, Peer
from runtime.process import clock
from runtime.settings.addresses import AddressesOrEmpty
from runtime.settings.roles import CoordinatorSettings
from runtime.settings.types import JsonOption, KeyOptions

_UNITS = {"k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
DEFAULT_COORDINATOR: str = CoordinatorSettings.model_fields["bind"].default
ASK_MS = 3_000  # to wait for an answer
FLIPS_SHOWN = 4
STALE_MS = 60_000.0
JUDGED_MIN = 20  # finished requests, before the share that kept its targets means something
FULL_SHARE = 0.97
M = TypeVar("M", bound=Message)


class ObserverOptions(KeyOptions):
    """The options of commands that ask a coordinator."""

    coordinator: AddressesOrEmpty = Field(
        "",
        description="Address of the coordinator; empty: the cluster running on this machine, or else the coordinator at"
        f" {DEFAULT_COORDINATOR}.",
    )


class StatusSettings(ObserverOptions, JsonOption):
    """Show workers, queues and running requests of a cluster: of the one that `crossdock serve` runs on this machine, or of
    any other by its coordinator."""

    wide: bool = Field(False, description="Show every column.")


class NoAnswer(CrossdockError):
    """The coordinator did not answer in time."""


class SeveralClusters(CrossdockError):
    """More than one cluster runs here, and none was named."""


async def ask(coordinator: str, timeout_ms: int, keys: Keys | None = None) -> StatusReport:
    """Raises `NoAnswer`."""
    return await converse(coordinator, StatusRequest(), StatusReport, timeout_ms, keys)


async def converse(
    coordinator: str, question: Message, expected: type[M], timeout_ms: int, keys: Keys | None = None
) -> M:
    """Connect as an observer, ask once, close. Raises `NoAnswer`."""
    answer: asyncio.Future[M] = asyncio.get_running_loop().create_future()

    def on_up(peer: Peer, _welcome: Welcome) -> None:
        peer.send(question)

    def on_message(_peer: Peer, message: Message, _blob: bytes) -> None:
        if isinstance(message, expected) and not answer.done():
            answer.set_result(message)

    def on_down(_peer: Peer, _reason: str) -> None:
        pass  # the client connects again, and the timeout bounds it all

    hello = Hello(
        version=limits.PROTOCOL_VERSION,
        role=Role.OBSERVER,
        incarnation=clock.new_incarnation(),
        name=f"status-{os.getpid()}",
        host=socket.gethostname()[: limits.MAX_TEXT_CHARS],
        pid=os.getpid(),
    )
    link_settings = LinkSettings(handshake_timeout_ms=timeout_ms, keys=keys)
    link = LinkClient(
        address=coordinator, hello=hello, on_up=on_up, on_message=on_message, on_down=on_down, settings=link_settings
    )
    await link.start()
    try:
        async with asyncio.timeout(timeout_ms / 1000):
            return await answer
    except TimeoutError:
        why = link.last_error or f"no answer from {coordinator}"
        raise NoAnswer(f"{why} (waited {timeout_ms} ms). Is a coordinator running there? See --coordinator.") from None
    finally:
        await link.close()


@contextlib.contextmanager
def coordinator_of(named: str) -> Iterator[str]:
    """Yields the address to ask: `named`, or that of the cluster on this machine. Raises `SeveralClusters`. If no cluster runs
    here, a `NoAnswer` inside says so."""
    # Several hosts of one cluster may run on this machine.
    running = [] if named else list({one.coordinator: one for one in registry.clusters()}.values())
    if len(running) > 1:
        lines = [f"    --coordinator {one.coordinator}   {one.model_id} at {one.base_url}" for one in running]
        raise SeveralClusters("\n".join(["several clusters run on this machine; name one:", *lines]))
    try:
        yield named or (running[0].coordinator if running else DEFAULT_COORDINATOR)
    except NoAnswer as error:
        if named or running:
            raise
        raise NoAnswer(f"no `crossdock serve` of yours runs on this machine, and {error}") from None


def run(settings: StatusSettings) -> int:
    """Raises `NoAnswer`, `SeveralClusters` or `ConfigError`."""
    console = tables.console()
    with coordinator_of(settings.coordinator) as coordinator:
        here_too = _supervised(coordinator)
        try:
            report = uvloop.run(ask(coordinator, ASK_MS, keys_for(settings, Role.OBSERVER)))
        except NoAnswer:
            _show_processes(here_too, console)  # perhaps the coordinator itself is down
            raise
    if settings.as_json:
        shown = as_dict(report) | {"processes": [asdict(one) for part in here_too for one in part.processes]}
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(shown), indent=2).decode() + "\n")
    else:
        show(report, console, wide=settings.wide)
        _show_processes(here_too, console)
    return 0


def _supervised(coordinator: str) -> list[ProcessStates]:
    """Returns the process states of that cluster that `crossdock serve` and `up` on this machine keep."""
    return [process_states.read(folder) for folder in registry.folders_of(coordinator)]


def _show_processes(parts: list[ProcessStates], console: Console) -> None:
    for part in parts:
        for line in process_states.lines(part.processes, clock.unix_time()):
            console.print(f"[yellow]Process[/yellow] {escape(line)}", highlight=False, soft_wrap=True)
        if part.metrics:
            console.print(f"Metrics of the supervisor: {escape(part.metrics)}", highlight=False)


def as_dict(report: StatusReport) -> dict[str, Any]:
    """Returns the report with names for all fields, since structs are arrays on the wire."""
    fields = {name: getattr(report, name) for name in report.__struct_fields__}
    workers = [{name: getattr(worker, name) for name in worker.__struct_fields__} for worker in report.workers]
    pairs = [{name: getattr(pair, name) for name in pair.__struct_fields__} for pair in report.kv_pairs]
    tenants = [{name: getattr(one, name) for name in one.__struct_fields__} for one in report.tenants]
    flips = [{name: getattr(one, name) for name in one.__struct_fields__} for one in report.flips]
    autopilots = [asdict(one) | {"error": asdict(one.error)} for one in report.autopilots]
    del fields["traffic"]  # a sample for the autopilot
    classes = [asdict(one) for one in report.classes]
    return fields | {
        "workers": workers, "kv_pairs": pairs, "tenants": tenants, "flips": flips, "autopilots": autopilots,
        "classes": classes, "policy": asdict(report.policy), "sessions": [asdict(one) for one in report.sessions],
    }  # fmt: skip


def show(report: StatusReport, console: Console, *, wide: bool = False) -> None:
    """`wide`: every column, and what matters to developers of crossdock."""
    if summary := _summary(report):
        console.print(summary, highlight=False)
    for words in _abnormal(report):
        console.print(f"[yellow]Attention:[/yellow] {escape(words)}", highlight=False)
    if report.workers:
        console.print(_title(report), highlight=False, soft_wrap=True)
        (_wide_table(report) if wide else _table(report)).show(console)
    else:
        console.print("No workers are connected.")
    for model, kinds in _numerics(report).items() if wide else ():
        console.print(f"Numerics of {escape(model)}: {escape(', '.join(kinds))}", highlight=False, soft_wrap=True)
    for pair in report.kv_pairs if wide else (one for one in report.kv_pairs if one.why):
        why = f" ({escape(pair.why)})" if pair.why else ""
        console.print(f"KV {escape(pair.prefill)} → {escape(pair.decode)}: {pair.transport}{why}", highlight=False)
    for flip in report.flips[-FLIPS_SHOWN:]:
        console.print(f"Role of {escape(flip_words(flip))}", highlight=False, soft_wrap=True)
    _show_autopilots(report, console)
    console.print(f"Gateways: {', '.join(report.gateways) or 'none'}")
    console.print(f"Queued: {report.queued}   Running: {_counts(report.running)}   Ended: {_counts(report.finished)}")
    _show_essence(report, console)
    _show_classes(report, console)
    _show_sessions(report, console)
    if report.policy.number:
        trial = (
            f"; version {report.policy.trial} ({report.policy.trial_digest}) is on trial" if report.policy.trial else ""
        )
        console.print(f"Policy: version {report.policy.number} ({report.policy.digest}){trial}", highlight=False)
    if wide and report.counters:
        console.print(f"Counters: {_counts(report.counters)}")
    if report.metrics:
        where = ", ".join(f"{escape(name)} {escape(address)}" for name, address in sorted(report.metrics.items()))
        console.print(f"Metrics: {where}", highlight=False)


def _summary(report: StatusReport) -> str:
    """The version, how long the coordinator has led, and how much is done."""
    up_s = report.uptime_ms / 1000
    days, hours, minutes = int(up_s // 86_400), int(up_s % 86_400 // 3600), int(up_s % 3600 // 60)
    up = f"{days} d {hours} h" if days else f"{hours} h {minutes} min" if hours else f"{minutes} min"
    parts = [f"crossdock {escape(report.version)}, coordinator up {up}"] if report.version else []
    if "requests_per_s" in report.recent:
        rates = [(name, report.recent[f"{name}_per_s"]) for name in ("requests", "prompt_tokens", "output_tokens")]
        words = [f"{rate:,.{1 if rate < 10 else 0}f} {name.replace('_', ' ')}/s" for name, rate in rates]
        parts.append(f"last minute: {', '.join(words)}")
    return "; ".join(parts)


def _abnormal(report: StatusReport) -> Iterator[str]:
    """Returns sentences about the things that an operator should look at. `crossdock doctor` looks closer."""
    if not report.gateways:
        yield "no gateway is connected"
    for model in sorted({worker.model for worker in report.workers}):
        roles = {worker.role for worker in report.workers if worker.model == model and not worker.draining}
        for role in (Role.PREFILL, Role.DECODE):
            if not roles & {role, Role.MIXED}:
                yield f"{model} has no {role.value} worker that takes requests"
    yield from (f"left out: {words}" for words in report.circuit_open)
    for process in report.hung:
        yield f"{process.name} (pid {process.pid}) was given up because of a hung step"
    for model, kinds in _numerics(report).items():
        if len(kinds) > 1:
            who = "; ".join(f"{', '.join(names)}: {kind}" for kind, names in kinds.items())
            yield f"numerics of {model} differ, so a resumed stream may go on with other tokens. {who}"
    for one in report.classes:
        if one.finished >= JUDGED_MIN and one.kept < one.percentile * one.finished:
            yield f"class {one.name} keeps its targets for {one.kept / one.finished:.1%}, wanted {one.percentile:.4g}"
    for worker in report.workers:
        if report.queued and worker.kv_blocks_used >= FULL_SHARE * worker.kv_blocks:
            yield f"the KV cache of {worker.name} is full, and {report.queued:,} requests wait"
    for name, count in report.counters.items():
        if count and name.startswith("turned_away_"):
            yield f"{count:,} connections were turned away: {name.removeprefix('turned_away_').replace('_', ' ')}"
        elif count and name in ("failed_checks", "protocol_errors"):
            yield f"{count:,} {name.replace('_', ' ')} since the coordinator started"


def _show_autopilots(report: StatusReport, console: Console) -> None:
    for one in report.autopilots:
        age = f", {one.age_ms / 60_000:.0f} min ago" if one.age_ms > STALE_MS else ""
        wanted = f"wants {one.wanted} instead of {one.present}" if one.wanted != one.present else f"keeps {one.present}"
        line = f"Autopilot of {one.model} ({one.mode}{age}): {wanted}; {one.reason}"
        console.print(escape(line), highlight=False, soft_wrap=True)
        if one.error.comparisons:
            console.print(f"Error of its predictions in the last hour: {error_words(one.error)}", highlight=False)


def error_words(error: PredictionError) -> str:
    """Medians of an hour's comparisons."""
    figures = (("TTFT p50", error.ttft_p50), ("TTFT p90", error.ttft_p90), ("TPOT p90", error.tpot_p90))
    said = [f"{name} {value:.0%}" for name, value in figures if value is not None]
    if error.slo_share is not None:
        said.append(f"SLO share {100 * error.slo_share:.1f} points")
    return f"{', '.join(said) or 'nothing was measured'} (median of {error.comparisons})"


def flip_words(flip: FlipStatus) -> str:
    """Describes a change of role in one line."""
    line = f"{flip.worker}: {flip.before} → {flip.role}, {flip.state}"
    if flip.failure:
        line += f" ({flip.failure})"
    elif flip.commit_ms:
        line += f" in {flip.drained_ms + flip.commit_ms:.0f} ms"
    return line + (f"; {flip.why}" if flip.why else "")


def _show_essence(report: StatusReport, console: Console) -> None:
    """How fast, and for whom."""
    recent = report.recent
    if "requests" in recent:
        times = [
            f"{label} {_seconds(recent[f'{name}_p50_ms'])}, p99 {_seconds(recent[f'{name}_p99_ms'])}"
            for name, label in (("queue", "queue"), ("ttft", "TTFT"), ("tpot", "TPOT"))
            if f"{name}_p50_ms" in recent
        ]
        console.print(f"Last {recent['requests']:.0f} requests, p50: {'; '.join(times)}", highlight=False)
    shares = [
        f"{escape(one.name)} {one.share:.0%}"
        + (f" ({one.waiting} waiting)" if one.waiting else "")
        + (f", TTFT {_seconds(one.ttft_p50_ms)}, p99 {_seconds(one.ttft_p99_ms)}" if one.ttft_p50_ms else "")
        for one in report.tenants
        if one.waiting or one.share >= 0.005
    ]
    if shares:
        console.print(f"Service of the last 10 s: {'; '.join(shares)}", highlight=False)


def _show_classes(report: StatusReport, console: Console) -> None:
    """Goodput of each priority class with a target."""
    for one in report.classes:
        targets = [f"{name} {_seconds(ms)}" for name, ms in (("TTFT", one.ttft_ms), ("TPOT", one.tpot_ms)) if ms]
        share = f" ({one.kept / one.finished:.1%}, wanted {one.percentile:.4g})" if one.finished else ""
        console.print(
            f"Class {escape(one.name)}, {', '.join(targets)}: {one.kept:,} within targets of {one.finished:,}"
            f" finished{share}, {one.offered:,} offered",
            highlight=False,
        )


def _show_sessions(report: StatusReport, console: Console) -> None:
    found, broken = (report.counters.get(f"lease_{what}", 0) for what in ("found", "broken"))
    for one in report.sessions if found or broken else ():
        kept = f"{one.sessions:,}, KV of {one.leases:,} is kept ({_short(one.leased_tokens)} tokens)"
        console.print(f"Sessions of {escape(one.model)}: {kept}", highlight=False, soft_wrap=True)
    if found or broken:
        console.print(f"Later turns: {found:,} found their KV, {broken:,} did not", highlight=False)


def _seconds(milliseconds: float) -> str:
    return f"{milliseconds / 1000:.2f} s" if milliseconds >= 1000 else f"{milliseconds:.0f} ms"


def _title(report: StatusReport) -> str:
    """Returns the title, with the properties that all workers share."""
    models, hosts = ({getattr(worker, what) for worker in report.workers} for what in ("model", "host"))
    which = f"{len(models)} models" if len(models) > 1 else escape(*models)
    where = f"{len(hosts)} hosts" if len(hosts) > 1 else escape(*hosts)
    return f"Workers of {which} on {where}"


def _numerics(report: StatusReport) -> dict[str, dict[str, list[str]]]:
    """Returns for each model the numerics of its workers, with their names."""
    found: dict[str, dict[str, list[str]]] = {}
    for worker in report.workers:
        if worker.numerics:
            found.setdefault(worker.model, {}).setdefault(worker.numerics, []).append(worker.name)
    return found


def _table(report: StatusReport) -> tables.Table:
    models = {worker.model for worker in report.workers}
    texts = [tables.words(heading) for heading in ("role", *(["model"] if len(models) > 1 else []))]
    table = tables.Table("", "name", *texts, "requests", "KV blocks", "tokens")
    for worker in report.workers:
        table.row(
            worker.name,
            _role(worker),
            *([worker.model] if len(models) > 1 else []),
            str(worker.requests),
            f"{worker.kv_blocks_used}/{worker.kv_blocks}",
            _short(worker.tokens_forwarded),
        )
    return table


def _role(worker: WorkerStatus) -> str:
    return f"{worker.role.value}, draining" if worker.draining else worker.role.value


def _short(number: int) -> str:
    """Returns the exact number up to 99,999, then three digits: `123 k`, `1.23 M`."""
    if number < 100_000:
        return f"{number:,}"
    unit = next((unit for unit in ("k", "M", "G") if number < 999_500 * _UNITS[unit] // 1000), "T")
    value = number / _UNITS[unit]
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f} {unit}"


def _wide_table(report: StatusReport) -> tables.Table:
    texts = (tables.words(heading) for heading in ("role", "model", "host"))
    figures = ("pid", "requests", "steps in flight", "KV blocks used", "of", "tokens forwarded")
    table = tables.Table("", "name", *texts, *figures)
    for worker in report.workers:
        numbers = (worker.requests, worker.steps_in_flight, worker.kv_blocks_used, worker.kv_blocks)
        table.row(
            *(worker.name, _role(worker), worker.model, worker.host, str(worker.pid)),
            *(f"{number:,}" for number in (*numbers, worker.tokens_forwarded)),
        )
    return table


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{number:,} {name}" for name, number in counts.items() if number) or "none"
