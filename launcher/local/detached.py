"""Clusters that run on without a terminal: `serve --detach`, and `crossdock stop` and `restart`, which end what runs here."""

import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from pydantic import Field
from rich.console import Console

from launcher.local import registry
from launcher.local.notify_listener import NotifySocket
from launcher.local.registry import LocalCluster
from launcher.process import child_environment, python_command
from proto.errors import CrossdockError
from runtime.process import interrupts
from runtime.settings.environment import SUPERVISED
from runtime.settings.options import to_arguments
from runtime.settings.serve import ServeSettings
from runtime.settings.types import ENV_PREFIX, Options

STOP_S = 60.0
_TAIL_LINES = 30
_COMMAND = "command.json"  # in the folder of the run, which only this user may enter
_LOG = "serve.log"
_SECRET = "api_keys"


class NotUp(CrossdockError):
    """A cluster did not get ready, or none runs."""


class DetachedCommand(msgspec.Struct, frozen=True):
    """How a cluster was started, for `crossdock restart`."""

    arguments: tuple[str, ...]
    environment: dict[str, str]
    folder: str


class StopSettings(Options):
    """Stop a cluster that crossdock serve or up runs on this machine. Its streams end, and its logs stay."""

    coordinator: str = Field("", description="Its coordinator's address; empty: the only cluster that runs here.")


class RestartSettings(StopSettings):
    """Stop a cluster that crossdock serve --detach has started, and start it again with the same options.

    The environment's CROSSDOCK_ variables are those of the first start; a model, the tenants file and --config are read anew.
    """


# --- start ------------------------------------------------------------------------------------------------------------


def serve(settings: ServeSettings, console: Console) -> int:
    """Starts `crossdock serve` with these settings, and returns when it serves. Raises `NotUp`."""
    ours = {name: value for name, value in os.environ.items() if name.startswith(ENV_PREFIX)}
    ours = {name: value for name, value in ours.items() if name not in (ENV_PREFIX + "DETACH", SUPERVISED)}
    # API keys are passed in the environment, because ps shows flags.
    secrets = {ENV_PREFIX + _SECRET.upper(): ",".join(settings.api_keys)} if settings.api_keys else {}
    arguments = tuple(to_arguments(settings, fixed={"detach", _SECRET}))
    return _serve(DetachedCommand(arguments, ours | secrets, os.getcwd()), console)


def _serve(command: DetachedCommand, console: Console) -> int:
    registry.make_folder(registry.runs_folder())
    with tempfile.TemporaryDirectory(prefix="starting-", dir=registry.runs_folder()) as folder:
        log = Path(folder) / _LOG
        environment = {k: v for k, v in child_environment(1).items() if not k.startswith(ENV_PREFIX)}
        pid, status = start_detached(
            ("serve", *command.arguments),
            environment | command.environment,
            log,
            "crossdock serve",
            console,
            command.folder,
        )
        note = next((one for one in registry.clusters() if one.pid == pid), None)
        if status is not None or note is None:
            return status or 1
        (run,) = registry.folders_of(note.coordinator)[-1:]
        log.rename(run / _LOG)  # the process writes on
    (run / _COMMAND).write_bytes(msgspec.json.encode(command) + b"\n")
    console.print(f"Base URL   {note.base_url}/v1\nLogs       {run}", highlight=False, soft_wrap=True)
    console.print("It serves until crossdock stop.")
    return 0


def start_detached(
    words: Sequence[str], environment: Mapping[str, str], log: Path, name: str, console: Console, folder: str = ""
) -> tuple[int, int | None]:
    """Starts a `crossdock` command in a session of its own. Returns its pid and None once it says that it is ready, or its exit
    status, and prints its last lines. Raises `NotUp` if it was stopped before."""
    with NotifySocket() as heard, log.open("wb") as output:
        process = subprocess.Popen(
            python_command("launcher.cli", *words),
            env={**environment, "NOTIFY_SOCKET": heard.address},
            cwd=folder or None,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        ended = os.pidfd_open(process.pid)
        try:
            # A model may have to be fetched first, so there is no timeout here: the process itself gives up.
            with console.status(f"{name}: starting"):
                while True:
                    readable, _, _ = select.select([heard.fileno(), ended], [], [])
                    if "READY=1" in heard.heard(process.pid):
                        console.print(f"{name} is up (pid {process.pid})", highlight=False)
                        return process.pid, None
                    if ended in readable:
                        break
        except BaseException:
            process.terminate()
            process.wait()
            raise
        finally:
            os.close(ended)
    status = process.wait()
    sys.stderr.write("\n".join(log.read_text("utf-8", "replace").splitlines()[-_TAIL_LINES:]) + "\n")
    if status == 0 or status in interrupts.STATUSES:
        raise NotUp(f"{name} was stopped before it was ready")
    return process.pid, status


# --- stop -------------------------------------------------------------------------------------------------------------


def stop(settings: StopSettings) -> int:
    """Raises `NotUp`."""
    note = _named(settings.coordinator)
    how = "is stopped" if end(note.pid) else f"did not stop within {STOP_S:.0f} s and was killed"
    Console().print(f"{note.model_id} at {note.base_url} {how}", highlight=False, soft_wrap=True)
    return 0


def restart(settings: RestartSettings) -> int:
    """Raises `NotUp`."""
    note = _named(settings.coordinator)
    (run,) = registry.folders_of(note.coordinator)[-1:]
    try:
        command = msgspec.json.decode((run / _COMMAND).read_bytes(), type=DetachedCommand)
    except (OSError, msgspec.DecodeError):
        raise NotUp(f"{note.base_url} was not started with crossdock serve --detach; start it where it runs") from None
    end(note.pid)
    return _serve(command, Console())


def _named(coordinator: str) -> LocalCluster:
    """Raises `NotUp` unless it is clear which cluster is meant."""
    running = [one for one in registry.clusters() if coordinator in ("", one.coordinator)]
    if not running:
        raise NotUp(f"no cluster of yours runs on this machine{f' at {coordinator}' if coordinator else ''}")
    if len(running) > 1 and len({one.pid for one in running}) > 1:
        lines = [f"    --coordinator {one.coordinator}   {one.model_id} at {one.base_url}" for one in running]
        raise NotUp("\n".join(["several clusters run on this machine; name one:", *lines]))
    return running[0]


def end(pid: int) -> bool:
    """Sends SIGTERM, and after a while SIGKILL, after which the kernel kills the processes that it has started. Returns
    whether SIGTERM was enough."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        for number, wait_s in ((signal.SIGTERM, STOP_S), (signal.SIGKILL, 5.0)):
            signal.pidfd_send_signal(descriptor, number)
            if select.select([descriptor], [], [], wait_s)[0]:
                return number is signal.SIGTERM
    except ProcessLookupError:
        return True
    finally:
        os.close(descriptor)
    return False
