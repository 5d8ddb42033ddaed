"""Reading messages of a peer that speaks another protocol version, and the first message of any peer.

A peer of the next version may append fields to messages and to the structures inside them, send messages that are unknown
here, and use unknown values of an enumeration. Fields that are unknown are skipped without being built, an unknown message
is None, and an unknown value becomes the one in `UNKNOWN_AS`. Types and bounds of everything known are checked as usual.

How: for each message there is a twin class that allows unknown trailing fields and has text where the message has an
enumeration. msgspec decodes the twin, and the message is built from it. A peer of the same version is never read this way:
`codec.decode` refuses what it does not know.
"""

import types
from collections.abc import Callable, Sequence
from enum import Enum
from functools import cache
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import msgspec

from proto import limits
from proto.codec import ALL_MESSAGES, blob_of, check_frames, decode, unreadable
from proto.errors import CancelReason, FinishReason, Interrupt, Reject, RemoteProtocolError
from proto.fields import Incarnation, Name, Text
from proto.messages import Hello, Message, Refused, Welcome

UNKNOWN_AS: dict[type[Enum], Enum] = {
    Reject: Reject.NO_CAPACITY,
    Interrupt: Interrupt.ENGINE_ERROR,
    FinishReason: FinishReason.STOP,
    CancelReason: CancelReason.ABANDONED,
}
"""What a value of a newer version is taken for: the one with the fewest consequences. A message with an unknown value of any
other enumeration, like `Role`, is refused."""

_EnumText = Annotated[str, msgspec.Meta(max_length=64)]
_Build = Callable[[Any], Any]


class HelloPrefix(msgspec.Struct, frozen=True, array_like=True, tag="Hello"):
    """The part of `Hello` that is the same in every version, for ever. What follows is skipped."""

    version: int
    role: Annotated[str, msgspec.Meta(pattern=r"^[a-z_]{1,32}\Z")]
    incarnation: Incarnation
    name: Name

    @property
    def refusal(self) -> str:
        """Why this end cannot talk to it; empty if its version suits."""
        return version_refusal(self.version) or ""


class _Tag(msgspec.Struct, frozen=True, array_like=True):
    """The first element of a message; the others are skipped."""

    name: Text


_tag_decoder = msgspec.msgpack.Decoder(_Tag)
_prefix_decoder = msgspec.msgpack.Decoder(HelloPrefix)
_by_name = {message.__name__: message for message in ALL_MESSAGES}


def version_refusal(theirs: int) -> str | None:
    """Why a peer of this version cannot be talked to, or None. Versions that differ by one work together."""
    own = limits.PROTOCOL_VERSION
    lowest, highest = max(limits.MIN_PROTOCOL_VERSION, own - 1), own + 1
    if lowest <= theirs <= highest:
        return None
    return f"protocol version {theirs}; this end speaks {own} and works with {lowest} to {highest}"


def read_hello(frames: Sequence[bytes]) -> Hello | HelloPrefix | None:
    """The first message of a peer: its Hello, what can be read of one that has no suitable version, or None if it is another
    message. Raises `RemoteProtocolError` if it is none at all."""
    if _tag(frames) != Hello.__name__:
        decode(frames)
        return None
    try:
        prefix = _prefix_decoder.decode(frames[0])
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, OverflowError) as error:
        raise unreadable(error) from None
    if prefix.refusal:
        return prefix
    hello, _ = read(frames, prefix.version)
    assert isinstance(hello, Hello)
    return hello


def read_answer(frames: Sequence[bytes]) -> Message:
    """What a peer of any version answers to a Hello. Raises `RemoteProtocolError`."""
    if _tag(frames) not in (Welcome.__name__, Refused.__name__):
        return decode(frames)[0]
    answer, _ = decode_newer(frames)
    if isinstance(answer, Welcome) and answer.version == limits.PROTOCOL_VERSION:
        return decode(frames)[0]
    assert answer is not None
    return answer


def read(frames: Sequence[bytes], version: int) -> tuple[Message | None, bytes]:
    """`decode` for a peer of this version. The message is None if only a newer version knows it."""
    return decode_newer(frames) if version > limits.PROTOCOL_VERSION else decode(frames)


def decode_newer(frames: Sequence[bytes]) -> tuple[Message | None, bytes]:
    """`decode` for a peer of a newer version. Raises `RemoteProtocolError`."""
    known = _by_name.get(_tag(frames))
    if known is None:
        return None, b""
    decoder, build = _reader(known)
    try:
        message: Message = build(decoder.decode(frames[0]))
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, OverflowError) as error:
        raise unreadable(error) from None
    return message, blob_of(message, frames)


def _tag(frames: Sequence[bytes]) -> str:
    check_frames(frames)
    try:
        return _tag_decoder.decode(frames[0]).name
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, OverflowError) as error:
        raise unreadable(error) from None


@cache
def _reader(message: type[Message]) -> "tuple[msgspec.msgpack.Decoder[Any], _Build]":
    twin, build = _struct_twin(message)
    return msgspec.msgpack.Decoder(twin), build


@cache
def _struct_twin(struct: type[msgspec.Struct]) -> tuple[Any, _Build]:
    """The twin of a structure, and what builds the structure from its twin."""
    hints = get_type_hints(struct, include_extras=True)
    fields: list[Any] = []
    builds: dict[str, _Build] = {}
    for field in msgspec.structs.fields(struct):
        twin, builds[field.name] = _twin(hints[field.name])
        fields.append((field.name, twin) if field.required else (field.name, twin | msgspec.UnsetType, msgspec.UNSET))
    tag = struct.__struct_config__.tag
    twin_struct = msgspec.defstruct(struct.__name__, fields, array_like=True, tag=tag, frozen=True, gc=False)

    def build(value: Any) -> Any:
        given = ((name, getattr(value, name), make) for name, make in builds.items())
        return struct(**{name: make(part) for name, part, make in given if part is not msgspec.UNSET})

    return twin_struct, build


def _twin(hint: Any) -> tuple[Any, _Build]:
    """The same for the type of a field."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        twin, build = _twin(parts[0])
        return Annotated.__class_getitem__((twin, *parts[1:])), build
    if origin in (Union, types.UnionType):
        (only,) = (part for part in parts if part is not types.NoneType)
        twin, build = _twin(only)
        return Union.__getitem__((twin, None)), lambda value: None if value is None else build(value)
    if origin is tuple and parts[1:] == (...,):
        twin, build = _twin(parts[0])
        return tuple.__class_getitem__((twin, ...)), _as_it_is if build is _as_it_is else lambda value: tuple(
            map(build, value)
        )
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return _struct_twin(hint)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _EnumText, lambda value: _value_of(hint, value)
    return hint, _as_it_is


def _as_it_is(value: Any) -> Any:
    return value


def _value_of(kind: type[Enum], text: str) -> Enum:
    try:
        return kind(text)
    except ValueError:
        if kind in UNKNOWN_AS:
            return UNKNOWN_AS[kind]
    raise RemoteProtocolError(f"{text[:40]!r} is no {kind.__name__} that is known here")
