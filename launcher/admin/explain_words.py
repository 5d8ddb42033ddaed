"""A request's timeline in plain words."""

from collections import Counter
from collections.abc import Sequence

from msgspec.structs import replace
from rich.console import Console
from rich.markup import escape

from coordinator.event_log.felt import Felt, FeltRequest
from coordinator.event_log.reasons import (
    AwaitsTrial,
    BehindNoRoom,
    By,
    CachedElsewhere,
    FasterElsewhere,
    NoRoomOnWorker,
    OrderWithinTenant,
    OtherTurn,
    Reason,
    RoomKept,
    SameTenant,
)
from coordinator.event_log.timeline import (
    Changed,
    ChunkSent,
    Entry,
    KeptFor,
    LoggedAdvice,
    Passed,
    Placed,
    RequestEnded,
    RoleChange,
    Submitted,
)
from coordinator.events import Action, Event, Received, Send
from coordinator.state import FELT_MS
from launcher import tables
from proto.messages import Waits
from scheduler.decisions import StepEnd

CHUNKS_MAX = 12  # a longer run is shown as one entry
_ORDERS = {
    OrderWithinTenant.DEADLINE: "it is due {due:.3f} s earlier",
    OrderWithinTenant.FEWER_CHUNKS: "it is due at the same time and has fewer chunks left",
    OrderWithinTenant.CAME_FIRST: "it came first",
    OrderWithinTenant.AGED: "it had been overtaken so often that it went first",
}
_RANKED = {
    "ttft": "Waited longest for their first token",
    "duration": "Took longest",
    "gap": "Stood still longest within their answer",
    "queue": "Waited longest in the queue",
}
_PHASES = {"handing_over": "transfer", "decoding": "decode", "interrupted": "interrupted"}
_KINDS = {
    OtherTurn: "another tenant's turn",
    SameTenant: "another request of the same tenant",
    NoRoomOnWorker: "no room",
    RoomKept: "room kept for another",
    BehindNoRoom: "behind others without room",
    CachedElsewhere: "waiting for a worker with more of it cached",
    FasterElsewhere: "waiting for a faster worker",
    AwaitsTrial: "waiting to be tried without other suspects",
}


def without_blob(what: Action | Event) -> str:
    """Returns the text of an action or event, with the number of a prompt's ids instead of the ids."""
    if isinstance(what, Send | Received) and what.blob:
        return f"{replace(what, blob=b'')}"[:-1].removesuffix(", blob=b''") + f", {len(what.blob)} bytes of ids)"
    return str(what)


def show_felt(
    felt: Felt, worst: Sequence[FeltRequest], unfinished: Sequence[FeltRequest], by: str, console: Console
) -> None:
    if not felt.requests:
        console.print("No request came while this was recorded: the cluster was idle.")
        return
    figures = ("TTFT s", "duration s", "longest gap s", "queued s", "came at s", "prompt tokens")
    texts = (tables.words(heading) for heading in ("tenant", "priority_class", "outcome"))
    table = tables.Table(f"{_RANKED[by]}, of {felt.requests:,} requests", "request", *figures, *texts)
    for row in worst:
        ttft = "none" if row.ttft_s is None else f"{row.ttft_s:,.3f}"
        times = (f"{value:,.3f}" for value in (row.duration_s, row.gap_s, row.waited_s, row.submitted_s))
        table.row(row.request, ttft, *times, f"{row.prompt_tokens:,}", row.tenant, row.priority_class, row.outcome)
    table.show(console)
    if unfinished:
        texts = (tables.words(heading) for heading in ("tenant", "outcome", "why"))
        shown = f", the last {len(unfinished)}" if felt.unfinished > len(unfinished) else ""
        title = f"Rejected, failed or left by their clients: {felt.unfinished:,}{shown}"
        table = tables.Table(title, "request", "came at s", "ended after s", *texts)
        for row in unfinished:
            times = (f"{value:,.3f}" for value in (row.submitted_s, row.duration_s))
            table.row(row.request, *times, row.tenant, row.outcome, row.why)
        table.show(console)


def show_timeline(request_id: str, entries: Sequence[Entry], console: Console) -> None:
    first = entries[0]
    if isinstance(first, Submitted):
        console.print(
            f"[bold]{escape(request_id)}[/bold] of {escape(first.tenant)}, priority class {escape(first.priority_class)}:"
            f" {first.prompt_tokens:,} prompt tokens, up to {first.max_tokens:,} more"
        )
    table = tables.Table("", tables.Column(""), tables.words(""))
    for at, text in lines(entries):
        table.row(at, text)
    table.show(console)
    console.print(escape(summary(entries)))


def show_ratio(entries: Sequence[RoleChange | LoggedAdvice], console: Console) -> None:
    if not entries:
        console.print("No worker changed its role, and no autopilot wanted it.")
        return
    table = tables.Table("Changes of role and advice", tables.Column("at"), tables.words(""))
    for at, text in lines(entries):
        table.row(at, text)
    table.show(console)


