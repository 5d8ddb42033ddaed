"""The protocol versions that work together, and the reading of messages of a newer one.

Every structure skips fields after the last that it knows, and every enumeration that may grow reads an unknown value as a known
one (`proto.errors`). This module handles the first message of any peer, and messages that are unknown here.
"""

from collections.abc import Sequence
from typing import Annotated

import msgspec

from proto import limits
from proto.codec import ALL_MESSAGES, DECODE_ERRORS, check_frames, decode, unreadable
from proto.fields import Incarnation, Name, Text
from proto.messages import Hello, Message

_NAMES = frozenset(message.__name__ for message in ALL_MESSAGES)


class HelloPrefix(msgspec.Struct, frozen=True, array_like=True, tag="Hello"):
    """The part of `Hello` that is the same in every version, for ever. The fields after it are skipped."""

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


def version_refusal(theirs: int) -> str | None:
    """Why a peer of this version cannot be talked to, or None. Versions that differ by one work together."""
    own = limits.PROTOCOL_VERSION
    lowest, highest = max(limits.MIN_PROTOCOL_VERSION, own - 1), own + 1
    if lowest <= theirs <= highest:
        return None
    return f"protocol version {theirs}; this end speaks {own} and works with {lowest} to {highest}"


def read_hello(frames: Sequence[bytes]) -> Hello | HelloPrefix | None:
    """Read the first message of a peer. Returns its `Hello`, or only the `HelloPrefix` if its version does not suit, or None
    for another message. Raises `RemoteProtocolError` if it is not a message."""
    if _tag(frames) != Hello.__name__:
        decode(frames)
        return None
    try:
        prefix = _prefix_decoder.decode(frames[0])
    except DECODE_ERRORS as error:
        raise unreadable(error) from None
    if prefix.refusal:
        return prefix
    hello, _ = decode(frames)
    assert isinstance(hello, Hello)
    return hello


def read(frames: Sequence[bytes], version: int) -> tuple[Message | None, bytes]:
    """`decode` for a peer of this version. The message is None if only a newer version knows it."""
    if version > limits.PROTOCOL_VERSION and _tag(frames) not in _NAMES:
        return None, b""
    return decode(frames)


def _tag(frames: Sequence[bytes]) -> str:
    check_frames(frames)
    try:
        return _tag_decoder.decode(frames[0]).name
    except DECODE_ERRORS as error:
        raise unreadable(error) from None
