"""Makes a workload of a scenario: draws arrivals and lengths, and checks the keys against each other."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from pydantic import ValidationError

from coordinator.events import Limits
from lab.cluster.run import REQUESTS_MAX
from lab.cluster.workload import Goal, LoadRequest, LoadStepTimes, Loop, PlannedFailure, WorkerSpec, Workload
from lab.scenarios.scenario import CONTEXT_TOKENS, Scenario, ScenarioTraffic, ScenarioWorkers, faults
from launcher.load import traces
from launcher.load.lengths import Lengths, arrival_times
from launcher.sessions import LoadSession, NamedSession, SessionTurn, in_turn, named
from proto.parts import Capacity
from runtime.settings.options import SettingsError
from runtime.settings.roles import CoordinatorSettings
from runtime.tenancy.priority_classes import DEFAULT_PRIORITY_CLASSES
from runtime.tenancy.tenants import Tenants, from_tables

WORKERS_MAX: Final = 4096
BLOCKS_MAX: Final = 1 << 24  # on all workers together: the allocators of so many take about 700 MB
CLIENTS_MAX: Final = 100_000
LOOP_REQUESTS: Final = 16  # of each client in a closed loop, before they repeat
COORDINATOR_OPTIONS: Final = Limits.__dataclass_fields__.keys() & CoordinatorSettings.model_fields.keys()


def build(scenario: Scenario, folder: Path) -> Workload:
    """Makes the workload. Relative paths of traces begin in `folder`. Raises `ValueError` and `TenantsError`, which name the
    key."""
    tenants = from_tables({"tenants": _with_users(scenario), "priority_classes": scenario.priority_classes})
    workers = _workers(scenario)
    _check_failures(scenario, workers)
    block_size = min(worker.capacity.block_size for worker in workers)
    streams = [_with_class(number, traffic, tenants) for number, traffic in enumerate(scenario.traffic)]
    _check_size(scenario)
    arrivals: list[tuple[float, LoadRequest]] = []
    loops: list[Loop] = []
    for number, traffic in enumerate(streams):
        stream = _Stream(traffic, scenario.duration_s, np.random.default_rng([scenario.seed, number]))
        if traffic.arrivals == "closed" or traffic.turns > 1 or traffic.shared_prefix_tokens:
            loops += stream.loops(block_size)
        elif traffic.arrivals in ("trace", "sessions"):
            try:
                if traffic.arrivals == "trace":
                    arrivals += stream.traced(folder)
                else:
                    loops += stream.sessions(folder, block_size)
            except SettingsError as error:
                raise ValueError(f"traffic.{number}.{str(error).removeprefix('--')}") from None
        else:
            arrivals += stream.arrivals()
        if len(arrivals) > REQUESTS_MAX:
            raise ValueError(f"traffic: more than {REQUESTS_MAX:,} requests")
    return Workload(
        workers=tuple(workers),
        arrivals=tuple(sorted(arrivals, key=lambda entry: entry[0])),
        loops=tuple(loops),
        streams=tuple(traffic.name for traffic in streams),
        failures=tuple(PlannedFailure(**dict(failure)) for failure in scenario.failures),
        duration_s=scenario.duration_s,
        settle_s=scenario.settle_s,
        limits=_limits(scenario),
        tenants=tenants,
        hand_over_s=(scenario.hand_over_ms[0] / 1000, scenario.hand_over_ms[1] / 1000),
        seed=scenario.seed,
    )


def _check_failures(scenario: Scenario, workers: Sequence[WorkerSpec]) -> None:
    roles = {worker.name: worker.roles for worker in workers}
    for number, failure in enumerate(scenario.failures):
        if failure.worker not in roles:
            known = ", ".join([worker.name for worker in workers][:8])
            raise ValueError(f"failures.{number}.worker: there is no {failure.worker!r}; there are {known}")
        if failure.kind == "flipped" and len(roles[failure.worker]) > 1:
            raise ValueError(
                f"failures.{number}.worker: {failure.worker} is a mixed worker, which cannot be flipped here"
            )


def _with_users(scenario: Scenario) -> dict[str, Any]:
    """Returns the tables of tenants with the users of all streams."""
    tables = dict(scenario.tenants)
    for number, traffic in enumerate(scenario.traffic):
        if traffic.users:
            own = tables.get(traffic.tenant)
            if not isinstance(own, dict) or not isinstance(own.get("users", {}), dict):
                raise ValueError(f"traffic.{number}.users: there is no organisation {traffic.tenant!r} in [tenants]")
            drawn: dict[str, Any] = {_user(traffic, one): {} for one in range(traffic.users)}
            tables[traffic.tenant] = own | {"users": drawn | own.get("users", {})}
    return tables


def _user(traffic: ScenarioTraffic, number: int) -> str:
    return f"user-{number % traffic.users + 1}" if traffic.users else ""


def _limits(scenario: Scenario) -> Limits:
    for name, value in scenario.coordinator.items():
        if name not in COORDINATOR_OPTIONS:
            known = ", ".join(sorted(COORDINATOR_OPTIONS))
            raise ValueError(f"coordinator.{name}: there is no such option; there are {known}")
        if type(value) not in (int, float):  # settings also take numbers that are written as text
            raise ValueError(f"coordinator.{name}: must be a number")
    try:
        settings = CoordinatorSettings.model_validate(scenario.coordinator)
    except ValidationError as error:
        raise ValueError("\n".join(faults(error, "coordinator."))) from None
    return Limits(**{name: getattr(settings, name) for name in scenario.coordinator})


def _workers(scenario: Scenario) -> list[WorkerSpec]:
    if sum(some.count for some in scenario.workers) > WORKERS_MAX:
        raise ValueError(f"workers: more than {WORKERS_MAX:,}")
    if sum(some.count * (some.kv_tokens // some.block_size) for some in scenario.workers) > BLOCKS_MAX:
        raise ValueError(f"workers: more than {BLOCKS_MAX:,} KV blocks; give them fewer kv_tokens or larger blocks")
    found: list[WorkerSpec] = []
    numbers = {"prefill": 0, "decode": 0, "mixed": 0}
    for some in scenario.workers:
        for _ in range(some.count):
            found.append(_worker(some, f"{some.role}-{numbers[some.role]}"))
            numbers[some.role] += 1
    missing = {"prefill", "decode"} - {role for worker in found for role in worker.roles}
    if missing:
        raise ValueError(f"workers: there is no {' and no '.join(sorted(missing))} worker")
    return found


def _worker(some: ScenarioWorkers, name: str) -> WorkerSpec:
    times = LoadStepTimes(
        prefill_tokens_per_s=some.prefill_tokens_per_s,
        prefill_step_s=some.prefill_step_ms / 1000,
        decode_step_s=some.decode_step_ms / 1000,
        decode_sequence_s=some.decode_ms_per_sequence / 1000,
    )
    blocks = some.kv_tokens // some.block_size
    suffixes = some.role == "decode" and some.computes_suffixes
    capacity = Capacity(
        blocks, some.block_size, some.sequences_max, CONTEXT_TOKENS, some.step_tokens, suffixes, some.fetches
    )
    roles: tuple[Literal["prefill", "decode"], ...] = ("prefill", "decode") if some.role == "mixed" else (some.role,)
    return WorkerSpec(name, roles, capacity, times)


def _with_class(number: int, traffic: ScenarioTraffic, tenants: Tenants) -> ScenarioTraffic:
    """Returns the traffic with its name and priority class, and the goals that the class gives it."""
    policy = tenants.policy(traffic.tenant)
    if policy is None:
        raise ValueError(f"traffic.{number}.tenant: there is no {traffic.tenant!r} in [tenants]")
    if traffic.priority_class and traffic.priority_class not in policy.priority_classes:
        allowed = ", ".join(sorted(policy.priority_classes))
        raise ValueError(
            f"traffic.{number}.priority_class: tenant {traffic.tenant!r} may use {allowed}, not {traffic.priority_class!r}"
        )
    name = traffic.priority_class or policy.priority_class
    targets = tenants.priority_classes[name]
    by_default = tenants.priority_classes == DEFAULT_PRIORITY_CLASSES
    return traffic.model_copy(
        update={
            "name": traffic.name or traffic.tenant,
            "priority_class": name,
            "ttft_ms": traffic.ttft_ms or traffic.deadline_ms or (0.0 if by_default else targets.ttft_ms) or 0.0,
            "tpot_ms": traffic.tpot_ms or targets.tpot_ms or 0.0,
        }
    )


def _check_size(scenario: Scenario) -> None:
    """Before anything is drawn."""
    requests, clients = 0.0, 0
    for number, traffic in enumerate(scenario.traffic):
        length_s = min(traffic.until_s or scenario.duration_s, scenario.duration_s) - traffic.from_s
        if length_s <= 0:
            raise ValueError(f"traffic.{number}.from_s: is not before the scenario's end, {scenario.duration_s:g}")
        if traffic.arrivals in ("closed", "sessions"):
            clients += traffic.clients
        elif traffic.arrivals != "trace":
            requests += traffic.rate_per_s * length_s
    if requests > REQUESTS_MAX:
        raise ValueError(f"traffic: about {requests:,.0f} requests, more than {REQUESTS_MAX:,}")
    if clients > CLIENTS_MAX:
        raise ValueError(f"traffic: {clients:,} clients, more than {CLIENTS_MAX:,}")


class _Stream:
    """Draws the requests of one stream of traffic."""

    def __init__(self, traffic: ScenarioTraffic, duration_s: float, source: np.random.Generator) -> None:
        self._traffic, self._source = traffic, source
        self._until_s = min(traffic.until_s or duration_s, duration_s)
        self._prompts, self._outputs = (Lengths.parse(text) for text in (traffic.prompt_tokens, traffic.output_tokens))

    def arrivals(self) -> Iterator[tuple[float, LoadRequest]]:
        for number, at_s in enumerate(self._times()):
            yield at_s, self._drawn(number)

    def _times(self) -> Iterator[float]:
        traffic = self._traffic
        length_s, most = self._until_s - traffic.from_s, REQUESTS_MAX + 1
        for at_s in arrival_times(traffic.arrivals, traffic.rate_per_s, traffic.cv, length_s, most, self._source):
            yield traffic.from_s + at_s

    def traced(self, folder: Path) -> Iterator[tuple[float, LoadRequest]]:
        """Raises `SettingsError`."""
        traffic = self._traffic
        rows = traces.scaled(
            traces.read(str(folder / Path(traffic.trace).expanduser())),
            from_s=0.0,
            duration_s=self._until_s - traffic.from_s,
            speed=traffic.speed,
            scale_tokens=1.0,
            source=self._source,
        )
        for number, row in enumerate(rows):
            yield traffic.from_s + row.at_s, self._ask(number, row.prompt_tokens, row.output_tokens)

    def loops(self, block_size: int) -> Iterator[Loop]:
        """Yields the clients of closed loops, and sessions that come by themselves. Clients begin one after the other within a
        second, so that they do not act as one client."""
        traffic = self._traffic
        is_closed = traffic.arrivals == "closed"
        clients = (traffic.from_s + n / traffic.clients for n in range(traffic.clients))
        sessions = LOOP_REQUESTS if is_closed else 1
        for client, begins_s in enumerate(clients if is_closed else self._times()):
            if traffic.turns == 1 and not traffic.shared_prefix_tokens:
                asks = tuple(self._drawn(client) for _ in range(LOOP_REQUESTS))
                yield Loop(asks, traffic.think_s, begins_s, self._until_s)
            else:
                asks = tuple(one for number in range(sessions) for one in self._session(client, number, block_size))
                yield Loop(asks, 0.0, begins_s, self._until_s, once=True)

    def _session(self, client: int, number: int, block_size: int) -> Iterator[LoadRequest]:
        traffic, source = self._traffic, self._source
        turns = tuple(
            SessionTurn(self._prompts.draw(source), self._outputs.draw(source), traffic.think_s)
            for _ in range(traffic.turns)
        )
        session = LoadSession(turns, traffic.shared_prefix_tokens)
        for turn in named(session, f"{traffic.name} {client} {number}", block_size, CONTEXT_TOKENS):
            yield self._turn(client, turn)

    def _turn(self, client: int, turn: NamedSession) -> LoadRequest:
        return replace(
            self._ask(client, turn.prompt_tokens, turn.turn.output_tokens),
            block_hashes=turn.prompt_hashes,
            answer_hashes=turn.answer_hashes,
            think_s=turn.turn.think_s,
        )

    def sessions(self, folder: Path, block_size: int) -> Iterator[Loop]:
        """Raises `SettingsError`."""
        traffic = self._traffic
        read = traces.read_sessions(str(folder / Path(traffic.trace).expanduser()))
        for client, own in enumerate(in_turn(read, traffic.clients)):
            asks: list[LoadRequest] = []
            for number, session in enumerate(own):
                turns = named(session, f"{traffic.name} {client} {number}", block_size, CONTEXT_TOKENS)
                asks += [self._turn(client, turn) for turn in turns]
            yield Loop(tuple(asks), 0.0, traffic.from_s + client / traffic.clients, self._until_s, once=True)

    def _drawn(self, number: int) -> LoadRequest:
        return self._ask(number, self._prompts.draw(self._source), self._outputs.draw(self._source))

    def _ask(self, number: int, prompt_tokens: int, output_tokens: int) -> LoadRequest:
        """`number`: of the client or arrival, which decides the user."""
        traffic = self._traffic
        return LoadRequest(
            stream=traffic.name,
            tenant=traffic.tenant,
            priority_class=traffic.priority_class,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            max_tokens=traffic.max_tokens or output_tokens,
            deadline_ms=traffic.deadline_ms,
            goal=Goal(traffic.ttft_ms, traffic.tpot_ms),
            retries=traffic.retries,
            retry_s=traffic.retry_s,
            user=_user(traffic, number),
            deadly_at=traffic.ends_worker_at_token,
        )
