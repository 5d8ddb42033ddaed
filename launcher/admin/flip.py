"""`crossdock flip`: change a worker's role while the cluster serves, and see that it has changed."""

import asyncio
import sys
from collections.abc import Callable
from typing import Literal

import uvloop
from pydantic import Field
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn

from launcher.admin.status import ASK_MS, NoAnswer, ObserverOptions, ask, converse, coordinator_of
from proto.drain import FlipAnswer, FlipRequest
from proto.errors import PeerRefused
from proto.messages import Role
from proto.status import FlipStatus, StatusReport, WorkerStatus
from runtime.link.keys import Keys, keys_for
from runtime.process import clock

_LOOK_EVERY_S = 0.1
_FIRST_STEP_S = 2.0  # to wait for it: on an idle cluster none comes
_COMMIT_S = 30.0  # beyond the hand-over, before worker and coordinator give a change up


class FlipSettings(ObserverOptions):
    """Change a worker's role while the cluster serves: prefill, decode, or mixed, which is both.

    The process stays, with its weights and the prompts it has cached. Nothing new is placed on it, what runs there continues
    on other workers, and then it registers in its new role. Returns when it has run its first step there, or, if no request
    comes to it, when it is registered.

    A mixed worker is two to the coordinator, NAME-prefill and NAME-decode, that share the KV cache. Give its NAME alone.

    A process that is started again begins in the role it was configured with.
    """

    worker: str = Field(
        min_length=1,
        max_length=64,
        description="Name of the worker, as in crossdock status; of a mixed one, without -prefill and -decode.",
        json_schema_extra={"argument": "WORKER"},
    )
    role: Literal["prefill", "decode", "mixed"] = Field(
        description="The role it takes: prefill, decode, or mixed.", json_schema_extra={"argument": "ROLE"}
    )
    drain_timeout_s: float = Field(
        0.0,
        ge=0,
        le=86_400,
        description="Seconds that its requests have to end there, before they continue on other workers. With 0 they move at"
        " once, and each stream pauses.",
    )
    force: bool = Field(
        False, description="Do it even if no other worker has its present role. New requests are then refused."
    )


def run(settings: FlipSettings) -> int:
    """Raises `NoAnswer`, `SeveralClusters`, `PeerRefused` or `ConfigError`. Status 1: the worker keeps its role."""
    keys = keys_for(settings, Role.OBSERVER)
    with coordinator_of(settings.coordinator) as coordinator:
        return uvloop.run(_flip(settings, coordinator, keys))


async def _flip(settings: FlipSettings, coordinator: str, keys: Keys | None) -> int:
    role = Role(settings.role)
    request = FlipRequest(settings.worker, role, 1000 * settings.drain_timeout_s, settings.force)
    answer = await converse(coordinator, request, FlipAnswer, ASK_MS, keys)
    if answer.refusal:
        raise PeerRefused(answer.refusal)
    worker = next(worker for worker in answer.workers if process_of(worker) == settings.worker)
    before = role_of(worker)
    columns = (SpinnerColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task(f"draining {settings.worker}")
        flip = await follow(
            coordinator, worker, before, role, settings.drain_timeout_s, _FIRST_STEP_S, ASK_MS, keys,
            lambda state: progress.update(bar, description=f"{state} {settings.worker}"),
        )  # fmt: skip
    if flip.state != "done":
        sys.stderr.write(f"{settings.worker} stays a {before} worker: {flip.failure}\n")
        return 1
    sys.stdout.write(_words(flip) + "\n")
    return 0


async def follow(
    coordinator: str, worker: WorkerStatus, before: Role, role: Role, hand_over_s: float, first_step_s: float,
    timeout_ms: int, keys: Keys | None = None, on_state: Callable[[str], None] = lambda state: None,
) -> FlipStatus:  # fmt: skip
    """Waits until an ordered change is `done` or `failed`, and then for the first step. `worker`: one registration of the
    process, in its old role. Connects to the coordinator for each question, since another coordinator may serve by then."""
    until = clock.now() + hand_over_s + _COMMIT_S
    done_at: float | None = None
    flip = FlipStatus(process_of(worker), worker.pid, before, role, "draining")
    while clock.now() < until:
        try:
            flip = what_became(await ask(coordinator, timeout_ms, keys), worker, before, role)
        except NoAnswer:
            await asyncio.sleep(_LOOK_EVERY_S)
            continue
        on_state(flip.state)
        if flip.state == "failed" or flip.first_step_ms:
            return flip
        if flip.state == "done":
            done_at = done_at or clock.now()
            if clock.now() >= done_at + first_step_s:
                return flip
            until = max(until, done_at + first_step_s + 1.0)
        await asyncio.sleep(_LOOK_EVERY_S)
    failure = "nothing was heard of it in time"
    return FlipStatus(process_of(worker), worker.pid, before, role, "failed", failure=failure)


def process_of(worker: WorkerStatus) -> str:
    """Returns the name of the worker's process."""
    return worker.process or worker.name


def role_of(worker: WorkerStatus) -> Role:
    """Returns the role of the worker's process: mixed if it registers in two roles, since its name then differs from the
    process name."""
    return Role.MIXED if process_of(worker) != worker.name else Role(worker.role)


def what_became(report: StatusReport, worker: WorkerStatus, before: Role, role: Role) -> FlipStatus:
    """Returns the result of this process's last change of role, which should lead to `role`."""
    mine = [one for one in report.flips if one.worker == process_of(worker) and one.pid == worker.pid]
    if mine:
        return mine[-1]
    # Another coordinator serves by now and knows nothing of the change.
    found = [one for one in report.workers if process_of(one) == process_of(worker) and one.pid == worker.pid]
    state, failure = "registering", ""
    if {one.role for one in found} == set(role.registers_as):
        state = "done"
    elif found and not any(one.draining for one in found):
        state, failure = "failed", "the coordinator was lost meanwhile; try again"
    return FlipStatus(process_of(worker), worker.pid, before, role, state, failure=failure)


def _words(flip: FlipStatus) -> str:
    parts = [f"{flip.worker} is a {flip.role} worker now"]
    if flip.commit_ms:
        parts.append(f"nothing was left on it after {flip.drained_ms:.0f} ms")
        parts.append(f"it was registered {flip.commit_ms:.0f} ms later")
    if flip.first_step_ms:
        parts.append(f"its first step was done after another {flip.first_step_ms:.0f} ms")
    else:
        parts.append("no request has come to it yet")
    return f"{parts[0]}: {', '.join(parts[1:])}"
