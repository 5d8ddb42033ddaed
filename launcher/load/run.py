"""The open loop: each request is sent when it is due, even if those before it have not been answered."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import aiohttp
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from launcher.load import client
from launcher.load.client import LoadTarget
from launcher.load.plan import PlannedRequest
from launcher.load.prompts import Prompts
from launcher.load.records import INTERRUPTED, NOT_SENT, RequestRecord
from runtime.process import clock

IN_FLIGHT_MAX = 10_000  # requests at once; those beyond are not sent, and counted as errors
SHOW_EVERY_S: Final = 0.5


@dataclass
class LoadRun:
    """A run, with its measurements so far."""

    records: list[RequestRecord] = field(default_factory=list)
    interrupted: bool = False
    seconds: float = 0.0
    tasks: set[asyncio.Task[None]] = field(default_factory=set)


async def drive(
    session: aiohttp.ClientSession,
    target: LoadTarget,
    requests: Sequence[PlannedRequest],
    prompts: Prompts,
    console: Console,
) -> LoadRun:
    """Sends all requests and waits until they end. If it is cancelled it still returns: requests in flight are cut off, and
    the run is marked as interrupted."""
    run = LoadRun()
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    # The progress bar draws seldom: its thread takes time from the measurement.
    with Progress(*columns, console=console, refresh_per_second=2) as progress:
        bar = progress.add_task("sending", total=len(requests))
        loop = asyncio.get_running_loop()
        shown = loop.create_task(_show(run, progress, bar))
        origin = clock.now()
        try:
            await _send_all(session, target, requests, prompts, run, origin)
            if run.tasks:
                await asyncio.wait(run.tasks)
        except asyncio.CancelledError:
            run.interrupted = True
        finally:
            for task in (*run.tasks, shown):
                task.cancel()
            await asyncio.gather(*run.tasks, shown, return_exceptions=True)
            run.seconds = clock.now() - origin
            progress.update(bar, description=_state(run))
    for record in run.records:
        if record.outcome == INTERRUPTED and not record.ended_s:
            record.ended_s = run.seconds
    return run


async def _send_all(
    session: aiohttp.ClientSession,
    target: LoadTarget,
    requests: Sequence[PlannedRequest],
    prompts: Prompts,
    run: LoadRun,
    origin: float,
) -> None:
    loop = asyncio.get_running_loop()
    for planned in requests:
        # Made before it is due, so that a prompt that takes long to make does not make the request late.
        body = target.body(planned, prompts.make(planned))
        await asyncio.sleep(max(0.0, origin + planned.due_s - clock.now()))
        record = RequestRecord(
            index=planned.index,
            tenant=planned.tenant.name,
            due_s=planned.due_s,
            prompt_asked=planned.prompt_tokens,
            output_asked=planned.output_tokens,
            counted=planned.counted,
            priority=planned.priority,
        )
        run.records.append(record)
        if len(run.tasks) >= IN_FLIGHT_MAX:
            record.outcome = NOT_SENT
            record.sent_s = record.ended_s = clock.now() - origin
            continue
        task = loop.create_task(client.send(session, target, planned, body, record, origin))
        run.tasks.add(task)
        task.add_done_callback(run.tasks.discard)


async def _show(run: LoadRun, progress: Progress, bar: object) -> None:
    while True:
        progress.update(bar, completed=len(run.records), description=_state(run))  # type: ignore[arg-type]
        await asyncio.sleep(SHOW_EVERY_S)


def _state(run: LoadRun) -> str:
    return f"sent, {len(run.tasks)} in flight"
