"""The format of an event log of the core's inputs: a stream of MessagePack records, read back one by one. Pure.

    [MAGIC, version, header]                      once, first
    [[now, name, …event], [sum, count, digest]]   for each event: what the core was given, and what came of it
    [END, reason]                                 last, unless the process was killed

`sum` and `digest` come from one running hash over this event log so far. `sum` is taken after the event's bytes were added, so
that a changed record can be told from a core that acts differently; `digest` is taken after the `count` actions were added. If
the core failed, `count` is `FAILED` and `digest` is the error's text.

Prompt ids are not written, only their length and a fingerprint of 16 bits, by which a request is known when it comes again.
Grammars, the hashes of API keys and the cache groups are not written either, since the core does not use them. Messages stand
as they do on the wire.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final, get_args

import msgspec
from msgspec import structs
from xxhash import xxh64_intdigest

from coordinator.events import Action, Configured, Event, Limits, PeerUp, Received, Send
from proto import codec
from proto.errors import CrossdockError, RemoteProtocolError
from proto.limits import MAX_FRAME_BYTES, PROTOCOL_VERSION
from proto.messages import Hello, Message, Prefill, Reserve, Submit

MAGIC: Final = "crossdock-event-log"
VERSION: Final = 2
END: Final = "end"
FAILED: Final = -1
_PAIR: Final = b"\x92"  # messagePack's mark of an array of two
_SUM_MASK: Final = 0xFFFF_FFFF
_EVENTS: Final[dict[str, type[Event]]] = {kind.__name__: kind for kind in get_args(Event)}


class EventLogError(CrossdockError):
    """The file is not an event log, is damaged, or was recorded by a version that this one cannot replay."""


@dataclass(frozen=True)
class Header:
    limits: Limits
    protocol: int = PROTOCOL_VERSION
    software: str = ""
    platform: str = ""  # Python and machine: elsewhere the last bit of a float may differ
    process: str = ""
    unix_s: float = 0.0  # unix time at which the recording began
    started: float = 0.0  # the time of the core's clock at `unix_s`


@dataclass(frozen=True)
class EventRecord:
    now: float
    event: Event
    head: bytes  # the event's bytes, as written
    sum: int
    count: int  # actions; `FAILED` where the core failed
    digest: int
    error: str = ""


@dataclass(frozen=True)
class End:
    reason: str


def _hook(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    raise NotImplementedError(f"{type(value).__name__} in an event log")


_encoder: Final = msgspec.msgpack.Encoder(enc_hook=_hook)


# --- writing ----------------------------------------------------------------------------------------------------------


def encode_header(header: Header) -> bytes:
    return _encoder.encode((MAGIC, VERSION, header))


def encode_end(reason: str) -> bytes:
    return _encoder.encode((END, reason))


def event_bytes(event: Event, now: float) -> bytes:
    if isinstance(event, Received):
        if not isinstance(event.message, codec.WITH_BLOB):
            return _encoder.encode((now, "Received", event.incarnation, None, event.message))
        prompt = len(event.blob), event.fingerprint
        return _encoder.encode((now, "Received", event.incarnation, prompt, _without_grammar(event.message)))
    if isinstance(event, PeerUp):
        return _encoder.encode((now, "PeerUp", event.incarnation, event.hello))
    if isinstance(event, Configured):
        policies = {name: replace(policy, cache_group="") for name, policy in event.tenants.policies.items()}
        event = replace(event, tenants=replace(event.tenants, keys={}, policies=policies))
    return _encoder.encode((now, type(event).__name__, event))


def _actions_bytes(actions: Iterable[Action]) -> bytes:
    plain = [(a.incarnation, _without_grammar(a.message), len(a.blob)) if isinstance(a, Send) else a for a in actions]
    return _encoder.encode(plain)


def _without_grammar(message: Message) -> Message:
    """A grammar is a client's text, and no decision depends on it."""
    if isinstance(message, Submit | Prefill | Reserve) and message.sampling.grammar:
        return structs.replace(message, sampling=structs.replace(message.sampling, grammar=""))
    return message


