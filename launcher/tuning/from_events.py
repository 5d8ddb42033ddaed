"""`crossdock calibrate --from-events`: a profile, corrected by the steps in event logs of a coordinator."""

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from launcher.tuning import event_log
from launcher.tuning.event_log import Logged
from launcher.tuning.settings import CalibrateSettings
from launcher.tuning.traffic import check_model, load_profile
from proto.messages import Role
from runtime.settings.options import SettingsError
from tuning.learned import ROLES, SAMPLES_MIN, BusyTimes, StepTime, correct, is_crowded
from tuning.profile import Profile

OPTION = "--from-events"


def corrected(settings: CalibrateSettings, console: Console) -> Profile:
    """Returns the corrected profile and prints what has changed. Raises `SettingsError`."""
    profile = load_profile(settings.profile)
    logs = [event_log.read(Path(path), OPTION, console) for path in settings.from_events]
    models = sorted(set().union(*(logged.models for logged in logs)))
    if len(models) > 1:
        raise SettingsError(f"{OPTION}: workers of several models: {', '.join(models)}; a profile is of one")
    if models:
        check_model(profile, models[0], OPTION, force=settings.force)
    return of_logs(profile, logs, console)


def of_logs(profile: Profile, logs: Sequence[Logged], console: Console) -> Profile:
    """Corrects the profile by these logs. Raises `SettingsError` if they contain nothing to correct it by."""
    samples: dict[Role, list[StepTime]] = {role: [] for role in ROLES}
    for logged in logs:
        for role, found in samples_of(profile, logged).items():
            if is_crowded(profile, role, logged.most_workers[role].values()):
                console.print(
                    f"[yellow]More {role.value} workers than cores for them on a host: the profile of {role.value} steps is not"
                    " corrected by such times[/yellow]",
                    highlight=False,
                )
            else:
                samples[role] += found
    learned = correct(profile, samples)
    if not learned.corrections:
        found_too = ", ".join(f"{len(some)} of {role.value}" for role, some in samples.items())
        raise SettingsError(f"{OPTION}: too few step times: {found_too}; of one role it takes {SAMPLES_MIN}")
    for role in ROLES:
        if role not in learned.corrections:
            console.print(f"Too few {role.value} steps: their part of the profile stays as it is")
    words = learned.words
    console.print(words[0].upper() + words[1:], highlight=False, soft_wrap=True)
    how = {"how": words, "when": datetime.now(UTC).isoformat(timespec="seconds")}
    return learned.profile.replaced(about={**profile.about, "corrected": how})


def samples_of(profile: Profile, logged: Logged) -> dict[Role, list[StepTime]]:
    """Returns the steps of each role. Steps beside work of the other role on the same host are expected to take longer, as the
    profile says."""
    prefill_spans = [(step.at_s - step.ms / 1000, step.at_s) for step in logged.steps]
    decode_spans = [(one.at_s - one.ms / 1000, one.at_s) for one in logged.decode]
    prefill_busy, decode_busy = BusyTimes(prefill_spans), BusyTimes(decode_spans)
    is_one_host = len(logged.hosts) == 1
    beside_decode, beside_prefill = (
        more - 1 if is_one_host else 0.0 for more in (profile.beside_decode, profile.beside_prefill)
    )
    prefill = [
        StepTime(step.tokens, step.pairs, step.ms, 1, step.at_s, 1 + beside_decode * decode_busy.share(*span))
        for step, span in zip(logged.steps, prefill_spans, strict=True)
    ]
    decode = [
        StepTime(
            one.sequences / one.steps, one.kv_tokens / one.steps, one.ms / one.steps, one.steps, one.at_s,
            1 + beside_prefill * prefill_busy.share(*span),
        )
        for one, span in zip(logged.decode, decode_spans, strict=True)
    ]  # fmt: skip
    return {Role.PREFILL: prefill, Role.DECODE: decode}