def lines(entries: Sequence[Entry]) -> list[tuple[str, str]]:
    """Returns (when, what) in order of time; long runs of chunks are one line."""
    told: list[tuple[str, str]] = []
    run: list[ChunkSent] = []
    for entry in sorted(entries, key=lambda e: e.at_s):
        if isinstance(entry, ChunkSent):
            run.append(entry)
            continue
        if not isinstance(entry, Passed):
            told += _chunks(run)
            run = []
        told.append((_when(entry), _words(entry)))
    return told + _chunks(run)


def summary(entries: Sequence[Entry]) -> str:
    passed = [entry for entry in entries if isinstance(entry, Passed)]
    times: Counter[str] = Counter()
    for entry in passed:
        times[_KINDS[type(entry.reason)]] += entry.times
    began = next((e.at_s for e in entries if isinstance(e, ChunkSent)), None)
    waited = "It never ran" if began is None else f"Its first prefill chunk started after {began:.3f} s"
    for placed in entries:
        if isinstance(placed, Placed) and placed.waits.total >= FELT_MS:
            parts = ((name.replace("_", " "), getattr(placed.waits, name)) for name in Waits.__struct_fields__)
            waited += "; it waited for " + ", ".join(f"{name} {ms / 1000:.3f} s" for name, ms in parts if ms >= FELT_MS)
    if not passed:
        return f"{waited}; it was never passed over.{_account(entries)}"
    reasons = ", ".join(f"{count:,} × {kind}" for kind, count in times.most_common())
    return f"{waited}; it was passed over {_times(sum(times.values()))}: {reasons}.{_account(entries)}"


def _account(entries: Sequence[Entry]) -> str:
    """Where all of the time went, if the request has ended."""
    spent: dict[str, float] = {}
    phase, since = "", 0.0
    for entry in entries:
        following = _phase_from(entry)
        if following is None:
            continue
        if phase:
            spent[phase] = spent.get(phase, 0.0) + entry.at_s - since
        phase, since = following, entry.at_s
    if phase or not sum(spent.values()):
        return ""
    parts = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in spent.items())
    return f"\nIt took {sum(spent.values()):.3f} s: {parts}."


def _phase_from(entry: Entry) -> str | None:
    """The phase that begins here; empty: none, as the request has ended; None: the present one goes on."""
    match entry:
        case Submitted():
            return "queue"
        case Placed():
            return "prefill"
        case Changed(state=state) if state in _PHASES:
            return _PHASES[state]
        case RequestEnded():
            return ""
        case _:
            return None


def _when(entry: Entry) -> str:
    if isinstance(entry, Passed) and entry.until_s > entry.at_s:
        return f"+{entry.at_s:.3f} to {entry.until_s:.3f} s"
    return f"+{entry.at_s:.3f} s"


def _words(entry: Entry) -> str:
    match entry:
        case Submitted():
            attempt = f", attempt {entry.attempt}" if entry.attempt > 1 else ""
            return (
                f"submitted{attempt}: {_count(entry.waiting, 'request')} waited already,"
                f" {entry.waiting_of_tenant:,} of them of this tenant"
            )
        case Passed():
            return _passed(entry)
        case KeptFor():
            return f"others got room before it {_times(entry.bypassed)}: from now on what comes free is kept for it"
        case Placed():
            return _placed(entry)
        case Changed():
            return _changed(entry)
        case RequestEnded():
            return _ended(entry)
        case ChunkSent():
            return _chunk(entry)
        case RoleChange():
            return _role_change(entry)
        case LoggedAdvice():
            return _advice(entry)


def _placed(entry: Placed) -> str:
    why = "there was room at last, kept for it" if entry.kept else "its turn"
    if entry.there_s or entry.elsewhere_s:
        why = (
            f"it computes what the prompt adds to its KV, expected in {entry.there_s:.2f} s; elsewhere in"
            f" {entry.elsewhere_s:.2f} s"
        )
    cached = f"; {_count(entry.cached_tokens, 'token')} of its prompt cached there" if entry.cached_tokens else ""
    if entry.fetched_tokens:
        cached = (
            f"; {_count(entry.cached_tokens, 'token')} of its prompt cached, {entry.fetched_tokens:,} of them on its decode"
            f" worker: fetching those is expected to take {entry.fetch_s:.3f} s, computing them {entry.compute_s:.3f} s"
        )
    projected = f"; a wait of {entry.projected_s:.1f} s was projected" if entry.projected_s >= 0.1 else ""
    return f"placed on {entry.workers}: {why}{cached}; {_count(entry.kv_blocks, 'KV block')} reserved for its answer{projected}"


def _changed(entry: Changed) -> str:
    match entry.state:
        case "handing_over":
            return "prompt computed; the last of its KV is on its way"
        case "decoding":
            return f"KV handed over in {entry.transfer_ms:.0f} ms; decoding" if entry.transfer_ms else "decoding"
        case state:
            return f"{state}: {entry.why}"