class Chain:
    """The running hash, on either side: the header's bytes, then those of each event and of its actions, each hashed with the
    hash so far as its seed. (xxh64: xxh3's wide vector registers take longer to wake up than so few bytes take to hash.)"""

    def __init__(self, header: bytes) -> None:
        self._hash: int = xxh64_intdigest(header)
        self._head = b""
        self.sum = 0

    def add_event(self, head: bytes) -> None:
        self._head = head
        self._hash = xxh64_intdigest(head, self._hash)
        self.sum = self._hash & _SUM_MASK

    def add_actions(self, actions: Iterable[Action]) -> int:
        self._hash = xxh64_intdigest(_actions_bytes(actions), self._hash)
        return self._hash

    def record(self, count: int, digest: int | str) -> bytes:
        """Returns the record of the last event, with its digest."""
        return _PAIR + self._head + _encoder.encode((self.sum, count, digest))


# --- reading ----------------------------------------------------------------------------------------------------------


def as_written(record: object) -> bytes:
    """Returns the bytes of a record that was read. Each value has only one encoding here, so they equal the bytes that were
    written."""
    return _encoder.encode(record)


def decode_header(record: object) -> Header:
    """Raises `EventLogError`."""
    if not isinstance(record, list) or len(record) != 3 or record[0] != MAGIC:
        raise EventLogError("not an event log of the coordinator")
    if record[1] != VERSION:
        raise EventLogError(f"an event log of format {record[1]}; this version reads {VERSION}")
    try:
        header = msgspec.convert(record[2], Header)
    except msgspec.ValidationError as error:
        raise EventLogError(f"its header cannot be read: {error}") from None
    if header.protocol != PROTOCOL_VERSION:
        raise EventLogError(
            f"recorded with protocol {header.protocol} by crossdock {header.software}; this version speaks {PROTOCOL_VERSION}"
        )
    return header


def decode_record(record: object) -> EventRecord | End:
    """Raises `EventLogError` whatever the record holds."""
    match record:
        case ["end", str(reason)]:
            return End(reason)
        case [[float() | int() as now, str(name), *rest], [int(sum_), int(count), digest]]:
            event, head = _decode_event(name, rest), as_written([now, name, *rest])
            if isinstance(digest, int) and count >= 0:
                return EventRecord(now, event, head, sum_, count, digest)
            if isinstance(digest, str) and count == FAILED:
                return EventRecord(now, event, head, sum_, count, 0, digest)
    raise EventLogError("not a record of an event log")


def _decode_event(name: str, rest: list[Any]) -> Event:
    match name, rest:
        case "Received", [int(incarnation), None, list(message)]:
            return Received(incarnation, _decode_message([as_written(message)]))
        case "Received", [int(incarnation), [int(count), int(found)], list(message)] if 0 <= count <= MAX_FRAME_BYTES:
            blob = _zeros(count)
            return Received(incarnation, _decode_message([as_written(message), blob]), blob, found)
        case "PeerUp", [int(incarnation), list(message)] if isinstance(
            hello := _decode_message([as_written(message)]), Hello
        ):
            return PeerUp(incarnation, hello)
        case _, [dict(fields)] if name in _EVENTS and name not in ("Received", "PeerUp"):
            try:
                return msgspec.convert(fields, _EVENTS[name])
            except msgspec.ValidationError as error:
                raise EventLogError(f"{name}: {error}") from None
    raise EventLogError(f"an event {name[:50]!r} that this version does not know")


@lru_cache(maxsize=256)
def _zeros(count: int) -> bytes:
    """Returns zeros instead of a prompt's ids. They are shared, since a replay may have a million prompts waiting."""
    return bytes(count)


def _decode_message(frames: list[bytes]) -> Message:
    try:
        return codec.decode(frames)[0]
    except RemoteProtocolError as error:
        raise EventLogError(str(error)) from None
