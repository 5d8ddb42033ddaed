"""`crossdock policy`: versions of the scheduling policy, tried on some organisations before all run under them."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from math import sqrt
from pathlib import Path
from typing import Any, Final

import msgspec
import uvloop
from pydantic import Field
from rich.console import Console
from rich.markup import escape
from rich.progress import track

from launcher import tables
from launcher.admin.status import ObserverOptions, converse, coordinator_of
from proto.errors import PeerRefused
from proto.messages import Role
from proto.policy import ArmStatus, PolicyAction, PolicyAnswer, PolicyRequest
from runtime.link.keys import keys_for
from runtime.settings.options import SettingsError
from runtime.tenancy.file import read_tables
from runtime.tenancy.tenants import TenantsError, without_secrets

Z: Final = 1.96
"""Standard errors on either side of a share that are its interval of 95 %."""
_ASK_MS: Final = 10_000
_ABSENT: Final = "(not given)"


class ListSettings(ObserverOptions):
    """Show the versions of the scheduling policy.

    A version is a tenants file without keys and cache_group, with the scheduling options of the coordinator. Each accepted
    change of either gets the next number. The last 100 are kept beside the usage database.
    """


class DiffSettings(ObserverOptions):
    """Show what a tenants file would change in the policy in force.

    With a number instead of a FILE: what that version would change.
    """

    first: str = Field(
        min_length=1,
        description="A tenants file, or the number of a version.",
        json_schema_extra={"argument": "FILE|N"},
    )


class TrySettings(ObserverOptions):
    """Run some organisations under another tenants file.

    Their weights, limits and classes are taken from FILE; all others keep the policy in force. All users of an organisation
    run under the same policy. A trial cannot change [priority_classes], which all organisations share. It ends with promote,
    rollback, --end, or a change of the coordinator's tenants file.
    """

    file: str = Field("", description="The tenants file to try.", json_schema_extra={"argument": "FILE"})
    share: float = Field(
        0.0, ge=0.0, le=1.0, description="Share of the organisations, chosen by a hash of their name: 0.1 for a tenth."
    )
    organisations: str = Field("", description="Comma-separated organisations, as well as or instead of --share.")
    end: bool = Field(False, description="End the trial; all organisations run under the policy in force.")


class PromoteSettings(ObserverOptions):
    """Put what is on trial, or a tenants file, in force for everyone.

    The coordinator keeps it through restarts, until its own tenants file changes. Gateways read API keys from their tenants
    file alone, so put FILE there too.
    """

    file: str = Field(
        "", description="A tenants file. Empty: what is on trial.", json_schema_extra={"argument": "FILE"}
    )


class RollbackSettings(ObserverOptions):
    """Put an earlier version in force again, and end any trial."""

    number: int = Field(
        0, ge=0, description="The version. 0: the one that was in force before.", json_schema_extra={"argument": "N"}
    )


class PolicyCompareSettings(ObserverOptions):
    """Compare the requests that run under the policy on trial with all others.

    Both run at the same time, on the same workers. Counted is what comes from now on. Goodput is the share of all
    requests that finished within the targets of their class, with its interval of 95 %. The version in force has two arms, each
    with half of its organisations by a hash of their names: trust a difference only if it is larger than theirs.
    """

    for_s: float = Field(60.0, ge=0.0, le=86_400.0, description="Seconds to watch. 0: all since the trial began.")


def show_list(settings: ListSettings) -> int:
    listed(_ask(settings, PolicyRequest(PolicyAction.LIST))).show(tables.console())
    return 0


def diff(settings: DiffSettings) -> int:
    answer = _ask(settings, PolicyRequest(PolicyAction.LIST))
    before = _content(settings, answer.active)
    if settings.first.isdecimal():
        name, after = f"version {settings.first}", _content(settings, int(settings.first))
    else:
        name, after = settings.first, _read(settings.first)
    console = Console(soft_wrap=True, highlight=False)
    lines = list(differences(before, after))
    console.print(escape(f"From version {answer.active} to {name}: {len(lines)} differences"))
    for line in lines:
        console.print(escape(f"  {line}"))
    return 0


def try_(settings: TrySettings) -> int:
    if settings.end:
        return _do(settings, PolicyRequest(PolicyAction.END))
    if not settings.file:
        raise SettingsError("FILE: name the tenants file to try, or give --end")
    names = tuple(filter(None, (name.strip() for name in settings.organisations.split(","))))
    if not settings.share and not names:
        raise SettingsError("--share or --organisations: one of them says for whom the file is tried")
    tables = _read(settings.file)
    if unknown := [name for name in names if name not in tables.get("tenants", {})]:
        raise SettingsError(f"--organisations: {', '.join(unknown)} is no organisation of {settings.file}")
    content = msgspec.json.encode(tables).decode()
    return _do(settings, PolicyRequest(PolicyAction.TRY, content=content, share=settings.share, organisations=names))


def promote(settings: PromoteSettings) -> int:
    content = msgspec.json.encode(_read(settings.file)).decode() if settings.file else ""
    return _do(settings, PolicyRequest(PolicyAction.PROMOTE, content=content))


def roll_back(settings: RollbackSettings) -> int:
    return _do(settings, PolicyRequest(PolicyAction.ROLLBACK, settings.number))


def compare(settings: PolicyCompareSettings) -> int:
    question = PolicyRequest(PolicyAction.LIST)
    before = _ask(settings, question)
    if not before.trial:
        raise PeerRefused("no version is on trial; begin with crossdock policy try")
    after = before
    if settings.for_s:
        uvloop.run(_wait(settings.for_s))
        after = _ask(settings, question)
        if (after.active, after.trial) != (before.active, before.trial):
            raise PeerRefused("the policy changed meanwhile; compare again")
    console, table = tables.console(), compared(after, before if settings.for_s else None)
    table.show(console)
    for arm in [texts[0] for texts, _ in table.rows if "–" in texts]:
        since = f"in these {settings.for_s:g} s" if settings.for_s else "since the trial began"
        console.print(f"–: no request of arm {arm} has come and finished {since}.", highlight=False, soft_wrap=True)
    return 0


def compared(after: PolicyAnswer, before: PolicyAnswer | None) -> tables.Table:
    """Returns the figures between two answers; if `before` is None, since the trial began."""
    earlier = {one.arm: one for one in before.arms} if before is not None else {}
    table = tables.Table(
        f"Version {after.active} in force, version {after.trial} on trial",
        "arm",
        *("came", "finished", "goodput of came", "±", "mean TTFT ms", "mean TPOT ms"),
    )
    for arm in after.arms:
        table.row(arm.arm, *_figures(arm, earlier.get(arm.arm, ArmStatus(arm.arm))))
    return table


async def _wait(seconds: float) -> None:
    pieces = 100
    for _ in track(range(pieces), "comparing", console=Console(stderr=True), transient=True):
        await asyncio.sleep(seconds / pieces)


def _figures(arm: ArmStatus, earlier: ArmStatus) -> Iterator[str]:
    came, finished = arm.offered - earlier.offered, arm.finished - earlier.finished
    yield f"{came}"
    yield f"{finished}"
    goodput = min((arm.kept - earlier.kept) / came, 1.0) if came and finished else 0.0
    yield f"{goodput:.1%}" if came and finished else "–"
    yield f"{Z * sqrt(goodput * (1 - goodput) / came):.1%}" if came and finished else "–"
    yield f"{(arm.ttft_ms - earlier.ttft_ms) / finished:.0f}" if finished else "–"
    yield f"{(arm.tpot_ms - earlier.tpot_ms) / finished:.1f}" if finished else "–"


def differences(before: Mapping[str, Any], after: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """Yields one line for each value that differs, with its path."""
    for name in dict.fromkeys((*before, *after)):
        where, one, other = f"{path}{name}", before.get(name, _ABSENT), after.get(name, _ABSENT)
        if isinstance(one, Mapping) or isinstance(other, Mapping):
            yield from differences(_table(one), _table(other), f"{where}.")
            if (one == _ABSENT) != (other == _ABSENT) and not (_table(one) or _table(other)):
                yield f"{where}: {'added' if one == _ABSENT else 'removed'}"
        elif one != other:
            yield f"{where}: {_value(one)} → {_value(other)}"


def _table(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _value(value: Any) -> str:
    return value if value is _ABSENT else msgspec.json.encode(value).decode()


def _read(file: str) -> dict[str, Any]:
    """The tables of a tenants file, without secrets."""
    try:
        tables = read_tables(Path(file).expanduser())
    except TenantsError as error:
        raise SettingsError(str(error)) from None
    return without_secrets(tables)


def _content(settings: ObserverOptions, number: int) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.json.decode(_ask(settings, PolicyRequest(PolicyAction.LIST, number)).content)
    return found


def _do(settings: ObserverOptions, request: PolicyRequest) -> int:
    answer = _ask(settings, request)
    listed(answer).show(tables.console())
    if not answer.durable:
        Console(stderr=True).print("The coordinator has no --usage-db: it forgets this when it ends.")
    return 0


def _ask(settings: ObserverOptions, request: PolicyRequest) -> PolicyAnswer:
    """Raises `NoAnswer`, `SeveralClusters`, `PeerRefused` or `ConfigError`."""
    keys = keys_for(settings, Role.OBSERVER)
    with coordinator_of(settings.coordinator) as coordinator:
        answer = uvloop.run(converse(coordinator, request, PolicyAnswer, _ASK_MS, keys))
    if answer.refusal:
        raise PeerRefused(answer.refusal)
    return answer


def listed(answer: PolicyAnswer) -> tables.Table:
    table = tables.Table("Policy", "version", "digest", tables.words("from"), "age", "organisations", tables.words(""))
    for one in answer.versions:
        state = "in force" if one.number == answer.active else _trial(answer) if one.number == answer.trial else ""
        table.row(str(one.number), one.digest, one.source, _age(one.age_ms), str(one.tenants), state)
    return table


def _trial(answer: PolicyAnswer) -> str:
    parts = [f"{answer.share:.4g} of the organisations"] if answer.share else []
    return f"on trial for {' and '.join([*parts, *_few(answer.organisations)])}"


def _few(names: Sequence[str]) -> list[str]:
    return [", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")] if names else []


def _age(age_ms: float) -> str:
    seconds = age_ms / 1000
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
