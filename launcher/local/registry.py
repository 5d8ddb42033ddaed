"""The clusters that run on this machine: each `crossdock serve` or `up` notes its own beside its logs, and takes the note away.

A note whose process is gone is ignored: it was killed. Its start time tells it from a later process with the same number.
"""

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import platformdirs

from proto.errors import CrossdockError
from runtime.storage.lock_file import network_file_system

NOTE = "cluster.json"


class LocalCluster(msgspec.Struct, frozen=True):
    """The note of one cluster that runs on this machine."""

    pid: int  # of the `crossdock serve`, `up` or benchmark that runs it
    started: int  # clock ticks since boot
    model_id: str
    base_url: str
    coordinator: str
    cluster: str = ""  # `crossdock up`: the cluster's name, and which of its hosts this is
    host: str = ""


def runs_folder() -> Path:
    """The folder that has a folder with logs and a note for each run."""
    return Path(platformdirs.user_state_dir("crossdock")) / "runs"


def host_folder(cluster: str, host: str) -> Path:
    """Returns the folder for one host of a cluster: the copied cluster.toml and keys, logs and the note."""
    return runs_folder() / f"{cluster}.{host}"


class CannotKeep(CrossdockError):
    """The folder of a run cannot be made or written to."""


def make_folder(folder: Path) -> None:
    """Make the folder for this user alone. Raises `CannotKeep`."""
    with _kept(folder):
        runs_folder().parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)


@contextlib.contextmanager
def _kept(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        why = f"{error.strerror}; XDG_STATE_HOME may name a place for logs that can be written to"
        raise CannotKeep(f"cannot keep logs in {folder}: {why}") from None


@contextlib.contextmanager
def noted(
    run: Path, *, model_id: str, base_url: str, coordinator: str, cluster: str = "", host: str = ""
) -> Iterator[None]:
    """Notes, while the context lasts, that this process runs a cluster, or a host of one; `run` is its folder."""
    pid = os.getpid()
    note = LocalCluster(pid, started_at(pid) or 0, model_id, base_url, coordinator, cluster, host)
    half = run / f"{NOTE}.part"
    with _kept(run):
        half.write_bytes(msgspec.json.encode(note) + b"\n")
        os.replace(half, run / NOTE)
    try:
        yield
    finally:
        (run / NOTE).unlink(missing_ok=True)


def clusters() -> list[LocalCluster]:
    """Returns the running clusters of this user, the oldest first."""
    notes = [running(path.parent) for path in sorted(runs_folder().glob(f"*/{NOTE}"))]
    return [note for note in notes if note is not None]


def folders_of(coordinator: str) -> list[Path]:
    """Returns the folders of all runs, or hosts' parts, on this machine that belong to the cluster with this coordinator."""
    found = [(path.parent, running(path.parent)) for path in sorted(runs_folder().glob(f"*/{NOTE}"))]
    return [folder for folder, note in found if note is not None and note.coordinator == coordinator]


def running(run: Path) -> LocalCluster | None:
    """Returns the note in a run's folder if its process lives."""
    try:
        note = msgspec.json.decode((run / NOTE).read_bytes(), type=LocalCluster)
    except (OSError, msgspec.DecodeError):
        return None  # the note was just removed, or belongs to another user
    return note if started_at(note.pid) == note.started else None


def started_at(pid: int) -> int | None:
    """Returns when a process started, in clock ticks since boot; None if there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    # The program's name, in parentheses, may contain any character; field 22 is the 20th after it.
    return int(stat.rpartition(b")")[2].split()[19])


def default_db() -> str:
    """Returns the database to which `crossdock serve --tenants` writes, and which `crossdock usage` reads."""
    return str(Path(platformdirs.user_state_dir("crossdock")) / "usage.sqlite")


def default_batch_db(model_id: str) -> str:
    """Returns where `crossdock serve` keeps files and batches for a model. It is empty if that is a network file system, whose
    locks may be lost. Clusters of one model may share the file."""
    folder = Path(platformdirs.user_state_dir("crossdock"))
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if network_file_system(folder):
            return ""
    except OSError:
        return ""
    return str(folder / f"batches.{re.sub(r'[^A-Za-z0-9._-]', '-', model_id)[:100]}.sqlite")
