"""`crossdock bench agents`: conversations of several turns, each of which begins when the last has ended and its user or tool
has thought."""

import asyncio
import contextlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp
import msgspec
import uvloop
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from launcher import reports, tables
from launcher.bench.serve import BenchSite, named, started
from launcher.bench.settings import AgentsSettings
from launcher.http.client import new_session
from launcher.http.streams import WORDS, BenchFailed
from launcher.load.client import send
from launcher.load.figures import LoadSlo, fairness, goodput, tails, values
from launcher.load.plan import PlannedRequest, tenants_of
from launcher.load.probe import Probed, probe
from launcher.load.records import INTERRUPTED, OK, RequestRecord
from launcher.load.show import number
from launcher.load.tenants import LoadTenant, Ratio
from launcher.load.traces import read_sessions
from launcher.local.lifetime import until_interrupted
from launcher.models import resolve
from launcher.sessions import LoadSession, SessionTurn, in_turn, synthetic
from runtime.process import clock
from runtime.process.exits import INTERRUPTED_EXIT
from runtime.settings.options import SettingsError

STAGGER_S: Final = 0.3  # between the first turns of two clients


@dataclass
class PlayedSession:
    """A session while it is played, with its measurements."""

    first: list[RequestRecord] = field(default_factory=list)
    later: list[RequestRecord] = field(default_factory=list)
    interrupted: bool = False

    @property
    def all(self) -> list[RequestRecord]:
        return [*self.first, *self.later]


def run(settings: AgentsSettings) -> int:
    if len(settings.start) > 1:
        raise SettingsError("--start: takes one ratio here")
    sessions = sessions_of(settings)
    console = reports.console_for(settings)
    return uvloop.run(until_interrupted(_run(settings, sessions, console), console))


def sessions_of(settings: AgentsSettings) -> list[LoadSession]:
    """Raises `SettingsError`."""
    if settings.trace:
        return read_sessions(settings.trace, settings.scale_tokens)
    lengths = (settings.system_tokens, settings.new_tokens, settings.output_tokens)
    return synthetic(settings.sessions, settings.turns, *lengths, settings.think_s)


async def _run(settings: AgentsSettings, sessions: Sequence[LoadSession], console: Console) -> int:
    tenants = tenants_of(settings)
    async with contextlib.AsyncExitStack() as stack:
        if settings.start:
            model = resolve.ready(settings.model, "", console)
            site = await stack.enter_async_context(
                started(settings, Ratio.parse(*settings.start), tenants, model, console)
            )
        else:
            site = named(settings, tenants)
        async with new_session(silence_s=None) as http:
            probed = await probe(http, site.base_url, site.key, "" if settings.start else settings.model, chat=True)
            played = await play(http, probed, site, sessions, settings, console)
    if not played.all:
        raise BenchFailed("nothing was measured: no turn was sent")
    figures = figures_of(played, site.tenants, LoadSlo.of(settings.model_dump()))
    show(figures, console)
    result = {"settings": settings.model_dump(exclude={"api_key", "tenant", "as_json"}), "figures": figures}
    reports.write_json(settings, result)
    return INTERRUPTED_EXIT if played.interrupted else 0


async def play(
    http: aiohttp.ClientSession,
    probed: Probed,
    site: BenchSite,
    sessions: Sequence[LoadSession],
    settings: AgentsSettings,
    console: Console,
) -> PlayedSession:
    """Plays the sessions. If it is cancelled it still returns; requests in flight are cut off."""
    played, clients = PlayedSession(), in_turn(sessions, settings.sessions)
    columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, refresh_per_second=2) as progress:
        bar = progress.add_task("turns", total=sum(len(session.turns) for session in sessions))
        origin = clock.now()
        tasks = [
            asyncio.create_task(
                _Client(http, probed, tenant, settings, played, origin).play(client, own, lambda: progress.advance(bar))
            )
            for (client, own), tenant in zip(enumerate(clients), dealt(site.tenants, len(clients)), strict=True)
        ]
        try:
            await asyncio.gather(*tasks)
        except asyncio.CancelledError:
            played.interrupted = True
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    return played


def dealt(tenants: Sequence[LoadTenant], clients: int) -> list[LoadTenant]:
    """Returns a tenant for each client: always the tenant that has the fewest clients for its share."""
    counts = [0] * len(tenants)
    found = []
    for _ in range(clients):
        at = min(range(len(tenants)), key=lambda one: (counts[one] + 1) / tenants[one].share)
        counts[at] += 1
        found.append(tenants[at])
    return found


