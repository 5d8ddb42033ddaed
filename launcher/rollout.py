"""`crossdock rollout`: try a revision of a model on a part of the requests, then give it all of them, or none."""

import sys

import msgspec
import uvloop
from pydantic import Field
from rich.markup import escape

from launcher import tables
from launcher.admin.status import ObserverOptions, converse, coordinator_of
from proto.errors import PeerRefused
from proto.messages import Role
from proto.policy import RevisionStatus, RolloutAction, RolloutAnswer, RolloutRequest
from runtime.link.keys import keys_for
from runtime.settings.options import SettingsError
from runtime.settings.types import JsonOption

_ASK_MS = 10_000


class RolloutOptions(ObserverOptions):
    model_id: str = Field(
        "", max_length=512, description="The model, as clients name it. Empty: the only one that can be meant."
    )


class RolloutStatusSettings(RolloutOptions, JsonOption):
    """Show the revisions of models, which requests each gets, and how these fare.

    Counted are requests since the coordinator started, or since the last start, promote or abort.
    """


class StartSettings(RolloutOptions):
    """Send a part of the requests for a model to another revision.

    First start workers of both roles with --revision REVISION and the --model-id of those that serve. Then start with a small
    share, look at crossdock rollout status, and start again with a larger one; at the end promote or abort.

    A request stays with its revision to its end, and the next turn of a conversation goes to the revision that keeps its KV.
    While the new revision has no workers, the one in force gets its requests.
    """

    revision: str = Field(
        max_length=64,
        description="The revision to try, as its workers have it.",
        json_schema_extra={"argument": "REVISION"},
    )
    share: float = Field(
        0.0, ge=0.0, le=1.0, description="Share of the requests, or of the organisations: 0.1 for a tenth."
    )
    by_organisation: bool = Field(
        False,
        description="The share is of organisations, by a hash of their names, each with all its requests. Otherwise it is of"
        " requests, and sessions with a name stay together.",
    )
    organisations: str = Field("", description="Comma-separated organisations, as well as or instead of --share.")


class RolloutPromoteSettings(RolloutOptions):
    """Send all new requests to the revision on trial.

    The other one gets only next turns of conversations whose KV it keeps. When crossdock rollout status shows that nothing is
    left there, end its workers. Ended earlier, they interrupt streams that no other worker of their revision can continue.
    """


class AbortSettings(RolloutOptions):
    """Send no new requests to the revision on trial.

    What runs there ends there, as after a promotion.
    """


def show_status(settings: RolloutStatusSettings) -> int:
    if not settings.as_json:
        return _do(settings, RolloutRequest(RolloutAction.STATUS))
    found = [msgspec.structs.asdict(one) for one in _ask(settings, RolloutRequest(RolloutAction.STATUS))]
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(found), indent=2).decode() + "\n")
    return 0


def start(settings: StartSettings) -> int:
    names = tuple(filter(None, (name.strip() for name in settings.organisations.split(","))))
    if not settings.share and not names:
        raise SettingsError("--share or --organisations: one of them says which requests the revision gets")
    what = (settings.model_id, settings.revision, settings.share, settings.by_organisation, names)
    return _do(settings, RolloutRequest(RolloutAction.START, *what))


def promote(settings: RolloutPromoteSettings) -> int:
    return _do(settings, RolloutRequest(RolloutAction.PROMOTE, settings.model_id))


def abort(settings: AbortSettings) -> int:
    return _do(settings, RolloutRequest(RolloutAction.ABORT, settings.model_id))


def _ask(settings: RolloutOptions, request: RolloutRequest) -> list[RevisionStatus]:
    """Raises `NoAnswer`, `SeveralClusters`, `PeerRefused` or `ConfigError`."""
    keys = keys_for(settings, Role.OBSERVER)
    with coordinator_of(settings.coordinator) as coordinator:
        answer = uvloop.run(converse(coordinator, request, RolloutAnswer, _ASK_MS, keys))
    if answer.refusal:
        raise PeerRefused(answer.refusal)
    return [one for one in answer.revisions if settings.model_id in ("", one.model)]


def _do(settings: RolloutOptions, request: RolloutRequest) -> int:
    shown, console = _ask(settings, request), tables.console()
    revisions(shown).show(console)
    for one in shown:
        if one.prefill + one.decode and not (one.in_force or one.on_trial or one.running or one.sessions):
            name = escape(one.revision or "without a name")
            console.print(f"Nothing is left on revision {name} of {escape(one.model)}: its workers can be ended.")
    return 0


def revisions(shown: list[RevisionStatus]) -> tables.Table:
    table = tables.Table(
        "Revisions",
        *(tables.words(heading) for heading in ("model", "revision", "state")),
        *("workers", "running", "sessions", "came", "finished", "failed", "mean TTFT ms"),
        keys=2,
    )
    for one in shown:
        ttft = f"{one.ttft_ms / one.finished:.0f}" if one.finished else "–"
        counts = (one.running, one.sessions, one.offered, one.finished, one.failed)
        table.row(one.model, one.revision or "–", _state(one), f"{one.prefill}P{one.decode}D", *map(str, counts), ttft)
    return table


def _state(one: RevisionStatus) -> str:
    if not one.on_trial:
        return "in force" if one.in_force else "no new requests"
    of = "organisations" if one.by_organisation else "requests"
    parts = [f"{one.share:.4g} of the {of}"] if one.share else []
    names = one.organisations[:5] + (("…",) if len(one.organisations) > 5 else ())
    return f"on trial for {' and '.join([*parts, *([', '.join(names)] if names else [])])}"
