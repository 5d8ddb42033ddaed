"""`crossdock up` and `crossdock down`: one host's part of the cluster that a `cluster.toml` describes."""

import asyncio
import shutil
import socket
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from launcher.cluster.file import ClusterError, ClusterFile, parse
from launcher.cluster.plan import HostPlan, PlannedProcess, as_keys, coordinator_address, plan_host, watchdog_s_of
from launcher.cluster.settings import DownSettings, UpSettings
from launcher.http.client import answers_ready, new_session
from launcher.local import registry
from launcher.local.detached import STOP_S, NotUp, end, start_detached
from launcher.local.lifetime import run_until_stopped, sayer, wait_ready
from launcher.local.supervisor import ProcessSpec, Supervisor
from launcher.models import resolve
from launcher.models.hub import ModelError
from launcher.process import child_environment, python_command
from proto.errors import CrossdockError
from runtime.process import notify
from runtime.process.exits import ConfigError
from runtime.settings.environment import SUPERVISED
from runtime.settings.options import SettingsError
from runtime.settings.roles import GatewaySettings
from runtime.settings.types import ENV_PREFIX

STOP_STAGES = {"autopilot": 0, "gateway": 0, "prefill": 1, "decode": 1, "mixed": 1, "coordinator": 2}
"""Gateways stop first, because they end the streams; then the workers, and the coordinator last, so that it hears of
everything."""
LOG = "up.log"


class RunsAlready(CrossdockError):
    """This host's part of the cluster is up already."""


@dataclass(frozen=True)
class ClusterHost:
    """One host of one cluster."""

    file: ClusterFile
    host: str

    @property
    def folder(self) -> Path:
        return registry.host_folder(self.file.name, self.host)


def read_file(path: str) -> ClusterFile:
    """Raises `SettingsError`."""
    where = Path(path).expanduser().resolve()
    try:
        return parse(where.read_text(encoding="utf-8"), where.parent)
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"FILE: cannot read {path}: {getattr(error, 'strerror', 'not UTF-8')}") from None
    except ClusterError as error:
        raise SettingsError("\n".join(f"FILE: {path}: {line}" for line in str(error).splitlines())) from None


def place(path: str, host: str) -> ClusterHost:
    """Raises `SettingsError`."""
    file = read_file(path)
    own = socket.gethostname()
    names = [host] if host else [own, own.split(".")[0], *(file.hosts if len(file.hosts) == 1 else ())]
    for name in names:
        if name in file.hosts:
            return ClusterHost(file, name)
    which = host or f"{own}, as this machine is called"
    raise SettingsError(f"--host: {path} has no host {which}, but {', '.join(file.hosts)}")


# --- up ---------------------------------------------------------------------------------------------------------------


def up(settings: UpSettings) -> int:
    """Raises `CrossdockError`, `SettingsError` among them."""
    console = Console()
    at = place(settings.cluster_file, settings.on_host)
    _check_down(at)
    if settings.detach:
        return _detach(settings, at, console)

    def begin() -> Coroutine[Any, Any, int]:
        plan, model_id = _plan(at, console)
        return _up(settings, at, plan, model_id, console)

    return run_until_stopped(begin, console)


def _check_down(at: ClusterHost) -> None:
    """Raises `RunsAlready`."""
    if running := registry.running(at.folder):
        raise RunsAlready(f"{at.host} of {at.file.name} is up already (pid {running.pid}); crossdock down stops it")


def _plan(at: ClusterHost, console: Console) -> tuple[HostPlan, str]:
    """Returns the plan, with a model that is on this host, and the model's id. Raises `SettingsError` or `ModelError`."""
    host, file = at.file.hosts[at.host], at.file
    try:
        plan_host(file, at.host, "not looked for yet")  # report a mistake before a model is fetched
        if not (host.gateways or host.workers.total):
            return plan_host(file, at.host, "none"), ""
        with _naming_keys():
            model = resolve.ready(host.model or file.model, file.model_id, console)
        return plan_host(file, at.host, str(model.path), model.model_id), model.model_id
    except ClusterError as error:
        raise SettingsError("\n".join(f"FILE: {line}" for line in str(error).splitlines())) from None


@contextmanager
def _naming_keys() -> Iterator[None]:
    """Errors of roles and models name the keys of cluster.toml here, since `up` has no such options."""
    try:
        yield
    except (SettingsError, ConfigError, ModelError) as error:
        raise type(error)(as_keys(str(error))) from None


