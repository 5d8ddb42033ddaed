"""The file of `crossdock simulate load`: what it may say. `build.py` makes a workload of it, and docs/scenarios/README.md
explains it."""

import tomllib
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from lab.cluster.workload import FailureKind
from launcher.load.lengths import Lengths
from proto.parts import STEP_TOKENS
from runtime.tenancy.faults import explain
from runtime.tenancy.tenants import DEFAULT_TENANT

FILE_BYTES_MAX: Final = 1 << 20
CONTEXT_TOKENS: Final = 1 << 20
ERRORS_SHOWN: Final = 20


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("has characters that cannot be printed")
    return text


def _lengths(value: object) -> str:
    Lengths.parse(str(value))
    return str(value)


def _ascending(numbers: list[float]) -> list[float]:
    if numbers != sorted(numbers):
        raise ValueError("has the most before the least")
    return numbers


_Name = Annotated[str, Field(max_length=129), AfterValidator(_printable)]
_Seconds = Annotated[float, Field(ge=0.0, le=86_400.0)]
_Duration = Annotated[float, Field(gt=0.0, le=86_400.0)]
_Ms = Annotated[float, Field(ge=0.0, le=3_600_000.0)]
_LengthsText = Annotated[str, BeforeValidator(_lengths)]


class _Part(BaseModel):
    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    def _refuse(self, choice: str, only_for: Mapping[str, str]) -> None:
        """A key that has no effect is a mistake. `only_for`: the choices for which each of some keys counts."""
        chosen = getattr(self, choice)
        for key in self.model_fields_set & only_for.keys():
            if chosen not in only_for[key].split():
                raise ValueError(f"{key} has no effect with {choice} = {chosen!r}")


class ScenarioWorkers(_Part):
    """Workers that are alike. They are named `prefill-0`, `decode-0`, `mixed-0` and so on, counted over the whole file."""

    role: Literal["prefill", "decode", "mixed"]
    """A `mixed` worker does both and shares its time between them."""
    count: Annotated[int, Field(ge=1, le=4096)] = 1
    """How many there are."""
    prefill_tokens_per_s: Annotated[float, Field(gt=0.0, le=1e9)] = 8192.0
    """How fast prompts are computed."""
    prefill_step_ms: _Ms = 2.0
    """The time of each prefill step beside its tokens."""
    step_tokens: Annotated[int, Field(ge=1, le=65_536)] = STEP_TOKENS
    """Most prompt tokens of a prefill step."""
    decode_step_ms: _Ms = 20.0
    """The time of each decode step beside its sequences."""
    decode_ms_per_sequence: _Ms = 0.0
    """The time of each decode step for each sequence in it."""
    kv_tokens: Annotated[int, Field(ge=64, le=1 << 32)] = 1_000_000
    """Tokens that its KV cache holds: four blocks at least. Of a mixed worker, a quarter is for prompts."""
    sequences_max: Annotated[int, Field(ge=1, le=65_536)] = 64
    """Most sequences in decode at a time."""
    block_size: Annotated[int, Field(ge=1, le=4096)] = 16
    """Tokens of a KV block."""
    computes_suffixes: bool = True
    """A `decode` worker computes what prompts add to KV that it has, at `prefill_tokens_per_s`, between steps of its streams.
    """
    fetches: bool = True
    """`prefill` workers fetch what `decode` workers have of a prompt and they have not."""

    @model_validator(mode="after")
    def _is_one(self) -> "ScenarioWorkers":
        prefill, decode = "prefill mixed", "decode mixed"
        self._refuse("role", {
            "prefill_step_ms": prefill, "step_tokens": prefill,
            "decode_step_ms": decode, "decode_ms_per_sequence": decode, "computes_suffixes": "decode",
            "fetches": "prefill decode",
        })  # fmt: skip
        if self.kv_tokens < 4 * self.block_size:
            raise ValueError(f"kv_tokens = {self.kv_tokens} is less than four blocks of {self.block_size} tokens")
        return self


