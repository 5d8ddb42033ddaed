"""`crossdock calibrate`: what steps and transfers take on this installation, measured through the service itself."""

import asyncio
import os
import platform
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any, Self

import msgspec
import psutil
import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from lab import fit
from lab.commands import event_log, measure
from lab.commands.core_time import read_slower, shared_core_ms
from lab.commands.event_log import Logged
from lab.commands.measure import Measured, MeasuredSession
from lab.commands.profiles.show import show
from lab.commands.settings import CalibrateSettings
from lab.fit import Samples
from lab.play.cores import stretch
from lab.profile import ControlCost, Profile, ProfileCapacity, encoded
from launcher import reports
from launcher.bench.serve import started
from launcher.http.client import new_session
from launcher.load.plan import LoadPlan
from launcher.load.probe import Probed, probe
from launcher.load.settings import LoadSettings
from launcher.load.tenants import LoadTenant, Ratio
from launcher.local.core_plan import plan_cpu
from launcher.local.lifetime import until_interrupted
from launcher.models import resolve
from launcher.models.resolve import ReadyModel
from proto import parts
from proto.messages import Role
from runtime.process.version import version_of

STEP_TOKENS = 256  # of the shortest long prompts measured: a whole step of a CPU
SEQUENCES_MAX = 16  # streams at once that decode is measured with
CONTEXT_TOKENS_MAX = 1024  # of the longest prompt, or half of the model's context
LOG_SETTLES_S = 0.5  # from the last request until its last events are in the event log
_VERSIONS = ("crossdock", "torch", "transformers")


def run(settings: CalibrateSettings) -> int:
    reports.check_writable(settings.out, "--out")
    console = reports.console_for(settings)
    return uvloop.run(until_interrupted(_run(settings, console), console))


async def _run(settings: CalibrateSettings, console: Console) -> int:
    model = resolve.ready(settings.model, "", console)
    load = LoadSettings(model=settings.model, device=settings.device, **settings.engine_options())
    samples, bar = Samples(), _Bar(console)
    with bar:
        for number in range(settings.rounds):
            measured, logged, probed = await _round(settings, load, model, number, bar, console)
            samples.add(measure.samples_of(measured, logged))
    cores = shared_cores(settings.device)
    profile = profile_of(samples, logged, _about(probed, settings), cores)
    if cores[0]:
        slower = await asyncio.to_thread(read_slower, frozenset(os.sched_getaffinity(0)))
        profile = profile.replaced(beside_mixed=slower)
    _finish(settings, profile, console)
    return 0


async def _round(
    settings: CalibrateSettings, load: LoadSettings, model: ReadyModel, number: int, bar: "_Bar", console: Console
) -> tuple[Measured, Logged, Probed]:
    """Measures one round with a cluster of its own, because restarted processes are not as fast as before."""
    tenant = LoadTenant("default")
    async with started(load, Ratio(1, 1), [tenant], model, console) as site, new_session(silence_s=None) as session:
        probed = await probe(session, site.base_url, site.key, "")
        longest = CONTEXT_TOKENS_MAX
        if probed.target.context_tokens:
            longest = min(longest, probed.target.context_tokens // 2)
        sizes = STEP_TOKENS, longest, SEQUENCES_MAX
        bar.expect(sum(measure.requests_of(one, *sizes) for one in range(settings.rounds)))
        prompts = probed.prompts(load.model_copy(update={"seed": number}), LoadPlan((), 1, 0))
        to = MeasuredSession(session, probed, prompts, site.tenants[0], bar.advance)
        cores = frozenset(os.sched_getaffinity(0))
        measured = await measure.measure(to, number, *sizes, lambda: shared_core_ms(cores))
        await asyncio.sleep(LOG_SETTLES_S)
        return measured, event_log.read(Path(site.event_log), "--event-log"), probed


def _finish(settings: CalibrateSettings, profile: Profile, console: Console) -> None:
    Path(settings.out).expanduser().write_bytes(encoded(profile))
    show(profile, console)
    console.print(f"Written: {settings.out}", highlight=False, soft_wrap=True)
    reports.write_json(settings, msgspec.to_builtins(profile))


class _Bar:
    """A progress bar that draws seldom: it must not take time from what is measured."""

    def __init__(self, console: Console) -> None:
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
        self._progress = Progress(
            *columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, refresh_per_second=1
        )
        self._task = self._progress.add_task("measuring", total=None)

    def expect(self, total: int) -> None:
        self._progress.update(self._task, total=total)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def advance(self, count: int) -> None:
        self._progress.advance(self._task, count)


def profile_of(samples: Samples, logged: Logged, about: dict[str, Any], cores: tuple[int, int] = (0, 0)) -> Profile:
    """Fits the profile. `cores`: cores shared by all prefill and by all decode workers of this host; 0: no limit. Raises
    `FitError`."""
    prefill, decode = fit.prefill_cost(samples.prefill), fit.decode_cost(samples.decode)
    transfer = fit.transfer_cost(samples.hand_overs, measure.transport_of(logged))
    host = fit.host_cost(samples, transfer)
    control = fit.control_cost(samples.core) if cores[0] else ControlCost()
    beside_decode = fit.beside([(one, 1.0) for one in samples.prefill_beside], prefill)
    if control.step_ms and samples.decode_beside:
        # The player already models the time that tokens take from prefill, so only the loss beyond it is kept here.
        tokens = median(control.of(one.size) / one.ms for one, _ in samples.decode_beside)
        beside_decode = max(beside_decode / stretch(1, cores[0], 1, tokens), 1.0)
    run_sigma = fit.run_spread(
        [
            fit.step_ratios(samples.prefill, prefill),
            fit.step_ratios(samples.decode, decode),
            fit.outside_ratios(samples.outside, host),
        ]
    )
    return Profile(
        prefill,
        decode,
        _capacity(logged.capacities[Role.PREFILL]),
        _capacity(logged.capacities[Role.DECODE]),
        transfer,
        host,
        prefill_cores=cores[0],
        decode_cores=cores[1],
        beside_decode=beside_decode,
        beside_prefill=fit.beside(samples.decode_beside, decode),
        run_sigma=run_sigma,
        step_tokens=logged.step_tokens,
        attention_tokens=logged.attention_tokens,
        about=about,
        control=control,
    )


def _capacity(told: parts.Capacity) -> ProfileCapacity:
    return ProfileCapacity(told.kv_blocks, told.block_size, told.max_seqs, told.context_tokens)


def shared_cores(device: str) -> tuple[int, int]:
    """Returns how many cores several prefill and several decode workers of this host would share, as `plan_cpu` seats them."""
    if device == "cuda":
        return 0, 0
    plan = plan_cpu(tuple(sorted(os.sched_getaffinity(0))), prefill=2, decode=2, on_gpu=False)
    return tuple(len({core for seat in seats for core in seat.cores}) for seats in (plan.prefill, plan.decode))  # type: ignore[return-value]


def _about(probed: Probed, settings: CalibrateSettings) -> dict[str, Any]:
    return {
        "model": probed.target.model,
        "device": settings.device,
        "engine": settings.engine,
        "machine": reports.machine() | {"cpu": _cpu_name(), "memory_gib": round(psutil.virtual_memory().total / 2**30)},
        "system": platform.platform(),
        "versions": {name: version_of(name) for name in _VERSIONS},
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
