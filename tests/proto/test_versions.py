"""Peers whose versions differ by one understand each other; others are refused by a message that names both versions."""

import random
from collections import Counter
from enum import Enum
from typing import Any, get_args, get_type_hints

import msgpack
import msgspec
import pytest

from proto.codec import ALL_MESSAGES, WITH_BLOB, decode, encode, to_frames
from proto.errors import UNKNOWN_AS, CancelReason, FinishReason, Interrupt, Reject, RemoteProtocolError
from proto.limits import MIN_PROTOCOL_VERSION, PROTOCOL_VERSION
from proto.messages import Accepted, Cancel, Hello, Interrupted, Message, Refused, Rejected, Role, Tokens, Welcome
from proto.policy import PolicyAction, RolloutAction
from proto.versions import HelloPrefix, read, read_hello, version_refusal
from tests.fuzz_frames import corpus, mutated
from tests.proto.test_codec import blob_for, samples

NEXT = PROTOCOL_VERSION + 1
FRAMES, SEED = 20_000, 9


def of_next_version(message: Message) -> list[bytes]:
    """The frames of a message as a version would send it that has appended a field to every structure."""
    frames = to_frames(message, blob_for(message))
    return [msgpack.packb(_extended(message)), *frames[1:]]


def _extended(value: Any) -> Any:
    if isinstance(value, msgspec.Struct):
        fields = [_extended(getattr(value, name)) for name in value.__struct_fields__]
        tag = [value.__struct_config__.tag] if value.__struct_config__.tag else []
        return [*tag, *fields, {"new": [1, "x", None, b"y"]}]
    if isinstance(value, tuple):
        return [_extended(item) for item in value]
    if isinstance(value, dict):
        return {key: _extended(item) for key, item in value.items()}
    return value.value if isinstance(value, Enum) else value


@pytest.mark.parametrize("message", samples(), ids=lambda m: type(m).__name__)
def test_appended_fields_are_skipped(message: Message) -> None:
    """Fields that the next version has appended are skipped in each message."""
    frames = of_next_version(message)
    decoded, blob = read(frames, NEXT)
    assert decoded == message and type(decoded) is type(message) and blob == blob_for(message)


def test_unknown_message_is_ignored() -> None:
    """An unknown message is ignored from the next version and refused from this one."""
    for frames in ([msgpack.packb(["FromTheFuture", 1, [2]])], [msgpack.packb(["FromTheFuture"]), b"blob"]):
        assert read(frames, NEXT) == (None, b"")
        with pytest.raises(RemoteProtocolError):
            read(frames, PROTOCOL_VERSION)


def _renamed(message: Message, old: str) -> list[bytes]:
    return [encode(message).replace(encode_text(old), encode_text("x" * len(old)))]


def encode_text(text: str) -> bytes:
    packed: bytes = msgpack.packb(text)
    return packed


def test_unknown_values_become_harmless() -> None:
    """Unknown enumeration values of the next version are read as harmless known ones."""
    rejected, interrupted = Rejected("r", 1, Reject.QUOTA, "because"), Interrupted("r", 1, Interrupt.DRAINED, "x")
    (item,) = next(sample.items for sample in samples() if isinstance(sample, Tokens))
    tokens = Tokens((msgspec.structs.replace(item, finish=FinishReason.LENGTH),))
    expected = {
        (rejected, "quota"): msgspec.structs.replace(rejected, reason=Reject.NO_CAPACITY),
        (interrupted, "drained"): msgspec.structs.replace(interrupted, reason=Interrupt.ENGINE_ERROR),
        (Cancel("r", 1, CancelReason.DEADLINE), "deadline"): Cancel("r", 1, CancelReason.ABANDONED),
        (tokens, "length"): Tokens((msgspec.structs.replace(item, finish=FinishReason.STOP),)),
    }
    for (message, old), taken in expected.items():
        assert read(_renamed(message, old), NEXT) == (taken, b"")


def _enums(hint: Any) -> set[type[Enum]]:
    if isinstance(hint, type) and issubclass(hint, Enum):
        return {hint}
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return {found for part in get_type_hints(hint, include_extras=True).values() for found in _enums(part)}
    return {found for part in get_args(hint) for found in _enums(part)}


def test_enumerations_define_unknown_values() -> None:
    """Each enumeration on the wire but those of roles and commands defines how an unknown value is read."""
    assert {found for message in ALL_MESSAGES for found in _enums(message)} == {
        *UNKNOWN_AS,
        Role,
        PolicyAction,
        RolloutAction,
    }