async def _up(settings: UpSettings, at: ClusterHost, plan: HostPlan, model_id: str, console: Console) -> int:
    registry.make_folder(at.folder)
    _check_down(at)  # again, since fetching a model may have taken minutes, and two calls would share one note
    supervisor = Supervisor(log_dir=at.folder, say=sayer(console), verbose=settings.verbose)
    coordinator = coordinator_address(at.file)
    if plan.note:
        console.print(f"[yellow]note[/yellow] {escape(plan.note)}")
    with registry.noted(
        at.folder,
        model_id=model_id,
        base_url=next(iter(plan.base_urls), ""),
        coordinator=coordinator,
        cluster=at.file.name,
        host=at.host,
    ):
        _check_wanted(settings, at)
        try:
            for process in plan.processes:
                supervisor.start(spec_of(process))
            with _naming_keys():
                await _wait(settings, plan, supervisor, console)
            supervisor.started_up = True
            supervisor.observe(plan.metrics)
            names = ", ".join(process.name for process in plan.processes)
            console.print(f"{at.host} of {at.file.name} is up: {names}", highlight=False, soft_wrap=True)
            for url in plan.base_urls:
                console.print(f"Base URL   {url}/v1", highlight=False, soft_wrap=True)
            notify.ready(f"{len(plan.processes)} processes run")
            try:
                await supervisor.wait_failed()
            except asyncio.CancelledError:
                return 0  # the proper end of serving
        finally:
            notify.stopping()
            await supervisor.close()
    return 1


def _check_wanted(settings: UpSettings, at: ClusterHost) -> None:
    """Raises `NotUp` if a `down` that came before the note was written has removed the file."""
    if not Path(settings.cluster_file).expanduser().exists():
        raise NotUp(f"{at.host} was taken down before it had started")


async def _wait(settings: UpSettings, plan: HostPlan, supervisor: Supervisor, console: Console) -> None:
    """Waits until every process here has said that it is ready, and the gateways have workers of both roles on any host."""
    gateway = next((one.settings for one in plan.processes if isinstance(one.settings, GatewaySettings)), None)
    # Gateways that want a client's certificate are not asked, since this process has none.
    urls = () if gateway and gateway.tls_client_ca else plan.base_urls
    async with new_session(trusts=gateway.tls_certificate if gateway else "") as session:

        async def is_ready() -> bool:
            return supervisor.all_ready() and all([await answers_ready(session, f"{url}/ready") for url in urls])

        await wait_ready(is_ready, supervisor, settings.ready_timeout_s, console)


def spec_of(process: PlannedProcess) -> ProcessSpec:
    environment = child_environment(process.threads, sends_kv=process.role in ("prefill", "mixed")) | dict(
        process.environment
    )
    environment |= {ENV_PREFIX + key.upper(): value for key, value in process.secrets().items()}
    environment |= {SUPERVISED: "1"}
    arguments = python_command(process.module, *process.arguments())
    stage, watchdog_s = STOP_STAGES[process.role], watchdog_s_of(process.role)
    return ProcessSpec(process.name, arguments, environment, process.cores, stage, watchdog_s)


# --- detached ---------------------------------------------------------------------------------------------------------


def _detach(settings: UpSettings, at: ClusterHost, console: Console) -> int:
    """Starts the same command in a session of its own; returns when that one says that it is ready. Raises `NotUp`."""
    registry.make_folder(at.folder)
    log = at.folder / LOG
    arguments = [str(Path(settings.cluster_file).expanduser().resolve()), "--host", at.host]
    arguments += ["--ready-timeout-s", str(settings.ready_timeout_s), *(["--verbose"] if settings.verbose else [])]
    _, status = start_detached(("up", *arguments), child_environment(1), log, f"{at.host} of {at.file.name}", console)
    return status or 0


# --- down -------------------------------------------------------------------------------------------------------------


def down(settings: DownSettings) -> int:
    """Raises `SettingsError`, `NotUp`."""
    at = place(settings.cluster_file, settings.on_host)
    console = Console()
    note = registry.running(at.folder)
    if note is None:
        console.print(f"{at.host} of {at.file.name} is not up", highlight=False)
    elif end(note.pid):
        console.print(f"{at.host} of {at.file.name} is down", highlight=False)
    else:
        console.print(f"{at.host} of {at.file.name} did not stop within {STOP_S:.0f} s and was killed", highlight=False)
    _clean(at.folder, settings.keep_logs)
    return 0


def _clean(folder: Path, keep_logs: bool) -> None:
    if not keep_logs:
        shutil.rmtree(folder, ignore_errors=True)
        return
    for path in folder.glob("*"):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        elif ".log" not in path.name:
            path.unlink(missing_ok=True)
