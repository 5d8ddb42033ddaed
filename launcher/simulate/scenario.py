"""The file of `crossdock simulate load`: what it may say, and what is made of it. docs/policy.md has examples."""

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from coordinator.events import Limits
from launcher.load import traces
from launcher.load.lengths import Lengths, arrival_times
from proto.held import Capacity
from runtime.settings.options import SettingsError
from runtime.tenancy.faults import explain
from runtime.tenancy.tenants import DEFAULT_TENANT, Tenants, TenantsError, from_tables, open_tenants
from simulation.load.workload import Ask, Failure, FailureKind, Goal, Loop, StepTimes, WorkerSpec, Workload

FILE_BYTES_MAX = 1 << 20
REQUESTS_MAX = 1_000_000
CONTEXT_TOKENS = 1 << 20
_Name = Annotated[str, Field(min_length=1, max_length=64)]
_Seconds = Annotated[float, Field(ge=0.0, le=86_400.0)]
_Ms = Annotated[float, Field(ge=0.0, le=3_600_000.0)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)


class Workers(_Part):
    """Workers that are alike. They are named `prefill-0`, `decode-0`, `mixed-0` and so on, counted over the whole file."""

    role: Literal["prefill", "decode", "mixed"]
    count: Annotated[int, Field(ge=1, le=4096)] = 1
    prefill_tokens_per_s: Annotated[float, Field(gt=0.0, le=1e9)] = 8192.0
    prefill_step_ms: _Ms = 2.0
    """What each prefill step takes beside its tokens."""
    decode_step_ms: _Ms = 20.0
    """What each decode step takes beside its sequences."""
    decode_ms_per_sequence: _Ms = 0.0
    kv_tokens: Annotated[int, Field(ge=64, le=1 << 32)] = 1_000_000
    sequences_max: Annotated[int, Field(ge=1, le=65_536)] = 64
    block_size: Annotated[int, Field(ge=1, le=4096)] = 16


class Traffic(_Part):
    """A stream of requests that are alike. Lengths are written like `128`, `uniform:64-512` or `lognormal:200,0.8`."""

    name: str = ""
    """In the table of figures. Empty: the tenant's name."""
    tenant: _Name = DEFAULT_TENANT
    priority_class: str = ""
    """Empty: the tenant's own."""
    arrivals: Literal["poisson", "constant", "gamma", "trace", "closed"] = "poisson"
    """`gamma` comes in bursts. `closed` is a number of clients that each wait for their answer before they ask again."""
    rate_per_s: Annotated[float, Field(gt=0.0, le=1e6)] = 1.0
    cv: Annotated[float, Field(gt=0.0, le=100.0)] = 3.0
    """Of `gamma`: coefficient of variation of the gaps between arrivals."""
    trace: str = ""
    """Of `trace`: a file in a format of `crossdock bench serve --trace`, which has the lengths as well."""
    speed: Annotated[float, Field(gt=0.0, le=1000.0)] = 1.0
    """Of `trace`: how much faster it is played."""
    clients: Annotated[int, Field(ge=1, le=100_000)] = 1
    think_s: _Seconds = 0.0
    from_s: _Seconds = 0.0
    until_s: _Seconds | None = None
    """None: the scenario's duration."""
    prompt_tokens: str | int = 1024
    output_tokens: str | int = 128
    max_tokens: Annotated[int, Field(ge=1, le=CONTEXT_TOKENS)] | None = None
    """None: as many as the answer has. Clients that leave it out are best described by the gateway's default, 4096."""
    deadline_ms: _Ms = 0.0
    """For the first token; 0: none."""
    ttft_ms: _Ms = 0.0
    """A request counts as goodput if its first token comes within this. 0: within its deadline, else its class's `ttft_ms`."""
    tpot_ms: _Ms = 0.0
    """And if its later tokens take no longer than this on average. 0: its class's `tpot_ms`."""
    retries: Annotated[int, Field(ge=0, le=1000)] = 0
    """How often a client comes again when Retry-After told it to."""


class FailureOf(_Part):
    """Something that happens to one worker."""

    at_s: _Seconds
    worker: _Name
    kind: FailureKind
    factor: Annotated[float, Field(gt=0.0, le=1e6)] = 10.0
    """Of `slow`: how many times as long each step takes."""
    for_s: _Seconds = 0.0
    """After that it is over, or the worker is started again; 0: never."""


