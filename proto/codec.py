"""Bytes in, typed messages out, and back.

    encode(message) -> bytes
    to_frames(message, blob) -> frames
    decode(frames) -> (message, blob)      raises RemoteProtocolError on anything that is not exactly one message

A receiver passes the frames of one multipart message unchanged. The codec never allocates memory by a length that a frame
states.
"""

import sys
from array import array
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Union

import msgspec

from proto import drain, kv, limits, messages, policy, progress, status
from proto.errors import RemoteProtocolError
from proto.messages import Message

WITH_BLOB: tuple[type[Message], ...] = (messages.Submit, messages.Prefill, kv.Commit)  # followed by a binary frame


def _defined_in(module: ModuleType) -> list[type[Message]]:
    values = [value for value in vars(module).values() if isinstance(value, type) and issubclass(value, Message)]
    return [value for value in values if value is not Message and value.__module__ == module.__name__]


ALL_MESSAGES: tuple[type[Message], ...] = tuple(
    message for module in (messages, progress, drain, kv, status, policy) for message in _defined_in(module)
)

DECODE_ERRORS = (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, OverflowError)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Union[ALL_MESSAGES])


def encode(message: Message) -> bytes:
    """The MessagePack frame of a message; a blob, where the type has one, is the caller's second frame."""
    return _encoder.encode(message)


def to_frames(message: Message, blob: bytes = b"") -> list[bytes]:
    """The frames of one multipart message; `blob` is left out where the type has none."""
    if isinstance(message, WITH_BLOB):
        return [_encoder.encode(message), blob]
    assert not blob, f"{type(message).__name__} has no binary frame"
    return [_encoder.encode(message)]


def decode(frames: Sequence[bytes]) -> tuple[Message, bytes]:
    """One multipart message as received → (message, blob); the blob is empty where the type has none.

    Raises `RemoteProtocolError` whatever the frames hold.
    """
    check_frames(frames)
    try:
        message = _decoder.decode(frames[0])
    except DECODE_ERRORS as error:
        raise unreadable(error) from None
    return message, blob_of(message, frames)


def check_frames(frames: Sequence[bytes]) -> None:
    """Raises `RemoteProtocolError` where their number or size is out of bounds."""
    if not 1 <= len(frames) <= limits.MAX_FRAMES:
        raise RemoteProtocolError(f"{len(frames)} frames where 1 to {limits.MAX_FRAMES} are allowed")
    if len(frames[0]) > limits.MAX_FRAME_BYTES:
        raise RemoteProtocolError(f"a frame of {len(frames[0])} bytes; at most {limits.MAX_FRAME_BYTES} are allowed")


def unreadable(error: Exception) -> RemoteProtocolError:
    return RemoteProtocolError(f"not a message: {str(error)[:200]}")


def blob_of(message: Message, frames: Sequence[bytes]) -> bytes:
    """The binary frame, empty where the type has none. Raises `RemoteProtocolError` where the number of frames is wrong."""
    expected = 2 if isinstance(message, WITH_BLOB) else 1
    if len(frames) != expected:
        raise RemoteProtocolError(f"{type(message).__name__} came in {len(frames)} frames, not {expected}")
    return frames[1] if expected == 2 else b""


def pack_tokens(tokens: Iterable[int]) -> bytes:
    """Token ids → little-endian int32."""
    packed = array("i", tokens)
    assert packed.itemsize == 4
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_tokens(blob: bytes, expected: int) -> list[int]:
    """The inverse of `pack_tokens`; `expected` is the count announced. Raises `RemoteProtocolError` where it differs."""
    if len(blob) != 4 * expected:
        raise RemoteProtocolError(f"{len(blob)} bytes of token ids where {expected} tokens were announced")
    packed = array("i")
    packed.frombytes(blob)
    if sys.byteorder == "big":
        packed.byteswap()
    tokens = packed.tolist()
    if tokens and (min(tokens) < 0 or max(tokens) >= limits.MAX_VOCAB):
        raise RemoteProtocolError("a token id out of range")
    return tokens


def split_hashes(joined: bytes) -> list[bytes]:
    """Joined block hashes → one by one. Raises `RemoteProtocolError` where the last one is cut short."""
    if len(joined) % limits.HASH_BYTES:
        raise RemoteProtocolError(f"{len(joined)} bytes are no whole number of block hashes")
    return [joined[at : at + limits.HASH_BYTES] for at in range(0, len(joined), limits.HASH_BYTES)]