class ScenarioTraffic(_Part):
    """A stream of requests that are alike. Lengths are written like `128`, `uniform:64-512` or `lognormal:200,0.8`."""

    name: _Name = ""
    """The name in the tables of figures. Empty: the tenant's name."""
    tenant: Annotated[_Name, Field(min_length=1)] = DEFAULT_TENANT
    """A name of `[tenants]`, or `organisation/user`."""
    users: Annotated[int, Field(ge=0, le=10_000)] = 0
    """Requests come in turn from so many users of the tenant, `user-1`, `user-2` and so on, which are added to its `[tenants]`
    table. A client and a session have one user. Figures are of the organisation. 0: from the tenant itself."""
    priority_class: _Name = ""
    """Empty: the tenant's own."""
    arrivals: Literal["poisson", "constant", "gamma", "trace", "closed", "sessions"] = "poisson"
    """`gamma` comes in bursts. `closed` is a number of clients that each wait for their answer before they ask again.
    `sessions` is a number of clients that play the sessions of a trace, turn by turn."""
    rate_per_s: Annotated[float, Field(gt=0.0, le=1e6)] = 1.0
    """Requests per second on average, for `poisson`, `constant` and `gamma`."""
    cv: Annotated[float, Field(gt=0.0, le=100.0)] = 3.0
    """Coefficient of variation of the gaps between arrivals, for `gamma`."""
    trace: str = ""
    """The file of a `trace`, in a format of `crossdock bench serve --trace`, like a CSV file with the columns `arrival_s`,
    `prompt_tokens`, `output_tokens`; or of `sessions`, in a format of `crossdock bench agents --trace`. A relative path
    begins at the scenario's folder."""
    speed: Annotated[float, Field(gt=0.0, le=1000.0)] = 1.0
    """How much faster a `trace` is played."""
    clients: Annotated[int, Field(ge=1, le=100_000)] = 1
    """How many clients there are, for `closed`. They begin one after the other within the first second."""
    think_s: _Seconds = 0.0
    """How long a client of `closed`, or of a session, waits after an answer. After a failed request it waits a second at
    least, and longer where Retry-After says so."""
    turns: Annotated[int, Field(ge=1, le=1000)] = 1
    """The turns of a session, which each arrival is if they are more than 1; each client of `closed` plays 16. A turn's
    prompt is all that was said before and `prompt_tokens` more."""
    shared_prefix_tokens: Annotated[int, Field(ge=0, le=CONTEXT_TOKENS)] = 0
    """Each prompt begins with so many tokens that all streams with such a prefix have in common."""
    from_s: _Seconds = 0.0
    """When the stream begins."""
    until_s: _Duration | None = None
    """When it ends. By default at the end of the scenario."""
    prompt_tokens: _LengthsText = "1024"
    """Length of the prompts. A trace has its own."""
    output_tokens: _LengthsText = "128"
    """Length of the answers. A trace has its own."""
    max_tokens: Annotated[int, Field(ge=1, le=CONTEXT_TOKENS)] | None = None
    """The request's `max_tokens`. By default as many as the answer will have, as if clients knew."""
    deadline_ms: _Ms = 0.0
    """The deadline for the first token; 0: none."""
    ttft_ms: _Ms = 0.0
    """A request counts as goodput if its first token comes within this. 0: within `deadline_ms`, else its class's
    `ttft_ms`, if there is one."""
    tpot_ms: _Ms = 0.0
    """And if its later tokens take no longer than this on average; only finished requests count. 0: its class's `tpot_ms`,
    if there is one."""
    retries: Annotated[int, Field(ge=0, le=1000)] = 0
    """How often a client comes again when Retry-After told it to."""
    retry_s: _Seconds = 0.0
    """A client comes again after so long, whatever Retry-After says; 0: it obeys."""
    ends_worker_at_token: Annotated[int, Field(ge=0, le=CONTEXT_TOKENS)] | None = None
    """Each request ends the worker that computes this token of its answer; 0: the worker that computes its prompt. The
    worker is started again after 5 s."""

    @model_validator(mode="after")
    def _is_one(self) -> "ScenarioTraffic":
        drawn = "poisson constant gamma closed"
        self._refuse("arrivals", {
            "rate_per_s": "poisson constant gamma", "cv": "gamma", "trace": "trace sessions", "speed": "trace",
            "clients": "closed sessions",
            "think_s": drawn, "prompt_tokens": drawn, "output_tokens": drawn, "turns": drawn,
            "shared_prefix_tokens": drawn,
        })  # fmt: skip
        if "think_s" in self.model_fields_set and self.arrivals != "closed" and self.turns == 1:
            raise ValueError(f"think_s has no effect with arrivals = {self.arrivals!r} and one turn")
        if self.arrivals in ("trace", "sessions") and not self.trace:
            raise ValueError(f"arrivals = {self.arrivals!r} needs a file in trace")
        if self.until_s is not None and self.until_s <= self.from_s:
            raise ValueError(f"until_s = {self.until_s:g} is not after from_s = {self.from_s:g}")
        return self


