"""The content of a scenario: workers, requests, clients that wait for their answers, and failures. Pure data."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from coordinator.events import Limits
from lab.cluster.surroundings import Timing
from proto.parts import Capacity
from runtime.tenancy.tenants import Tenants, open_tenants

FailureKind = Literal["slow", "failing", "lost", "drained", "flipped"]


@dataclass(frozen=True)
class LoadStepTimes(Timing):
    """How fast one worker is. A prefill step takes `prefill_step_s` and the tokens' share of a second, a decode step
    `decode_step_s` and `decode_sequence_s` for each sequence."""

    decode_sequence_s: float = 0.0
    factor: float = 1.0  # on the time of every step

    def prefill_s(self, tokens: int) -> float:
        return self.factor * super().prefill_s(tokens)

    def decode_s(self, streams: int) -> float:
        return self.factor * (self.decode_step_s + streams * self.decode_sequence_s)


@dataclass(frozen=True)
class WorkerSpec:
    """One process; a mixed one has both roles and shares its time between them."""

    name: str
    roles: tuple[Literal["prefill", "decode"], ...]
    capacity: Capacity  # the two roles of a mixed worker share the blocks
    times: LoadStepTimes


@dataclass(frozen=True)
class Goal:
    """A request that finishes within both counts as goodput; 0 is no limit."""

    ttft_ms: float = 0.0
    tpot_ms: float = 0.0


@dataclass(frozen=True)
class LoadRequest:
    """One request, apart from when it comes."""

    stream: str  # the scenario's name for its traffic
    tenant: str
    priority_class: str
    prompt_tokens: int
    output_tokens: int
    max_tokens: int
    deadline_ms: float
    goal: Goal
    retries: int  # after rejections that name a time
    retry_s: float = 0.0  # until it comes again; 0: as told
    block_hashes: bytes = b""  # of the prompt; empty: nothing is looked up or kept
    answer_hashes: bytes = b""  # of the full blocks after the prompt's
    think_s: float = 0.0  # after the end of a session's last turn
    user: str = ""  # of the tenant; empty: the tenant itself
    deadly_at: int | None = None  # token of the answer that ends its worker; 0: its prompt does


@dataclass(frozen=True)
class Loop:
    """A client that sends the next request `think_s` after the end of the last one, from `from_s` until `until_s`. After a
    request that did not finish it waits at least a second."""

    asks: tuple[LoadRequest, ...]  # used one after the other, and again from the start
    think_s: float
    from_s: float
    until_s: float
    once: bool = False  # turns of sessions, each with its own `think_s`; none is repeated


@dataclass(frozen=True)
class PlannedFailure:
    at_s: float
    worker: str
    kind: FailureKind
    factor: float = 10.0  # on the time of each step, for `slow`
    every: int = 1  # n-th step fails, for `failing`
    role: str = ""  # the new one, for `flipped`
    for_s: float = 0.0  # until it is as before, started again or flipped back; 0: never


@dataclass(frozen=True)
class Workload:
    workers: tuple[WorkerSpec, ...]
    arrivals: tuple[tuple[float, LoadRequest], ...]
    loops: tuple[Loop, ...] = ()
    failures: tuple[PlannedFailure, ...] = ()
    streams: tuple[str, ...] = ()  # in the order of the tables; other names come after them
    duration_s: float = 60.0
    settle_s: float = 120.0  # after them, in which requests can end
    limits: Limits = field(default_factory=Limits)
    tenants: Tenants = field(default_factory=open_tenants)
    hand_over_s: tuple[float, float] = (0.002, 0.004)
    report_s: float = 0.001
    seed: int = 1

    @property
    def block_size(self) -> int:
        return min(worker.capacity.block_size for worker in self.workers)

    def first_with(self, role: str) -> WorkerSpec:
        return next(worker for worker in self.workers if role in worker.roles)

    def by_name(self) -> Mapping[str, WorkerSpec]:
        return {worker.name: worker for worker in self.workers}
