"""`crossdock bench continuity`: what users of a server notice while a command of yours breaks it."""

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import replace
from typing import IO, Any, Final

import aiohttp
import msgspec
import uvloop
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress

from launcher import reports, tables
from launcher.bench.continuity_figures import KINDS, ContinuityRun, Kill, PlayedStream, figures
from launcher.bench.settings import ContinuitySettings
from launcher.http.client import new_session
from launcher.http.streams import WORDS, BenchFailed
from launcher.load.client import send
from launcher.load.plan import PlannedRequest
from launcher.load.probe import Probed, probe
from launcher.load.prompts import Prompts
from launcher.load.records import OK, RequestRecord
from launcher.load.show import number
from launcher.load.tenants import LoadTenant
from launcher.local.lifetime import until_interrupted
from runtime.process import clock
from runtime.process.exits import INTERRUPTED_EXIT
from runtime.settings.options import SettingsError

PROMPT_TOKENS: Final = (16, 200)
TEMPERATURE: Final = 0.8
COMMAND_S: Final = 300.0  # in which the kill command has to end
RECOVERY_S: Final = 600.0  # in which the server has to answer again
PROBE_S: Final = 30.0  # after which a request that asks whether the server answers again is given up
PAUSE_S: Final = 0.2  # between two of them, and after an error
ERRORS_SHOWN: Final = 10


def run(settings: ContinuitySettings) -> int:
    if not settings.url.startswith(("http://", "https://")):
        raise SettingsError(f"--url: {settings.url} does not begin with http:// or https://")
    console = reports.console_for(settings)
    return uvloop.run(until_interrupted(_run(settings, console), console))


async def _run(settings: ContinuitySettings, console: Console) -> int:
    async with new_session(silence_s=None) as http:
        probed = await probe(http, settings.url, settings.api_key, settings.model, standard=True)
        bench = _Bench(http, probed, settings)
        with Progress(console=console, refresh_per_second=2) as progress:
            bar = progress.add_task("undisturbed streams", total=2 * len(bench.bodies))
            await bench.learn(lambda: progress.advance(bar))
            bar = progress.add_task("kills", total=settings.kills)
            await bench.play(lambda: progress.advance(bar))
    found = figures(bench.run)
    show(found, console)
    shown = settings.model_dump(exclude={"api_key", "as_json"})
    reports.write_json(settings, {"settings": shown, "model": probed.target.model, "figures": found})
    if bench.run.interrupted:
        return INTERRUPTED_EXIT
    if bench.run.kills[-1].answered_s is None:
        raise BenchFailed(f"the server did not answer again within {RECOVERY_S:.0f} s after a kill")
    return 0


class _Bench:
    """Sends the streams and runs the kill command."""

    def __init__(self, http: aiohttp.ClientSession, probed: Probed, settings: ContinuitySettings) -> None:
        self.run = ContinuityRun()
        self._http, self._target, self._settings = http, probed.target, settings
        self._tenant = LoadTenant("default", settings.api_key)
        self._origin = clock.now()
        self._answers = asyncio.Event()
        self._answers.set()
        self._over = False
        self.bodies = self._bodies(probed)

    def _bodies(self, probed: Probed) -> list[bytes]:
        """Makes the requests, greedy and seeded ones in turn. Raises `SettingsError`."""
        settings, source = self._settings, random.Random(f"{self._settings.seed} requests")
        least, most = PROMPT_TOKENS
        if context := self._target.context_tokens:
            most = min(most, context - settings.tokens)
        if most < least:
            raise SettingsError(f"--tokens: the model's context has {context} tokens, and prompts at least {least}")
        pool = probed.pool or WORDS
        prompts = Prompts(settings.seed, pool, 0, 0, probed.tokens_per_word, probed.overhead_tokens)
        bodies = []
        for index in range(2 * settings.streams):
            planned = self._planned(index, source.randint(least, most), settings.tokens)
            body = msgspec.json.decode(self._target.body(planned, prompts.make(planned)))
            seeded = KINDS[index % 2] == "seeded"
            drawn = {"temperature": TEMPERATURE, "seed": source.randrange(1 << 30)} if seeded else {}
            bodies.append(msgspec.json.encode(body | drawn))
        return bodies

    def _planned(self, index: int, prompt_tokens: int, tokens: int) -> PlannedRequest:
        return PlannedRequest(index, 0.0, self._tenant, "", prompt_tokens, tokens)

    async def learn(self, on_stream: Callable[[], None]) -> None:
        """Gets two undisturbed answers to each request, in two orders. Raises `BenchFailed`."""

        async def client(numbers: Iterator[int]) -> None:
            for index in numbers:
                stream = await self._stream(index, self.run.undisturbed)
                if stream.record.outcome != OK:
                    said = f"{stream.record.outcome} {stream.record.detail}"
                    raise BenchFailed(f"a stream failed before any kill: {said}")
                on_stream()

        for numbers in (range(len(self.bodies)), reversed(range(len(self.bodies)))):
            left = iter(numbers)
            async with _running([client(left) for _ in range(self._settings.streams)]) as clients:
                await asyncio.gather(*clients)

    async def play(self, on_kill: Callable[[], None]) -> None:
        """Kills while streams run. If it is cancelled it still returns. Raises `SettingsError` if the first kill fails."""
        async with _running([self._client(index) for index in range(self._settings.streams)]) as clients:
            try:
                await self._kills(on_kill)
                self._over = True
                await asyncio.gather(*clients)
            except asyncio.CancelledError:
                self.run.interrupted = True

    async def _stream(self, index: int, into: list[PlayedStream]) -> PlayedStream:
        stream = PlayedStream(index, RequestRecord(index, "", 0.0, 0, self._settings.tokens))
        into.append(stream)
        planned = self._planned(index, 0, self._settings.tokens)
        await send(self._http, self._target, planned, self.bodies[index], stream.record, self._origin, stream.add)
        return stream

    async def _client(self, client: int) -> None:
        """Sends one stream after the other. After an error it waits until the server answers again."""
        source = random.Random(f"{self._settings.seed} client {client}")
        while not self._over:
            stream = await self._stream(source.randrange(len(self.bodies)), self.run.streams)
            if stream.record.outcome != OK:
                await asyncio.sleep(PAUSE_S)
                await self._answers.wait()

    async def _kills(self, on_kill: Callable[[], None]) -> None:
        moments = random.Random(f"{self._settings.seed} kills")
        for index in range(self._settings.kills):
            await asyncio.sleep(moments.uniform(0.0, 2 * self._settings.every_s))
            kill = Kill(clock.now() - self._origin)
            self.run.kills.append(kill)
            self._answers.clear()
            try:
                kill.error = await run_command(self._settings.kill)
                if kill.error and not index:
                    raise SettingsError(f"--kill: {kill.error}")
                kill.answered_s = await self._answered()
            finally:
                self._answers.set()
            if kill.answered_s is None:
                return
            on_kill()

    async def _answered(self) -> float | None:
        """Returns when a new request is answered; None if none is in time."""
        target = replace(self._target, timeout_s=PROBE_S)
        planned = self._planned(0, 1, 1)
        body = target.body(planned, WORDS[0])
        end = clock.now() + RECOVERY_S
        while clock.now() < end:
            record = RequestRecord(0, "", 0.0, 1, 1)
            await send(self._http, target, planned, body, record, self._origin)
            if record.outcome == OK:
                return record.ended_s
            await asyncio.sleep(PAUSE_S)
        return None


