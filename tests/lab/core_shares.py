"""Worker processes that get a fixed share of a core each, so that each adds compute of its own, as on machines of their own."""

import contextlib
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from rich.console import Console

from launcher.local.lifetime import Running, running
from launcher.models.resolve import ReadyModel
from runtime.settings.serve import ServeSettings

GROUPS = Path("/sys/fs/cgroup/cpu")  # control groups of version 1
QUOTA_US = 1_000  # the kernel's least: the shorter its period, the smoother a share is
_CONTROL = ("coordinator", "gateway", "autopilot")

Runs = Callable[[ServeSettings, ReadyModel, Console], AbstractAsyncContextManager[Running]]


class NoShares(Exception):
    """This machine does not let us give out shares."""


def check() -> None:
    """Raises `NoShares`."""
    if not os.access(GROUPS, os.W_OK) or not (GROUPS / "cpu.cfs_quota_us").exists():
        raise NoShares(
            f"{GROUPS} cannot be written: control groups of version 1, and root, are needed for shares of a core"
        )


def running_with(share: float) -> Runs:
    """`launcher.local.lifetime.running`, whose workers get `share` of a core each once they are ready."""

    @contextlib.asynccontextmanager
    async def limited(settings: ServeSettings, model: ReadyModel, console: Console) -> AsyncIterator[Running]:
        async with running(settings, model, console) as up:
            pids = {name: child.pid for name, child in up.supervisor.children.items() if not name.startswith(_CONTROL)}
            with shares(pids, share):
                yield up

    return limited


@contextlib.contextmanager
def shares(pids: dict[str, int], share: float) -> Iterator[None]:
    """The processes have their share until the context ends. `pids`: by name."""
    folders = [GROUPS / f"crossdock-{os.getpid()}-{name}" for name in pids]
    try:
        for folder, pid in zip(folders, pids.values(), strict=True):
            folder.mkdir()
            (folder / "cpu.cfs_period_us").write_text(str(round(QUOTA_US / share)))
            (folder / "cpu.cfs_quota_us").write_text(str(QUOTA_US))
            (folder / "cgroup.procs").write_text(str(pid))
        yield
    finally:
        for folder in folders:
            _remove(folder)


def _remove(folder: Path) -> None:
    """Its processes go back to the group above, and end without a limit."""
    if not folder.is_dir():
        return
    for pid in (folder / "cgroup.procs").read_text().split():
        with contextlib.suppress(ProcessLookupError):
            (GROUPS / "cgroup.procs").write_text(pid)
    folder.rmdir()
