"""An event log, executed again by the production core: the same events must lead to the same actions. Pure.

`Replay(stream).run(observer)` stops at the first difference. An observer sees each event before and after the core has handled
it, and may set `core.cluster.watch` for what lies between.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, Final, Protocol

import msgpack

from coordinator.core import Core
from coordinator.event_log.format import (
    FAILED,
    Chain,
    End,
    EventLogError,
    EventRecord,
    Header,
    as_written,
    decode_header,
    decode_record,
)
from coordinator.events import Action, Event

RECORD_BYTES_MAX: Final = 32 << 20  # no record is larger: a frame on the wire is 8 MiB at the most


class Observer(Protocol):
    def before(self, core: Core, event: Event, now: float) -> None: ...

    def after(self, core: Core, event: Event, now: float, actions: list[Action]) -> None: ...


@dataclass(frozen=True)
class Difference:
    """The point at which the event log and the core differ."""

    number: int  # the event's number, from 1
    at_s: float  # seconds since the recording began
    event: Event
    why: str
    recorded: str
    replayed: str
    actions: tuple[Action, ...] = ()  # as replayed; of the recorded ones only their number and digest are known


class Replay:
    """Reads the header at once. Raises `EventLogError` where there is none, or none of this version."""

    def __init__(self, stream: BinaryIO) -> None:
        self._unpacker = msgpack.Unpacker(stream, max_buffer_size=RECORD_BYTES_MAX)
        self.bytes_read = 0
        self.events = self.actions = 0
        self.last_s = 0.0  # when the last event came, since the recording began
        self.ended = ""  # why the recording ended; empty where it was cut off
        self.failed = ""  # the error with which the core ended, when recorded and now
        first = next(self._records(), None)
        if first is None:
            raise EventLogError("not an event log of the coordinator: there is no whole record in it")
        self.header: Header = decode_header(first)
        self.core = Core(self.header.limits)
        self._chain = Chain(as_written(first))

    def run(self, observer: Observer | None = None) -> Difference | None:
        """Returns the first difference, or None. Raises `EventLogError` at an invalid record; stops at a record that is cut
        off at the end (`bytes_read`)."""
        for raw in self._records():
            if self.ended:
                raise EventLogError(f"after byte {self.bytes_read}, a record behind the last one")
            record = self._decoded(raw)
            if isinstance(record, End):
                self.ended = record.reason or "no reason given"
                continue
            self.events += 1
            self.last_s = record.now - self.header.started
            difference = self._step(record, observer)
            if difference is not None:
                return difference
        return None

    def _records(self) -> Iterator[object]:
        while True:
            try:
                record = self._unpacker.unpack()
            except msgpack.OutOfData:
                return
            except (msgpack.UnpackException, ValueError) as error:
                why = str(error) or type(error).__name__
                raise EventLogError(f"after byte {self.bytes_read}, what follows is no record: {why}") from None
            self.bytes_read = self._unpacker.tell()
            yield record

    def _decoded(self, raw: object) -> EventRecord | End:
        try:
            return decode_record(raw)
        except EventLogError as error:
            raise EventLogError(f"event {self.events + 1}, before byte {self.bytes_read}: {error}") from None

    def _step(self, record: EventRecord, observer: Observer | None) -> Difference | None:
        event, now = record.event, record.now
        self._chain.add_event(record.head)
        if self._chain.sum != record.sum:
            why = "the record is not what was written: it was changed, or one before it is missing"
            return self._difference(record, why, f"sum {record.sum:08x}", f"sum {self._chain.sum:08x}")
        if observer is not None:
            observer.before(self.core, event, now)
        try:
            actions = self.core.handle(event, now)
        except Exception as error:  # noqa: BLE001 - whatever the core fails with is what is compared
            if record.count == FAILED and record.error == repr(error)[: len(record.error)]:
                self.failed = record.error
                return None
            return self._difference(record, "the core failed", _recorded(record), repr(error))
        digest = self._chain.add_actions(actions)
        if record.count != len(actions) or record.digest != digest:
            replayed = f"{len(actions)} actions, digest {digest:016x}"
            return self._difference(record, "the actions differ", _recorded(record), replayed, tuple(actions))
        self.actions += len(actions)
        if observer is not None:
            observer.after(self.core, event, now, actions)
        return None

    def _difference(
        self, record: EventRecord, why: str, recorded: str, replayed: str, actions: tuple[Action, ...] = ()
    ) -> Difference:
        return Difference(self.events, self.last_s, record.event, why, recorded, replayed, actions)


def _recorded(record: EventRecord) -> str:
    return record.error if record.count == FAILED else f"{record.count} actions, digest {record.digest:016x}"
