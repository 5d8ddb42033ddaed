"""`crossdock simulate load`: the production coordinator under a load that a file describes, in virtual time."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from pydantic import Field
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from lab.cluster.figures import figures
from lab.cluster.run import play
from lab.cluster.workload import Workload
from lab.scenarios.build import build
from lab.scenarios.requirements import Checked, check
from lab.scenarios.scenario import FILE_BYTES_MAX, Scenario, parse
from launcher import tables
from launcher.reports import console_for, write_json
from runtime.settings.options import SettingsError
from runtime.settings.types import JsonOption
from runtime.tenancy.tenants import TenantsError

MISSED_EXIT: Final = 3


class SimulateLoadSettings(JsonOption):
    """Play a load against the coordinator's own scheduler in virtual time, and say how each tenant was served.

    SCENARIO is a TOML file. The smallest has three tables: [[workers]] with role = "prefill", [[workers]] with role = "decode",
    and an empty [[traffic]]. More keys say how fast workers are, when which requests come and by when they are wanted;
    [[failures]], [tenants.NAME] and [priority_classes.NAME] can be added. No model is needed. Change one thing in the file and
    compare. docs/scenarios/README.md explains every key and answers five questions with scenarios that are in docs/scenarios.

    Status 0: the run reached all that the file's [[require]] tables ask for. 3: it missed something.
    """

    file: str = Field(min_length=1, description="TOML file.", json_schema_extra={"argument": "SCENARIO"})
    seed: int = Field(-1, ge=-1, le=1 << 62, description="Replaces the file's seed; -1: the file's.")


def run(settings: SimulateLoadSettings) -> int:
    scenario = read_scenario(settings.file, settings.seed)
    workload = read(settings.file, settings.seed)
    console = console_for(settings, highlight=False)
    columns = TextColumn("virtual time"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=workload.duration_s)
        played = play(workload, lambda now_s: progress.update(task, completed=now_s))
    found = figures(played)
    with _naming(settings.file):
        checked = list(check(scenario.require, found))
    show(found, console)
    if checked:
        show_requirements(checked, console)
    write_json(settings, found | {"require": [asdict(one) for one in checked]})
    return 0 if all(one.holds for one in checked) else MISSED_EXIT


def read(path: str, seed: int = -1) -> Workload:
    """Raises `SettingsError`, which names the file and the key at fault."""
    with _naming(path):
        return build(read_scenario(path, seed), Path(path).expanduser().parent)


def read_scenario(path: str, seed: int = -1) -> Scenario:
    """Raises `SettingsError`, which names the file and the key at fault."""
    with _naming(path), Path(path).expanduser().open("rb") as opened:
        scenario = parse(opened.read(FILE_BYTES_MAX + 1))
    return scenario if seed < 0 else scenario.model_copy(update={"seed": seed})


@contextmanager
def _naming(path: str) -> Iterator[None]:
    """Adds the file to what is wrong with it."""
    try:
        yield
    except OSError as error:
        raise SettingsError(f"SCENARIO: cannot read {path}: {error.strerror}") from None
    except SettingsError:
        raise
    except (TenantsError, ValueError) as error:
        raise SettingsError("\n".join(f"SCENARIO: {path}: {line}" for line in str(error).splitlines())) from None


def show_requirements(checked: Sequence[Checked], console: Console) -> None:
    table = tables.Table("Required", "figure", tables.words("limit"), "value", tables.words(""))
    for one in checked:
        value = "-" if one.value is None else f"{one.value:,.4g}"
        table.row(one.name, one.limit, value, "" if one.holds else "missed")
    table.show(console)


def show(found: dict[str, Any], console: Console) -> None:
    groups = [((one["tenant"], one["priority_class"]), one) for one in found["tenants"]]
    streams = [((name,), one) for name, one in found["traffic"].items()]
    classes = [(("all", name), one) for name, one in found["classes"].items()]
    several = classes if 1 < len(classes) < len(groups) else []
    _show_rows(("tenant", "class"), [*groups, *several, (("all", ""), found["all"])], console)
    if len(streams) > len(groups):
        _show_rows(("traffic",), streams, console)
    console.print(
        f"{found['duration_s']:,g} seconds of arrivals, seed {found['seed']}."
        " Useful prefill: the share of computed prompt tokens that goodput needed."
    )


_WORDS: Final = "ended otherwise"  # the column with words
_Rows = Sequence[tuple[tuple[str, ...], Mapping[str, Any]]]


def _show_rows(keys: tuple[str, ...], rows: _Rows, console: Console) -> None:
    for cells in (_served, _shared, _ended):
        columns = [tables.words(one) if one == _WORDS else one for one in cells(rows[0][1])]
        table = tables.Table("", *keys, *columns, keys=len(keys))
        for names, one in rows:
            table.row(*names, *cells(one).values())
        table.show(console)
        console.print()


def _served(one: Mapping[str, Any]) -> dict[str, str]:
    ttft, tpot = one["ttft_ms"] or {}, one["tpot_ms"] or {}
    return {
        "offered": f"{one['offered']:,}",
        "finished": f"{one['finished']:,}",
        "goodput/s": f"{one['goodput_per_s']:.2f}",
        "of offered": f"{one['goodput_share']:.1%}",
        **{f"TTFT {rank} ms": _ms(ttft, rank) for rank in ("p50", "p99")},
        **{f"TPOT {rank} ms": _ms(tpot, rank) for rank in ("p50", "p99")},
    }


def _ms(times: Mapping[str, float], rank: str) -> str:
    return f"{times[rank]:,.0f}" if times else "-"


def _shared(one: Mapping[str, Any]) -> dict[str, str]:
    return {
        "share of prefill": f"{one['prefill_share']:.1%}",
        "useful prefill": f"{one['useful_share']:.1%}",
        "share of decode": f"{one['decode_share']:.1%}",
    }


def _ended(one: Mapping[str, Any]) -> dict[str, str]:
    counts = {f"rejected: {reason}": count for reason, count in one["rejected"].items()}
    counts |= {state: count for state, count in one["ended_otherwise"].items() if state != "rejected"}
    return {
        "rejections/request": f"{one['rejections_per_request']:.2f}",
        "interruptions": f"{one['interruptions']:,}",
        _WORDS: ", ".join(f"{count:,} {name}" for name, count in counts.items()) or "-",
    }