def _ended(entry: RequestEnded) -> str:
    if entry.outcome == "finished":
        return "finished"
    text = f"{entry.outcome}: {entry.why}"
    if entry.by is not None:
        text += f", for {_who(entry.by)}"
    return text + (f" (Retry-After {entry.retry_after_s:.1f} s)" if entry.retry_after_s else "")


def _role_change(entry: RoleChange) -> str:
    why = f"; {entry.why}" if entry.why else ""
    match entry.state:
        case "done":
            return f"{entry.worker} is a {entry.role} worker now, after {entry.took_ms:.0f} ms"
        case "failed":
            return f"{entry.worker} stays a {entry.before} worker: {entry.failure}"
        case _:
            return f"{entry.worker}, a {entry.before} worker, is ordered to become a {entry.role} worker{why}"


def _advice(entry: LoggedAdvice) -> str:
    if entry.wanted == entry.present:
        return f"the autopilot wants no other ratio than {entry.present} any more: {entry.reason}"
    return f"the autopilot ({entry.mode}) wants {entry.wanted} instead of {entry.present}: {entry.reason}"


def _passed(entry: Passed) -> str:
    whose = ", ".join(entry.requests)
    if entry.requests_in_all > len(entry.requests):
        whose += f" and {entry.requests_in_all - len(entry.requests):,} more"
    return f"passed over {_times(entry.times)}: {_reason(entry.reason, whose)}"


def _reason(reason: Reason, whose: str) -> str:
    match reason:
        case OtherTurn():
            return (
                f"the turn of {reason.by.tenant}, priority class {reason.by.priority_class} ({whose});"
                f" {reason.level} {reason.winner} has had less of its share than {reason.ours},"
                f" round {reason.winner_round:,.0f} against {reason.our_round:,.0f}"
            )
        case SameTenant():
            return f"{whose} of the same tenant first: {_ORDERS[reason.order].format(due=reason.due_before_s)}"
        case NoRoomOnWorker():
            return _no_room(reason)
        case RoomKept():
            bypassed = f"which others had bypassed {_times(reason.bypassed)}"
            return f"no room; what comes free is kept for {_who(reason.by)}, {bypassed}"
        case CachedElsewhere():
            return (
                f"it was bound to {reason.worker}, which has {reason.cached_tokens:,} tokens of its prompt cached;"
                f" {reason.asked} has {reason.cached_tokens_there:,}"
            )
        case FasterElsewhere():
            return (
                f"it was bound to {reason.worker}, which is expected to have computed it in {reason.done_s:.2f} s;"
                f" {reason.asked} would take {reason.done_there_s:.2f} s"
            )
        case AwaitsTrial():
            return f"{reason.losses} workers were lost while they computed it; it waits for one without other such requests"
        case BehindNoRoom():
            return f"{whose} before it had no room" if whose else "those before it had no room, and none has come free"


def _no_room(reason: NoRoomOnWorker) -> str:
    if reason.circuit_open:
        return f"transfers to {reason.worker} failed one after the other: that pair is left out for a while"
    lacks = []
    if reason.blocks_needed > reason.blocks_free:
        lacks.append(f"{reason.blocks_needed:,} KV blocks needed, {reason.blocks_free:,} free")
    if reason.seqs_needed > reason.seqs_free:
        lacks.append(f"{_count(reason.seqs_needed, 'sequence')} needed, {reason.seqs_free:,} free")
    text = f"no room on {reason.worker}: {' and '.join(lacks) or 'none that fits all of its life'}"
    if reason.most_held_by:
        text += f"; {reason.most_held_by} holds {reason.most_held_blocks:,}"
    return text + ("; what comes free is kept for it" if reason.kept else "")


def _chunks(run: list[ChunkSent]) -> list[tuple[str, str]]:
    if len(run) <= CHUNKS_MAX:
        return [(_when(chunk), _chunk(chunk)) for chunk in run]
    first, last = run[0], run[-1]
    where = first.worker if first.worker == last.worker else f"{first.worker} and others"
    tokens = sum(chunk.tokens for chunk in run)
    text = (
        f"{len(run):,} chunks, tokens {first.start:,} to {last.start + last.tokens - 1:,} of {first.prompt_tokens:,}"
        f" ({tokens:,}), in steps {first.step:,} to {last.step:,} of {where}"
    )
    return [(f"+{first.at_s:.3f} to {last.at_s:.3f} s", text)]


def _chunk(chunk: ChunkSent) -> str:
    beside = f", beside {_count(chunk.beside, 'other')}" if chunk.beside else ""
    end = chunk.start + chunk.tokens - 1
    tokens = f"tokens {chunk.start:,} to {end:,} of {chunk.prompt_tokens:,}"
    not_full = f"; not full: {chunk.end.replace('_', ' ')}" if chunk.end not in ("", StepEnd.FULL) else ""
    return f"step {chunk.step:,} of {chunk.worker}: {tokens}{beside}{not_full}"


def _who(other: By) -> str:
    return f"{other.request} of {other.tenant}, priority class {other.priority_class}"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count:,} times"


def _count(count: int, what: str) -> str:
    return f"{count:,} {what}" + ("" if count == 1 else "s")
