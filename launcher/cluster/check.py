"""`crossdock cluster check`: what a `cluster.toml` comes to, host by host."""

import shlex

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from launcher.cluster.file import ClusterError, incomplete
from launcher.cluster.plan import Planned, check
from launcher.cluster.settings import ClusterCheckSettings
from launcher.cluster.up import read_file
from runtime.settings.cores import cores_text
from runtime.settings.options import SettingsError
from runtime.settings.types import ENV_PREFIX


def run(settings: ClusterCheckSettings) -> int:
    """Raises `SettingsError`."""
    file = read_file(settings.cluster_file)
    try:
        plans = check(file)
    except ClusterError as error:
        raise SettingsError("\n".join(f"{settings.cluster_file}: {line}" for line in str(error).splitlines())) from None
    console = Console()
    for host, plan in plans.items():
        table = Table(title=f"{host} ({file.hosts[host].address})", title_justify="left", show_lines=True)
        table.add_column("process", no_wrap=True)
        table.add_column("options and environment", overflow="fold")
        for process in plan.processes:
            table.add_row(escape(process.name), escape("\n".join(_words(process))))
        console.print(table, highlight=False)
        if plan.note:
            console.print(f"note: {plan.note}", markup=False, highlight=False)
    for line in incomplete(file):
        console.print(f"note: {line}; it cannot serve yet", markup=False, highlight=False)
    return 0


def _words(process: Planned) -> list[str]:
    """Options one to a line, as flags; then the environment, and cores. A secret is named and not shown."""
    flags, words = process.arguments(), list[str]()
    for word in flags:
        if word.startswith("--"):
            words.append(word)
        else:
            words[-1] += f" {shlex.quote(word)}"
    words.sort()
    words += [f"{key}={shlex.quote(value)}" for key, value in process.environment.items()]
    words += [f"{ENV_PREFIX}{key.upper()}=…" for key in process.secrets()]
    if process.cores:
        words.append(f"on cores {cores_text(process.cores)}")
    return words
