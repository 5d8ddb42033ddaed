"""The traffic that `crossdock tune` plays: a trace in any of the formats, an event log, or a mix."""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from coordinator.event_log.format import MAGIC
from lab.commands import event_log
from lab.commands.settings import TrafficSettings
from lab.play.request import Sent
from lab.profile import Profile, ProfileError, decoded, merged
from lab.sessions import apart, beside, played
from lab.traffic import fitted
from launcher.load import traces
from launcher.load.plan import make_plan
from launcher.load.settings import LoadSettings
from launcher.load.tenants import LoadTenant
from launcher.load.traces import MOONCAKE_BLOCK_TOKENS, TraceRow
from runtime.settings.options import SettingsError
from runtime.tenancy.priority_classes import DEFAULT_PRIORITY_CLASSES

PROFILE_BYTES_MAX = 16 << 20


def load_profile(path: str, option: str = "--profile") -> Profile:
    """Raises `SettingsError`."""
    file = Path(path).expanduser()
    try:
        if file.stat().st_size > PROFILE_BYTES_MAX:
            raise SettingsError(f"{option}: {path} is larger than {PROFILE_BYTES_MAX} bytes")
        return decoded(file.read_bytes(), path)
    except OSError as error:
        raise SettingsError(f"{option}: {path}: {error.strerror}; crossdock calibrate makes one") from None
    except ProfileError as error:
        raise SettingsError(f"{option}: {error}") from None


def profile_of(settings: TrafficSettings) -> Profile:
    """Returns the profile of `--profile`, or one merged from both kinds of hardware. Raises `SettingsError`."""
    kinds = settings.prefill_profile, settings.decode_profile
    if not any(kinds):
        return load_profile(settings.profile)
    if not all(kinds):
        raise SettingsError("--prefill-profile and --decode-profile are only of use together")
    prefill, decode = load_profile(kinds[0], "--prefill-profile"), load_profile(kinds[1], "--decode-profile")
    check_model(prefill, decode.about.get("model", ""), "--decode-profile", force=settings.force)
    return merged(prefill, decode)


def check_model(profile: Profile, model: str, option: str, *, force: bool) -> None:
    """Raises `SettingsError` if the profile is known to be of another model than the one that `option` names."""
    known = profile.about.get("model")
    if known and model and known != model and not force:
        raise SettingsError(
            f"{option}: of the model {model}, but the profile is of {known}; --force uses it all the same"
        )


def block_tokens(settings: TrafficSettings) -> int:
    return max(1, round(MOONCAKE_BLOCK_TOKENS * settings.scale_tokens))


class TuneTraffic(NamedTuple):
    sent: list[Sent]  # in the order of time, at least one
    cut: int = 0  # requests made shorter, to fit the model's context
    left_out: int = 0  # turns left out because they, or one before them, do not fit


def fitted_traffic(settings: TrafficSettings, profile: Profile) -> TuneTraffic:
    """Returns the traffic, shortened to the context of the profile's model. Raises `SettingsError`."""
    context, both = context_tokens(profile), bool(settings.sessions_trace)
    has_sessions = bool(settings.trace) and traces.has_sessions(settings.trace)
    if both and (not settings.trace or has_sessions or not traces.has_sessions(settings.sessions_trace)):
        raise SettingsError(
            "--sessions-trace: a file of sessions, beside a --trace of single requests; alone, it is a --trace"
        )
    single, cut = ([], 0) if has_sessions else fitted(traffic(settings, profile), context)
    if not both and not has_sessions:
        return TuneTraffic(single, cut)
    if has_sessions and (settings.speed != 1 or settings.from_s):
        raise SettingsError("--speed and --from: not for sessions, which come when answers have come")
    name = settings.sessions_trace or settings.trace
    found = traces.read_sessions(name, settings.scale_tokens)
    sent, left_out = played(found, settings.sessions or len(found), context, settings.duration_s)
    if not sent:
        raise SettingsError(f"--trace: no turn of {name} fits the model's context of {context} tokens")
    return TuneTraffic(beside(apart(sent)[0], single), cut, left_out)


def context_tokens(profile: Profile) -> int:
    return min(profile.prefill_capacity.context_tokens, profile.decode_capacity.context_tokens)


def traffic(settings: TrafficSettings, profile: Profile | None = None) -> list[Sent]:
    """The requests in the order of time, at least one. The `profile` must be of the same model as an event log. Raises
    `SettingsError`."""
    if settings.trace and _is_event_log(settings.trace):
        found = _logged(settings, profile)
    elif settings.trace:
        found = [_sent(row) for row in _played(settings, traces.read(settings.trace))]
    else:
        load = LoadSettings(
            rate=settings.rate,
            cv=settings.cv,
            duration_s=settings.duration_s,
            warmup_s=0.0,
            prompt_tokens=settings.prompt_tokens,
            output_tokens=settings.output_tokens,
            seed=settings.seed,
        )
        try:
            plan = make_plan(load, [LoadTenant("default")], 0)
        except SettingsError:
            raise SettingsError("--rate: no request comes within --duration") from None
        found = [Sent(one.due_s, one.prompt_tokens, max(one.output_tokens, 1)) for one in plan.requests]
    if not found:
        raise SettingsError("--from: no request comes in the part of the trace that is played")
    return found


def _played(settings: TrafficSettings, rows: list[TraceRow]) -> list[TraceRow]:
    return traces.scaled(
        rows,
        from_s=settings.from_s,
        duration_s=settings.duration_s,
        speed=settings.speed,
        scale_tokens=settings.scale_tokens,
        source=np.random.default_rng([settings.seed, 0]),
    )


def _sent(row: TraceRow) -> Sent:
    return Sent(row.at_s, row.prompt_tokens, max(row.output_tokens, 1), row.blocks)


def _is_event_log(path: str) -> bool:
    try:
        with Path(path).expanduser().open("rb") as file:
            return MAGIC.encode() in file.read(64)
    except OSError as error:
        raise SettingsError(f"--trace: cannot read {path}: {error.strerror}") from None


def _logged(settings: TrafficSettings, profile: Profile | None) -> list[Sent]:
    """Returns the requests of an event log that ended, with their priority classes and tenants."""
    logged = event_log.read(Path(settings.trace), "--trace")
    if profile is not None and len(logged.models) == 1:
        [model] = logged.models
        check_model(profile, model, "--trace", force=settings.force)
    found = []
    for name, (at_s, submit) in logged.submitted.items():
        output = logged.output_tokens.get(name, 0)
        if output:
            prompt, output = (max(1, round(settings.scale_tokens * count)) for count in (submit.prompt_tokens, output))
            priority = submit.priority_class if submit.priority_class in DEFAULT_PRIORITY_CLASSES else "standard"
            found.append(Sent(at_s, prompt, output, (), submit.tenant, priority))
    found.sort(key=lambda one: one.at_s)
    begin_s = (found[0].at_s if found else 0.0) + settings.from_s
    until_s = begin_s + settings.duration_s * settings.speed
    return [one._replace(at_s=(one.at_s - begin_s) / settings.speed) for one in found if begin_s <= one.at_s < until_s]
