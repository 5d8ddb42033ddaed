"""`crossdock replay` and `crossdock explain`: a coordinator's event log, executed again, checked, and told in plain words."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from rich.console import Console
from rich.markup import escape

from coordinator.event_log.felt import Felt
from coordinator.event_log.format import EventLogError
from coordinator.event_log.replay import Difference, Observer, Replay
from coordinator.event_log.timeline import Entry, RatioChanges, RequestsNamed, Timeline
from launcher import tables
from launcher.admin import explain_words
from launcher.admin.event_log_settings import ExplainSettings, ReplaySettings
from runtime.process import clock

Seen = TypeVar("Seen", bound=Observer)
LISTED = 20  # requests, in each list
MATCHES_MAX = 20  # ids listed if several begin alike


@contextmanager
def _opened(path: str) -> Iterator[Replay]:
    """Opens the event log. Raises `EventLogError` that names the file, also for errors inside the context."""
    try:
        with Path(path).expanduser().open("rb") as file:
            yield Replay(file)
    except OSError as error:
        raise EventLogError(f"{path}: {error.strerror}") from None
    except EventLogError as error:
        raise EventLogError(f"{path}: {error}") from None


def _rest_bytes(path: str, replay: Replay) -> int:
    """Bytes behind the last whole record."""
    return Path(path).expanduser().stat().st_size - replay.bytes_read


def _ending(replay: Replay, rest_bytes: int) -> str:
    if replay.failed:
        return f"The core failed at the last event, when recorded and now: {replay.failed}"
    if replay.ended:
        return f"The recording ended: {replay.ended}."
    cut = f"; its last {rest_bytes} bytes are no whole record and were left out" if rest_bytes else ""
    return f"The recording was cut off: the coordinator was killed, or is still running{cut}."


def _print_json(value: Any) -> None:
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n")


# --- replay -----------------------------------------------------------------------------------------------------------


def replay(settings: ReplaySettings) -> int:
    """Raises `EventLogError`."""
    with _opened(settings.file) as again:
        began = clock.now()
        difference = again.run()
        took_s = clock.now() - began
    rest_bytes = _rest_bytes(settings.file, again)
    if settings.as_json:
        _print_json(_replay_json(again, difference, took_s, rest_bytes))
    else:
        _show_replay(again, difference, took_s, rest_bytes, tables.console(highlight=False))
    return 0 if difference is None else 1


def _replay_json(again: Replay, difference: Difference | None, took_s: float, rest_bytes: int) -> dict[str, Any]:
    header = again.header
    return {
        "recorded": {
            "process": header.process,
            "software": header.software,
            "platform": header.platform,
            "unix_s": header.unix_s,
            "seconds": again.last_s,
            "ended": again.ended,
            "failed": again.failed,
            "bytes": again.bytes_read,
            "cut_off_bytes": 0 if difference else rest_bytes,
        },
        "events": again.events,
        "actions": again.actions,
        "replay_s": took_s,
        "identical": difference is None,
        "difference": None
        if difference is None
        else {
            "event_number": difference.number,
            "at_s": difference.at_s,
            "event": explain_words.without_blob(difference.event),
            "why": difference.why,
            "recorded": difference.recorded,
            "replayed": difference.replayed,
            "actions": [str(action) for action in difference.actions],
        },
    }


def _show_replay(
    again: Replay, difference: Difference | None, took_s: float, rest_bytes: int, console: Console
) -> None:
    header = again.header
    when = f"{datetime.fromtimestamp(header.unix_s, UTC):%Y-%m-%d %H:%M:%S} UTC"
    print_ = console.print
    print_(f"Recorded by {header.process} (crossdock {header.software}, {header.platform}) from {when}", soft_wrap=True)
    print_(
        f"{again.events:,} events, {again.actions:,} actions, {again.last_s:,.1f} s of serving replayed in {took_s:.1f} s"
    )
    if difference is None:
        print_(escape(_ending(again, rest_bytes)), soft_wrap=True)
        print_("[green]Every action is the same.[/green]")
        return
    print_(f"[red]Event {difference.number:,}, after {difference.at_s:.6f} s: {difference.why}.[/red]", soft_wrap=True)
    print_(f"  event     {escape(explain_words.without_blob(difference.event))}", soft_wrap=True)
    print_(f"  recorded  {escape(difference.recorded)}", soft_wrap=True)
    print_(f"  replayed  {escape(difference.replayed)}", soft_wrap=True)
    for action in difference.actions:
        print_(f"            {escape(explain_words.without_blob(action))}", soft_wrap=True)


# --- explain ----------------------------------------------------------------------------------------------------------


def explain(settings: ExplainSettings) -> int:
    """Raises `EventLogError`."""
    console = tables.console(highlight=False)
    if settings.request:
        request, entries = _timeline(settings.file, settings.request)
        if settings.as_json:
            words = {"words": explain_words.lines(entries), "summary": explain_words.summary(entries)}
            _print_json({"request": request, "timeline": entries} | words)
        else:
            explain_words.show_timeline(request, entries, console)
        return 0
    if settings.flips:
        changes = _replayed(settings.file, lambda again: RatioChanges(again.header.started)).entries
        if settings.as_json:
            _print_json(changes)
        else:
            explain_words.show_ratio(changes, console)
        return 0
    felt = _replayed(settings.file, lambda again: Felt(again.header.started, LISTED, settings.by))
    worst, unfinished = felt.finish()
    if settings.as_json:
        _print_json({"requests": worst, "unfinished": unfinished})
    else:
        explain_words.show_felt(felt, worst, unfinished, settings.by, console)
    return 0


def _timeline(file: str, wanted: str) -> tuple[str, list[Entry]]:
    """Returns the timeline of the request with this id, or of the only request whose id begins with it. Raises
    `EventLogError`."""
    if entries := _replayed(file, lambda _: Timeline(wanted)).finish():
        return wanted, entries
    found = sorted(_replayed(file, lambda _: RequestsNamed(wanted)).found)
    if len(found) != 1:
        raise EventLogError(f"{file}: {_no_such(wanted, found)}")
    return found[0], _replayed(file, lambda _: Timeline(found[0])).finish()


def _replayed(file: str, make: Callable[[Replay], Seen]) -> Seen:
    """An observer that has seen all of the event log. Raises `EventLogError`."""
    with _opened(file) as again:
        observer = make(again)
        difference = again.run(observer)
    if difference is not None:
        raise EventLogError(f"{file}: at event {difference.number}, {difference.why}; crossdock replay says more")
    return observer


def _no_such(wanted: str, found: list[str]) -> str:
    if not found:
        return f"no request {wanted!r}; without REQUEST, some are listed"
    more = [f"and {len(found) - MATCHES_MAX:,} more"] if len(found) > MATCHES_MAX else []
    first = f"{len(found):,} requests begin with {wanted!r}:"
    return "\n    ".join([first, *found[:MATCHES_MAX], *more])
