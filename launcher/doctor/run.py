"""`crossdock doctor`: looks at a cluster for a while, and says what is wrong with it."""

import sys
from collections.abc import Sequence

import msgspec
import uvloop
from pydantic import Field
from rich.console import Console
from rich.markup import escape

from launcher import tables
from launcher.admin.status import ObserverOptions, coordinator_of
from launcher.doctor import collect, rules, vllm
from launcher.doctor.rules import Finding
from proto.messages import Role
from runtime.link.keys import keys_for
from runtime.settings.types import JsonOption

_COLOURS = {"certain": "red", "likely": "yellow", "possible": "dim"}


class DoctorSettings(ObserverOptions, JsonOption):
    """Find out what is wrong with a cluster: the cause, the evidence for it, and the setting to change.

    It looks at the coordinator's status, the metrics of all processes that this machine reaches, and this machine, for some
    seconds. Run it while the fault shows, under load. With --url, it looks at the metrics of a plain vLLM server.

    Status 0: nothing was found. 1: something was.
    """

    url: str = Field(
        "", description="A vLLM server to look at, like http://127.0.0.1:8000; empty: a crossdock cluster."
    )
    seconds: float = Field(10.0, ge=1.0, le=3600.0, description="Seconds to look, for rates.")
    watch: bool = Field(False, description="Look again and again until Ctrl-C, and show what changes.")


def run(settings: DoctorSettings) -> int:
    """Raises `NoAnswer`, `SeveralClusters`, `NoMetrics` or `ConfigError`."""
    console, before = tables.console(highlight=False), None
    while True:
        found, unseen = _look(settings)
        if not settings.watch or found != before:
            _show(settings, found, unseen, console)
        if not settings.watch:
            return 1 if found else 0
        before = found


def _look(settings: DoctorSettings) -> tuple[list[Finding], Sequence[str]]:
    if settings.url:
        return list(vllm.diagnose(uvloop.run(collect.server(settings.url, settings.seconds)))), ()
    with coordinator_of(settings.coordinator) as coordinator:
        keys = keys_for(settings, Role.OBSERVER)
        seen = uvloop.run(collect.cluster(coordinator, keys, settings.seconds))
    return rules.diagnose(seen), seen.unseen


def _show(settings: DoctorSettings, found: Sequence[Finding], unseen: Sequence[str], console: Console) -> None:
    if settings.as_json:
        shown = {"findings": [one.as_dict() for one in found], "unseen": unseen}
        encoded = msgspec.json.encode(shown)
        sys.stdout.write((encoded if settings.watch else msgspec.json.format(encoded, indent=2)).decode() + "\n")
        sys.stdout.flush()
        return
    for one in found:
        colour = _COLOURS[one.confidence]
        console.print(
            f"[{colour}]{one.confidence}[/{colour}]  [bold]{escape(one.what)}[/bold]  ({one.cause})", soft_wrap=True
        )
        for line in one.evidence:
            console.print(f"    seen    {escape(line)}", soft_wrap=True)
        console.print(f"    change  {escape(one.change)}\n", soft_wrap=True)
    if not found:
        console.print(f"Nothing is wrong, as far as {settings.seconds:g} s show.")
    if unseen:
        console.print(
            escape(f"Not looked at, since this machine does not reach their metrics: {', '.join(unseen)}"),
            soft_wrap=True,
        )
