"""Every request of a run, from settings and a seed: when, from whom, how long, and whether its client leaves.

All of it is drawn before the first request is sent, so that the same seed sends the same load to any server."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from launcher.load import traces
from launcher.load.lengths import Lengths, arrival_kind, arrival_times
from launcher.load.settings import LoadSettings, TargetSettings
from launcher.load.tenants import LoadTenant, parse_abuser, parse_tenants
from launcher.load.traces import MOONCAKE_BLOCK_TOKENS, TraceRow
from runtime.settings.options import SettingsError

NEVER = -1
REQUESTS_MAX = 1_000_000
PREFIXES = 4  # different ones
CANCEL_WAIT_S = 2.0  # latest time after sending at which a client leaves
_TIMES, _LENGTHS, _TENANTS, _PREFIXES, _CANCELS, _, _ABUSE = range(7)
"""Separate random streams, so that a change of one setting does not change what is drawn for the others."""


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    index: int
    due_s: float  # since the run began
    tenant: LoadTenant
    priority: str
    prompt_tokens: int
    output_tokens: int
    prefix: int = NEVER  # number of the common prefix that it begins with
    blocks: tuple[int, ...] = ()  # ids of its prompt's blocks, where a trace says so
    cancel_tokens: int = NEVER  # after which the client leaves
    cancel_s: float = NEVER  # after sending, until the client leaves, unless `cancel_tokens` is set
    counted: bool = True  # false in the warm-up


@dataclass(frozen=True)
class LoadPlan:
    requests: tuple[PlannedRequest, ...]
    block_tokens: int  # tokens of each of `PlannedRequest.blocks`
    cut: int  # requests shortened to fit the model's context


def tenants_of(settings: TargetSettings) -> list[LoadTenant]:
    """The tenants, at least one. Raises `SettingsError`."""
    abuser = settings.abuser if isinstance(settings, LoadSettings) else ""
    try:  # here and not in the settings: their errors show the value, and so the keys
        found = parse_tenants(settings.tenant)
    except ValueError as error:
        raise SettingsError(f"--tenant: {error}") from None
    if not any(tenant.share for tenant in found):
        found.insert(0, LoadTenant("default"))
    if abuser:
        try:
            found.append(parse_abuser(abuser))
        except ValueError as error:
            raise SettingsError(f"--abuser: {error}") from None
    if len({tenant.name for tenant in found}) != len(found):
        raise SettingsError("--abuser: names a tenant that is in the mix already")
    return found


def make_plan(settings: LoadSettings, tenants: Sequence[LoadTenant], context_tokens: int) -> LoadPlan:
    """Draws the requests. `context_tokens`: the model's context; 0 if unknown. Raises `SettingsError` if nothing would be
    sent."""

    def source(stream: int) -> np.random.Generator:
        return np.random.default_rng([settings.seed, stream])

    rows = _rows(settings, source(_TIMES), source(_LENGTHS))
    if not any(row.at_s >= settings.warmup_s for row in rows):
        option = "--trace" if settings.trace else "--rate"
        raise SettingsError(f"{option}: no request comes between --warmup-s and --duration")
    senders = [tenant for tenant in tenants if not tenant.abuse]
    shares = np.array([tenant.share for tenant in senders])
    chosen = source(_TENANTS).choice(len(senders), size=len(rows), p=shares / shares.sum())
    pairs = [(row, senders[index]) for row, index in zip(rows, chosen.tolist(), strict=True)]
    for number, tenant in enumerate(tenants):
        if tenant.abuse:
            pairs += [(row, tenant) for row in _abuse(settings, rows, tenant.abuse, source(_ABUSE + number))]
    pairs.sort(key=lambda pair: pair[0].at_s)
    return _planned(settings, pairs[:REQUESTS_MAX], context_tokens, source)


def _rows(settings: LoadSettings, times: np.random.Generator, lengths: np.random.Generator) -> list[TraceRow]:
    if settings.trace:
        rows = traces.scaled(
            traces.read(settings.trace),
            from_s=settings.from_s,
            duration_s=settings.duration_s,
            speed=settings.speed,
            scale_tokens=settings.scale_tokens,
            source=times,
        )
        return rows[:REQUESTS_MAX]
    prompts, outputs = Lengths.parse(settings.prompt_tokens), Lengths.parse(settings.output_tokens)
    arrivals = arrival_times(
        arrival_kind(settings.cv), settings.rate, settings.cv, settings.duration_s, REQUESTS_MAX, times
    )
    return [TraceRow(at_s, prompts.draw(lengths), outputs.draw(lengths)) for at_s in arrivals]


def _abuse(
    settings: LoadSettings, rows: Sequence[TraceRow], factor: float, source: np.random.Generator
) -> list[TraceRow]:
    """Draws Poisson arrivals at `factor` times the rate of `rows`, with lengths drawn from `rows`."""
    rate = factor * len(rows) / settings.duration_s
    times = arrival_times("poisson", rate, 1.0, settings.duration_s, REQUESTS_MAX, source)
    return [replace(rows[int(source.integers(len(rows)))], at_s=at_s, blocks=()) for at_s in times]


def _planned(
    settings: LoadSettings,
    pairs: Sequence[tuple[TraceRow, LoadTenant]],
    context_tokens: int,
    source: Callable[[int], np.random.Generator],
) -> LoadPlan:
    prefixes, cancels = source(_PREFIXES), source(_CANCELS)
    cut = 0
    planned = []
    for index, (row, tenant) in enumerate(pairs):
        prompt, output = row.prompt_tokens, max(1, row.output_tokens)
        prefix = int(prefixes.integers(PREFIXES)) if prefixes.random() < settings.prefix_share else NEVER
        if prefix != NEVER:
            prompt = max(prompt, settings.prefix_tokens + 1)
        if context_tokens and prompt + output > context_tokens:
            cut += 1
            output = min(output, max(1, context_tokens // 2))
            prompt = min(prompt, context_tokens - output)
        leaves, by_time, where = cancels.random(3).tolist()
        cancel = leaves < settings.cancel_share
        planned.append(
            PlannedRequest(
                index=index,
                due_s=row.at_s,
                tenant=tenant,
                priority=tenant.priority,
                prompt_tokens=prompt,
                output_tokens=output,
                prefix=prefix,
                blocks=row.blocks if prefix == NEVER else (),
                cancel_tokens=1 + int(where * (output - 1)) if cancel and by_time < 0.5 else NEVER,
                cancel_s=where * CANCEL_WAIT_S if cancel and by_time >= 0.5 else NEVER,
                counted=row.at_s >= settings.warmup_s,
            )
        )
    block_tokens = max(1, round(MOONCAKE_BLOCK_TOKENS * settings.scale_tokens))
    return LoadPlan(tuple(planned), block_tokens, cut)