class FailureOf(_Part):
    """Something that happens to one worker."""

    at_s: _Seconds
    """When it begins."""
    worker: Annotated[_Name, Field(min_length=1)]
    """The worker's name, like `prefill-0`."""
    kind: FailureKind
    """`slow`: its steps take longer. `failing`: it answers, but steps fail at once. `lost`: it is gone with all that it
    holds. `drained`: it gets no new work, and its streams move. `flipped`: it changes its role, and loses its cached KV. It is
    then like the file's first worker of that role."""
    role: Literal["", "prefill", "decode"] = ""
    """The new role, for `flipped`."""
    factor: Annotated[float, Field(gt=0.0, le=1e6)] = 10.0
    """How many times as long each step takes, for `slow`."""
    every: Annotated[int, Field(ge=1, le=1_000_000)] = 1
    """Every n-th step fails, for `failing`."""
    for_s: _Seconds = 0.0
    """After that it is over, or the worker is started again, or changes back; 0: never."""

    @model_validator(mode="after")
    def _is_one(self) -> "FailureOf":
        self._refuse("kind", {"factor": "slow", "every": "failing", "role": "flipped"})
        if self.kind == "flipped" and not self.role:
            raise ValueError("kind = 'flipped' needs a role")
        return self


class Requirement(_Part):
    """A limit on a figure. `crossdock simulate load` ends with status 3 where one is missed."""

    of: Annotated[_Name, Field(min_length=1)] = "all"
    """`all`, `run`, or the name of a stream of traffic, a tenant, a class or a worker."""
    figure: Annotated[str, Field(pattern=r"^[a-z_0-9]+(\.[a-z_0-9]+)?\z")]
    """The figure's name in JSON, like `goodput_share` or `ttft_ms.p90`. Of a figure by window, each window must do."""
    at_least: float | None = None
    """Its least value."""
    at_most: float | None = None
    """Its greatest value."""
    from_s: _Seconds = 0.0
    """Windows before it do not count."""

    @model_validator(mode="after")
    def _is_one(self) -> "Requirement":
        if self.at_least is None and self.at_most is None:
            raise ValueError("needs at_least or at_most")
        if self.from_s and not self.figure.endswith("_by_window"):
            raise ValueError(f"from_s has no effect with figure = {self.figure!r}")
        return self

    def limit(self) -> str:
        """Like `at least 0.5 and at most 1,000`."""
        limits = [f"at least {self.at_least:,g}"] if self.at_least is not None else []
        limits += [f"at most {self.at_most:,g}"] if self.at_most is not None else []
        return " and ".join(limits)


class Scenario(_Part):
    """One run."""

    duration_s: _Duration = 60.0
    """No request comes later."""
    settle_s: _Seconds = 120.0
    """How much longer requests may take to end."""
    seed: Annotated[int, Field(ge=0, le=1 << 62)] = 1
    """The seed of everything that is random. The same seed and file give the same figures to the last bit."""
    hand_over_ms: Annotated[list[_Ms], Field(min_length=2, max_length=2), AfterValidator(_ascending)] = [2.0, 4.0]
    """Least and most that a hand-over of KV takes."""
    coordinator: dict[str, Any] = {}
    """A table of options of the coordinator's scheduling."""
    tenants: dict[str, Any] = {}
    """Tables of tenants, as in the tenants file. Without any there is one, `default`."""
    priority_classes: dict[str, Any] | None = None
    """Tables of priority classes, as in the tenants file. By default its three."""
    workers: Annotated[list[ScenarioWorkers], Field(min_length=1, max_length=1024)]
    """Workers: at least one table for each role, or one with `mixed` workers."""
    traffic: Annotated[list[ScenarioTraffic], Field(min_length=1, max_length=4096)]
    """A table for each stream of requests."""
    failures: Annotated[list[FailureOf], Field(max_length=4096)] = []
    """A table for each thing that happens to a worker."""
    require: Annotated[list[Requirement], Field(max_length=256)] = []
    """A table for each figure that the run must reach."""


def parse(data: bytes) -> Scenario:
    """Raises `ValueError`, with a line for each fault."""
    if len(data) > FILE_BYTES_MAX:
        raise ValueError(f"is larger than {FILE_BYTES_MAX} bytes")
    try:
        content = tomllib.loads(data.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not TOML: {str(error)[:200]}") from None
    try:
        return Scenario.model_validate(content)
    except ValidationError as error:
        raise ValueError("\n".join(faults(error))) from None


def faults(error: ValidationError, prefix: str = "") -> list[str]:
    """One line for each, which begins with the key's path, like `traffic.0.rate_per_s`."""
    return [prefix + explain(details) for details in error.errors(include_url=False)[:ERRORS_SHOWN]]