@contextlib.asynccontextmanager
async def _running(work: list[Coroutine[Any, Any, None]]) -> AsyncIterator[list[asyncio.Task[None]]]:
    """Yields tasks that do not outlive the context."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def run_command(command: str) -> str:
    """Runs a command in a shell. Returns what went wrong, or nothing. A command that is still running when this call ends is
    killed with its process group; what it leaves running behind it stays."""
    with tempfile.TemporaryFile() as output:
        process = _started(command, output)
        try:
            async with asyncio.timeout(COMMAND_S):
                status = await asyncio.to_thread(process.wait)
        except TimeoutError:
            return f"the command did not end within {COMMAND_S:.0f} s"
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait(COMMAND_S)
        if not status:
            return ""
        output.seek(0)
        said = output.read().decode("utf-8", "replace").strip().splitlines()
        return f"the command ended with status {status}" + (f": {said[-1][:200]}" if said else "")


def _started(command: str, output: IO[bytes]) -> subprocess.Popen[bytes]:
    """Not with asyncio: a call of that which is cancelled while it starts a process leaves the process running."""
    return subprocess.Popen(
        command, shell=True, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
    )


def show(found: dict[str, Any], console: Console) -> None:
    unit = "tokens" if found["compared"] == "token ids" else "characters"
    title = f"Streams under {found['kills']} kills; {found['compared']} compared, {unit}"
    rows = tables.Table(title, "", "streams", "tokens", "errors", "lost", "repeated", "changed", "cut off by errors")
    for kind, row in found["streams"].items():
        names = ("streams", "tokens", "errors", "lost", "repeated", "changed", "cut_off")
        rows.row(kind, *(f"{row[name]:,}" for name in names))
    rows.show(console)
    times = tables.Table("Times, s", "", "p50", "p99", "max", "count")
    for name, key in (
        ("longest gap of a stream, undisturbed", "longest_gap_undisturbed_s"),
        ("longest gap of a stream", "longest_gap_s"),
        ("from a kill until a new request is answered", "new_request_s"),
        ("from a kill until all interrupted streams go on", "all_go_on_s"),
    ):
        if (row := found[key]) is not None:
            times.row(name, *(number(row[rank], 2) for rank in ("p50", "p99", "max")), f"{row['count']:,}")
    times.show(console)
    notes = [f"{found['interrupted_streams']} streams were interrupted and went on"]
    notes += [f"[red]{count} ×[/red] {escape(said)}" for said, count in list(found["errors"].items())[:ERRORS_SHOWN]]
    notes += [f"[red]kill failed[/red]: {escape(said)}" for said in found["failed_kills"][:ERRORS_SHOWN]]
    if unsteady := found["unsteady_requests"]:
        notes.append(
            f"[yellow]This server's answers differ without a fault: {unsteady} of {found['requests']} requests got two"
            " answers, so changed text cannot be judged for them, and they count only as streams and errors.[/yellow]"
        )
    if without := found["changed_without_kill"]:
        notes.append(f"[yellow]{without} of the changed streams met no kill: not every change is due to one.[/yellow]")
    for note in notes:
        console.print(note, highlight=False)
