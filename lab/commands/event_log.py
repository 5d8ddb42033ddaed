"""Reads steps, hand-overs and requests from a coordinator's event log."""

from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from coordinator.core import Core
from coordinator.event_log.format import EventLogError
from coordinator.event_log.replay import Replay
from coordinator.events import Action, Event, PeerUp, Received
from proto.messages import Chunk, Finished, HandedOver, Hello, Role, StepDone, Submit
from proto.parts import Capacity
from runtime.settings.options import SettingsError


@dataclass(frozen=True)
class LoggedStep:
    at_s: float
    worker: int
    chunks: tuple[Chunk, ...]
    ms: float

    @property
    def tokens(self) -> int:
        return sum(chunk.length for chunk in self.chunks)

    @property
    def pairs(self) -> float:
        return sum(chunk.length * (chunk.start + chunk.length / 2) for chunk in self.chunks)


@dataclass
class Logged:
    """Times in seconds of the coordinator's clock."""

    steps: list[LoggedStep] = field(default_factory=list)
    hand_overs: dict[str, HandedOver] = field(default_factory=dict)
    submitted: dict[str, tuple[float, Submit]] = field(default_factory=dict)
    output_tokens: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    capacities: dict[Role, Capacity] = field(default_factory=dict)
    hosts: set[str] = field(default_factory=set)
    models: set[str] = field(default_factory=set)
    step_tokens: int = 0
    attention_tokens: int = 0
    cached_tokens: dict[str, int] = field(default_factory=dict)  # of each prompt, as its prefill worker found them

    def steps_of(self) -> dict[str, list[LoggedStep]]:
        """The steps of each request."""
        found: dict[str, list[LoggedStep]] = defaultdict(list)
        for step in self.steps:
            for chunk in step.chunks:
                found[chunk.request_id].append(step)
        return found

    def before(self, core: Core, event: Event, now: float) -> None:
        if isinstance(event, PeerUp) and event.hello.capacity is not None:
            self._worker_up(event.hello, event.hello.capacity)
        if not isinstance(event, Received):
            return
        match event.message:
            case StepDone(_, chunks, ms) if chunks and ms > 0:
                self.steps.append(LoggedStep(now, event.incarnation, chunks, ms))
                for chunk in chunks:
                    self.cached_tokens.setdefault(chunk.request_id, chunk.start)
            case HandedOver() as done:
                self.hand_overs[done.request_id] = done
            case Submit() as submit:
                self.submitted.setdefault(submit.request_id, (now, submit))
            case Finished() as done:
                self.output_tokens[done.request_id] += done.output_tokens

    def _worker_up(self, hello: Hello, capacity: Capacity) -> None:
        self.capacities[hello.role] = capacity
        self.hosts.add(hello.host)
        self.models.add(hello.model)
        self.attention_tokens = self.attention_tokens or hello.attention_tokens

    def after(self, core: Core, event: Event, now: float, actions: list[Action]) -> None:
        """Ignores the core's actions."""


def read(path: Path, option: str) -> Logged:
    """Reads an event log, up to the last whole record if it is still being written. Raises `SettingsError`."""
    logged, path = Logged(), path.expanduser()
    try:
        with path.open("rb") as file:
            again = Replay(file)
            logged.step_tokens = again.header.limits.step_tokens
            difference = again.run(logged)
            if not logged.step_tokens and Role.PREFILL in logged.capacities:
                logged.step_tokens = logged.capacities[Role.PREFILL].step_tokens
    except (OSError, EventLogError) as error:
        raise SettingsError(f"{option}: {path}: {error}") from None
    if difference is not None:
        raise SettingsError(f"{option}: {path} differs from event {difference.number} on; see crossdock replay")
    return logged
