"""`crossdock drain`: take a worker out of service without ending it, and back in."""

import asyncio
import sys
from collections.abc import Set

import uvloop
from pydantic import Field
from rich.console import Console
from rich.progress import Progress

from launcher.admin.status import ASK_MS, NoAnswer, ObserverOptions, ask, converse, coordinator_of
from proto.drain import DrainAnswer, DrainRequest
from proto.errors import PeerRefused
from proto.messages import Role
from proto.status import Process
from runtime.link.keys import Keys, keys_for
from runtime.process import clock
from runtime.process.exits import HUNG_EXIT

_LOOK_EVERY_S = 0.25
_TIMEOUT_S = 10.0  # added to the hand-over time, also for a coordinator that is started again


class DrainSettings(ObserverOptions):
    """Place nothing new on a worker. Its requests continue there for a while, then on other workers.

    Of a mixed worker NAME, both roles are drained, or, with NAME-prefill or NAME-decode, that one alone.

    The worker stays up until it is ended or put back with --undo. Ending it with SIGTERM drains it too.

    With --wait, status 1 says that something is left there, and 75 that the worker hung and was given up.
    """

    worker: str = Field(
        min_length=1,
        max_length=64,
        description="Name of the worker, as in crossdock status.",
        json_schema_extra={"argument": "WORKER"},
    )
    undo: bool = Field(False, description="Put the worker back into service.")
    wait: bool = Field(False, description="Return when nothing is left on the worker.")
    drain_timeout_s: float = Field(
        20.0,
        ge=0,
        le=86_400,
        description="Seconds that its requests have to end there, before they continue on other workers. With 0 they move at"
        " once, and each stream pauses.",
    )


def run(settings: DrainSettings) -> int:
    """Raises `NoAnswer`, `SeveralClusters`, `PeerRefused` or `ConfigError`. Status 1: the worker still holds something when
    the time is over; `HUNG_EXIT`: the worker hung."""
    keys = keys_for(settings, Role.OBSERVER)
    with coordinator_of(settings.coordinator) as coordinator:
        return uvloop.run(_drain(settings, coordinator, keys))


async def _drain(settings: DrainSettings, coordinator: str, keys: Keys | None) -> int:
    request = DrainRequest(settings.worker, settings.undo, 1000 * settings.drain_timeout_s)
    answer = await converse(coordinator, request, DrainAnswer, ASK_MS, keys)
    if answer.refusal:
        raise PeerRefused(answer.refusal)
    named = [worker for worker in answer.workers if settings.worker in (worker.name, worker.process)]
    requests = sum(worker.requests for worker in named)
    if settings.undo:
        _say(f"{settings.worker} takes requests again")
    elif not settings.wait:
        _say(f"{settings.worker} gets nothing new; {_left(requests)} there, for {settings.drain_timeout_s:g} s at most")
    else:
        return await _wait(
            settings, coordinator, {Process(worker.name, worker.pid) for worker in named}, requests, keys
        )
    return 0


async def _wait(
    settings: DrainSettings, coordinator: str, named: Set[Process], at_first: int, keys: Keys | None
) -> int:
    """Waits until the worker holds nothing, hangs, or is gone. Connects to the coordinator for each question, since another
    coordinator may serve by then."""
    until = clock.now() + settings.drain_timeout_s + _TIMEOUT_S
    name, left = settings.worker, at_first
    with Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task(f"draining {name}", total=at_first)
        while left and clock.now() < until:
            await asyncio.sleep(_LOOK_EVERY_S)
            try:
                report = await ask(coordinator, ASK_MS, keys)
            except NoAnswer:
                continue
            left = sum(found.requests for found in report.workers if Process(found.name, found.pid) in named)
            progress.update(bar, completed=at_first - left)
            if not named.isdisjoint(report.hung):
                _say(f"{name} hung and was given up; what ran there goes on elsewhere, as after a loss")
                return HUNG_EXIT
    _say(f"{name}: {_left(left)} there" if left else f"{name} is drained")
    return 1 if left else 0


def _left(requests: int) -> str:
    return f"{requests} request{'s' * (requests != 1)} still {'is' if requests == 1 else 'are'}"


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