class _Client:
    """Plays one session after the other."""

    def __init__(
        self,
        http: aiohttp.ClientSession,
        probed: Probed,
        tenant: LoadTenant,
        settings: AgentsSettings,
        played: PlayedSession,
        origin: float,
    ) -> None:
        self._http, self._probed, self._tenant, self._settings = http, probed, tenant, settings
        self._played, self._origin = played, origin

    async def play(self, client: int, sessions: Sequence[LoadSession], on_turn: Any) -> None:
        await asyncio.sleep(STAGGER_S * client)
        for at, session in enumerate(sessions):
            words = random.Random(f"{self._settings.seed} client {client} session {at}")
            messages: list[dict[str, str]] = []
            for index, turn in enumerate(session.turns):
                await asyncio.sleep(turn.think_s)
                if not messages or turn.restarts:
                    messages = self._opening(session, words)
                messages.append({"role": "user", "content": self._text(words, turn.new_tokens)})
                answer = await self._turn(messages, turn, is_first=len(messages) <= 2, index=index)
                on_turn()
                if answer is None:
                    break
                messages.append({"role": "assistant", "content": answer})

    def _opening(self, session: LoadSession, words: random.Random) -> list[dict[str, str]]:
        if not session.system_tokens:
            return []
        common = random.Random(f"{self._settings.seed} system")
        return [{"role": "system", "content": self._text(common, session.system_tokens)}]

    def _text(self, words: random.Random, tokens: int) -> str:
        return " ".join(words.choices(WORDS, k=max(1, round(tokens / self._probed.tokens_per_word))))

    async def _turn(
        self, messages: list[dict[str, str]], turn: SessionTurn, *, is_first: bool, index: int
    ) -> str | None:
        """Sends one turn. Returns its answer, or None if none came."""
        now, target = clock.now() - self._origin, self._probed.target
        record = RequestRecord(index, self._tenant.name, now, turn.new_tokens, turn.output_tokens)
        (self._played.first if is_first else self._played.later).append(record)
        planned = PlannedRequest(index, now, self._tenant, self._tenant.priority, turn.new_tokens, turn.output_tokens)
        body = msgspec.json.decode(target.body(planned, ""))
        body["messages"] = messages
        text: list[str] = []
        sent = msgspec.json.encode(body)
        await send(self._http, target, planned, sent, record, self._origin, lambda piece, _: text.append(piece))
        return "".join(text) if record.outcome == OK else None


def figures_of(played: PlayedSession, tenants: Sequence[LoadTenant], slo: LoadSlo) -> dict[str, Any]:
    records = played.all
    ended = [record for record in records if record.outcome == OK]
    seconds = max((record.ended_s for record in ended), default=0.0) - min(record.sent_s for record in records)
    prompt = sum(record.prompt_tokens for record in ended)
    return {
        "turns": len(records),
        "ok": len(ended),
        "seconds": seconds,
        "turns_per_s": len(ended) / seconds if seconds > 0 else None,
        "goodput": goodput(records, slo, seconds),
        "ttft_first_ms": tails(values(played.first, "ttft_ms")),
        "ttft_later_ms": tails(values(played.later, "ttft_ms")),
        "gaps_ms": tails(values(records, "itl_ms")),
        "prompt_tokens": prompt,
        "cached_share": sum(record.cached_tokens for record in ended) / prompt if prompt else None,
        "errors": {record.outcome: record.detail for record in records if record.outcome not in (OK, INTERRUPTED)},
        "fairness": fairness(records, {tenant.name: tenant.weight for tenant in tenants}, slo, seconds),
    }


def show(figures: dict[str, Any], console: Console) -> None:
    rows = tables.Table("Turns, ms", "", "p50", "p90", "p99", "max", "count")
    for name, key in (
        ("TTFT, first turns", "ttft_first_ms"),
        ("TTFT, later turns", "ttft_later_ms"),
        ("gaps", "gaps_ms"),
    ):
        if (row := figures[key]) is not None:
            rows.row(name, *(number(row[rank]) for rank in ("p50", "p90", "p99", "max")), f"{row['count']:,}")
    rows.show(console)
    good = figures["goodput"]
    console.print(
        f"[bold]{number(figures['turns_per_s'], 2)} turns/s[/bold], {number(good['requests_per_s'], 2)} of them within the"
        f" limits; {figures['ok']} of {figures['turns']} turns in {figures['seconds']:.1f} s;"
        f" {number(figures['cached_share'] and 100 * figures['cached_share'])} % of prompt tokens cached",
        highlight=False,
    )
    served = figures["fairness"]["tenants"]
    if len(served) > 1:
        each = tables.Table("Tenants, ms", "", "turns", "TTFT p50", "TTFT p99", "gap p99", "good %")
        for name, row in served.items():
            ttft, gaps, share = row["ttft_ms"] or {}, row["itl_ms"] or {}, row["goodput"]["attainment"]
            shown = (
                number(value) for value in (ttft.get("p50"), ttft.get("p99"), gaps.get("p99"), share and 100 * share)
            )
            each.row(name, str(row["requests"]), *shown)
        each.show(console)
    for kind, detail in figures["errors"].items():
        console.print(f"[red]{kind}[/red]: {escape(detail)}", highlight=False, soft_wrap=True)