def test_unknown_role_is_refused() -> None:
    """An unknown role in a hello is refused and named."""
    hello = Hello(NEXT, Role.GATEWAY, 5, "g")
    with pytest.raises(RemoteProtocolError, match="'xxxxxxx'"):
        read_hello(_renamed(hello, "gateway"))


@pytest.mark.parametrize("version", [MIN_PROTOCOL_VERSION - 1, PROTOCOL_VERSION + 2, 1 << 40, -1])
def test_foreign_hello_prefix_is_read(version: int) -> None:
    """The prefix of a hello of an unsupported version is read, and its refusal names both versions."""
    frames = [msgpack.packb(["Hello", version, "a_new_role", 7, "worker-1", {"all": "else"}, [], None])]
    found = read_hello(frames)
    assert isinstance(found, HelloPrefix) and (found.version, found.name) == (version, "worker-1")
    assert str(version) in found.refusal and f"speaks {PROTOCOL_VERSION}" in found.refusal
    assert read_hello([msgpack.packb(["Hello", version, "gateway", 7, "g"])]) is not None


def test_adjacent_versions_work_together() -> None:
    """Protocol versions that differ by one work together."""
    good = [version for version in range(100) if version_refusal(version) is None]
    assert good == [v for v in (PROTOCOL_VERSION - 1, PROTOCOL_VERSION, NEXT) if v >= MIN_PROTOCOL_VERSION]


def test_frozen_messages_never_change() -> None:
    """Never change these bytes: processes of every version, released long ago or not yet, read and send them."""
    hello = read_hello([bytes.fromhex("95a548656c6c6f01a76761746577617905a167")])
    assert hello == Hello(1, Role.GATEWAY, 5, "g") or PROTOCOL_VERSION > 2
    assert encode(Refused("no")) == bytes.fromhex("92a752656675736564a26e6f")
    assert encode(Welcome(6, 500, 1)) == bytes.fromhex("94a757656c636f6d6506cd01f401")
    assert decode([bytes.fromhex("94a757656c636f6d6506cd01f47f")])[0] == Welcome(6, 500, 127)


def test_answers_of_any_version_are_read() -> None:
    """Answers of any version are read, and malformed or unknown ones are refused."""
    assert decode([msgpack.packb(["Refused", "too new", 1, 2])])[0] == Refused("too new")
    assert decode([msgpack.packb(["Welcome", 6, 500, 77, "more"])])[0] == Welcome(6, 500, 77)
    for bad in (["Welcome", 6, 500], ["Welcome", 6, 5, 1], ["Novel"], []):
        with pytest.raises(RemoteProtocolError):
            decode([msgpack.packb(bad)])


def test_first_message_must_be_hello() -> None:
    """A first message other than a hello is told apart, and malformed ones are refused."""
    assert read_hello([encode(Accepted("r", 1))]) is None
    for bad in ([b""], [b"\xff"], [msgpack.packb(["Novel", 1])], [msgpack.packb(["Hello", 9])], [], [b"\x91"] * 3):
        with pytest.raises(RemoteProtocolError):
            read_hello(bad)


def test_mutated_future_frames_are_refused() -> None:
    """Mutated frames of the next version raise protocol errors only, with short texts."""
    generator, known, counts = random.Random(SEED), corpus(), Counter[str]()
    longest = 0
    known += [of_next_version(message) for message in samples()]
    for _ in range(FRAMES):
        frames = mutated(generator, known)
        for reader in (decode, read_hello):
            try:
                reader(frames)
                counts["taken"] += 1
            except RemoteProtocolError as error:
                counts["refused"] += 1
                longest = max(longest, len(str(error)))
    assert longest < 1_000, "a refusal quotes too much"
    assert min(counts.values()) > FRAMES / 20, counts


@pytest.mark.parametrize("reader", [decode, read_hello])
def test_deep_nesting_is_refused_when_skipped(reader: Any) -> None:
    """Deep nesting within skipped fields is refused."""
    for name in (b"\xa5Hello", b"\xa4Ping", b"\xa7Welcome", b"\xa5Novel"):
        for rest in (b"\x91" * 1_000_000, b"\xdd\xff\xff\xff\xff"):
            with pytest.raises(RemoteProtocolError):
                reader([b"\x95" + name + rest])


def test_blob_is_required_in_every_version() -> None:
    """A message with a blob is refused without it, also from the next version."""
    for message in samples():
        if isinstance(message, WITH_BLOB):
            with pytest.raises(RemoteProtocolError, match="frames"):
                decode(of_next_version(message)[:1])