class Scenario(_Part):
    """One run."""

    duration_s: Annotated[float, Field(gt=0.0, le=86_400.0)] = 60.0
    """No request comes later."""
    settle_s: _Seconds = 120.0
    """How much longer requests may take to end."""
    seed: Annotated[int, Field(ge=0, le=1 << 62)] = 1
    hand_over_ms: Annotated[list[_Ms], Field(min_length=2, max_length=2)] = [2.0, 4.0]
    """Least and most that a hand-over of KV takes."""
    coordinator: dict[str, bool | int | float] = {}
    """Options of the coordinator, like `kv_overcommit`."""
    tenants: dict[str, Any] = {}
    """As in the tenants file."""
    priority_classes: dict[str, Any] | None = None
    """As in the tenants file."""
    workers: Annotated[list[Workers], Field(min_length=1, max_length=1024)]
    traffic: Annotated[list[Traffic], Field(min_length=1, max_length=4096)]
    failures: Annotated[list[FailureOf], Field(max_length=4096)] = []


def read(path: str, seed: int | None = None) -> Workload:
    """Raises `SettingsError`, which names the file and the key at fault."""
    file = Path(path).expanduser()
    try:
        if file.stat().st_size > FILE_BYTES_MAX:
            raise SettingsError(f"SCENARIO: {path} is larger than {FILE_BYTES_MAX} bytes")
        scenario = Scenario.model_validate(tomllib.loads(file.read_text(encoding="utf-8")))
        if seed is not None:
            scenario = scenario.model_copy(update={"seed": seed})
        return to_workload(scenario, file.parent)
    except OSError as error:
        raise SettingsError(f"SCENARIO: cannot read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SettingsError(f"SCENARIO: {path} is not TOML: {str(error)[:200]}") from None
    except ValidationError as error:
        lines = [explain(details) for details in error.errors(include_url=False)[:20]]
        raise SettingsError("\n".join(f"SCENARIO: {path}: {line}" for line in lines)) from None
    except (TenantsError, ValueError) as error:
        raise SettingsError(f"SCENARIO: {path}: {error}") from None


def to_workload(scenario: Scenario, folder: Path) -> Workload:
    """`folder`: where relative paths of traces begin. Raises `ValueError`, `TenantsError` and `SettingsError`."""
    tenants = _tenants(scenario)
    workers = _workers(scenario)
    names = {worker.name for worker in workers}
    for failure in scenario.failures:
        if failure.worker not in names:
            raise ValueError(
                f"failures: there is no worker {failure.worker!r}; there are {', '.join(sorted(names)[:8])}"
            )
    arrivals: list[tuple[float, Ask]] = []
    loops: list[Loop] = []
    for number, traffic in enumerate(scenario.traffic):
        traffic = _with_class(traffic, tenants)
        source = np.random.default_rng([scenario.seed, number])
        until_s = min(traffic.until_s or scenario.duration_s, scenario.duration_s)
        if traffic.arrivals == "closed":
            loops += _loops(traffic, until_s, source)
        else:
            arrivals += _arrivals(traffic, until_s, source, folder)
    if len(arrivals) > REQUESTS_MAX:
        raise ValueError(f"traffic: more than {REQUESTS_MAX:,} requests")
    return Workload(
        workers=tuple(workers),
        arrivals=tuple(sorted(arrivals, key=lambda entry: entry[0])),
        loops=tuple(loops),
        failures=tuple(Failure(**dict(failure)) for failure in scenario.failures),
        duration_s=scenario.duration_s,
        settle_s=scenario.settle_s,
        limits=_limits(scenario),
        tenants=tenants,
        hand_over_s=(scenario.hand_over_ms[0] / 1000, scenario.hand_over_ms[1] / 1000),
        seed=scenario.seed,
    )


def _tenants(scenario: Scenario) -> Tenants:
    if not scenario.tenants and scenario.priority_classes is None:
        return open_tenants()
    tables: dict[str, object] = {"tenants": scenario.tenants}
    if scenario.priority_classes is not None:
        tables["priority_classes"] = scenario.priority_classes
    return from_tables(tables)


def _limits(scenario: Scenario) -> Limits:
    known = {name for name, value in vars(Limits()).items() if isinstance(value, bool | int | float)}
    for name in scenario.coordinator:
        if name not in known:
            raise ValueError(f"coordinator.{name}: there is no such option; there are {', '.join(sorted(known))}")
    return replace(Limits(), **scenario.coordinator)  # type: ignore[arg-type]


def _workers(scenario: Scenario) -> list[WorkerSpec]:
    found: list[WorkerSpec] = []
    numbers = {"prefill": 0, "decode": 0, "mixed": 0}
    for some in scenario.workers:
        times = StepTimes(
            prefill_tokens_per_s=some.prefill_tokens_per_s,
            prefill_step_s=some.prefill_step_ms / 1000,
            decode_step_s=some.decode_step_ms / 1000,
            decode_sequence_s=some.decode_ms_per_sequence / 1000,
        )
        capacity = Capacity(some.kv_tokens // some.block_size, some.block_size, some.sequences_max, CONTEXT_TOKENS)
        for _ in range(some.count):
            name = f"{some.role}-{numbers[some.role]}"
            numbers[some.role] += 1
            roles: tuple[Literal["prefill", "decode"], ...] = (
                ("prefill", "decode") if some.role == "mixed" else (some.role,)
            )
            found.append(WorkerSpec(name, roles, capacity, times))
    missing = {"prefill", "decode"} - {role for worker in found for role in worker.roles}
    if missing:
        raise ValueError(f"workers: there is no {' and no '.join(sorted(missing))} worker")
    return found


def _with_class(traffic: Traffic, tenants: Tenants) -> Traffic:
    """With the priority class that its requests come to, and the goals that it has from there."""
    policy = tenants.policy(traffic.tenant)
    if policy is None:
        raise ValueError(f"traffic: there is no tenant {traffic.tenant!r}")
    if traffic.priority_class and traffic.priority_class not in policy.priority_classes:
        allowed = ", ".join(sorted(policy.priority_classes))
        raise ValueError(f"traffic: tenant {traffic.tenant!r} may use {allowed}, not {traffic.priority_class!r}")
    name = traffic.priority_class or policy.priority_class
    targets = tenants.priority_classes[name]
    return traffic.model_copy(
        update={
            "priority_class": name,
            "ttft_ms": traffic.ttft_ms or traffic.deadline_ms or targets.ttft_ms or 0.0,
            "tpot_ms": traffic.tpot_ms or targets.tpot_ms or 0.0,
        }
    )


def _ask(traffic: Traffic, prompt_tokens: int, output_tokens: int) -> Ask:
    return Ask(
        stream=traffic.name or traffic.tenant,
        tenant=traffic.tenant,
        priority_class=traffic.priority_class,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        max_tokens=traffic.max_tokens or output_tokens,
        deadline_ms=traffic.deadline_ms,
        goal=Goal(traffic.ttft_ms, traffic.tpot_ms),
        retries=traffic.retries,
    )


def _drawn(traffic: Traffic, source: np.random.Generator) -> Ask:
    prompt_tokens = Lengths.parse(str(traffic.prompt_tokens)).draw(source)
    return _ask(traffic, prompt_tokens, Lengths.parse(str(traffic.output_tokens)).draw(source))


def _arrivals(traffic: Traffic, until_s: float, source: np.random.Generator, folder: Path) -> list[tuple[float, Ask]]:
    if traffic.arrivals == "trace":
        if not traffic.trace:
            raise ValueError("traffic: arrivals = 'trace' needs a file in `trace`")
        rows = traces.read(str(folder / traffic.trace))
        times = [(traffic.from_s + row.at_s / traffic.speed, row) for row in rows]
        return [
            (at_s, _ask(traffic, row.prompt_tokens, max(row.output_tokens, 1))) for at_s, row in times if at_s < until_s
        ]
    length_s = until_s - traffic.from_s
    found = arrival_times(traffic.arrivals, traffic.rate_per_s, traffic.cv, length_s, REQUESTS_MAX + 1, source)
    return [(traffic.from_s + at_s, _drawn(traffic, source)) for at_s in found]


def _loops(traffic: Traffic, until_s: float, source: np.random.Generator) -> list[Loop]:
    """Clients begin one after the other within the first second, so that they do not act as one."""
    return [
        Loop(
            tuple(_drawn(traffic, source) for _ in range(16)),
            traffic.think_s,
            traffic.from_s + number / traffic.clients,
            until_s,
        )
        for number in range(traffic.clients)
    ]
