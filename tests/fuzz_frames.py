"""Frames that are almost messages: valid ones with bits flipped, cut off, of other types, sizes and depths; and throwing them
at ports. Everything comes from a seed."""

import random
import struct
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgpack
import zmq

from proto.codec import decode, encode, to_frames
from proto.errors import RemoteProtocolError
from proto.limits import PROTOCOL_VERSION
from proto.messages import Hello, Role
from proto.parts import Capacity
from tests.proto.test_codec import blob_for, samples

WORDS: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 255, (1 << 31) - 1, -(1 << 31), 1 << 40, (1 << 63) - 1, (1 << 64) - 1, 0.0, -1.5, 1e308,
    float("inf"), float("nan"), "", "x", "\0", "x" * 600, "../../etc/passwd", b"", b"\0" * 16, b"x" * 5_000, [], [1] * 300, {},
    {"a": 1}, [[[[[]]]]], [None], "tcp://127.0.0.1:1",
)  # fmt: skip
LENGTHS = (
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\xdb\x7f\xff\xff\xff",
    b"\xc9\xff\xff\xff\xff\1",
)
"""Announced sizes of an array, a map, bytes, text and an extension, without what they announce."""
FRAMES_EACH = 2_000
"""Of one connection."""
SAID_AGAIN = 6
"""A connection says Hello after so many frames at the latest: a bad one ends its link."""


def flipped(generator: random.Random, frame: bytes) -> bytes:
    data = bytearray(frame)
    for _ in range(generator.choice((1, 1, 2, 8))):
        data[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
    return bytes(data)


def misbuilt(generator: random.Random, frame: bytes) -> bytes:
    """One element somewhere in it is another one."""
    tree = msgpack.unpackb(frame)
    spot = tree
    while True:
        index = generator.randrange(len(spot))
        if not (isinstance(spot[index], list) and spot[index] and generator.random() < 0.6):
            break
        spot = spot[index]
    match generator.randrange(4):
        case 0:
            spot.insert(index, generator.choice(WORDS))
        case 1:
            del spot[index]
        case _:
            spot[index] = generator.choice(WORDS)
    packed: bytes = msgpack.packb(tree)
    return packed


def mutated(generator: random.Random, corpus: Sequence[list[bytes]]) -> list[bytes]:
    """The frames of one multipart message, nearly that of a message of `corpus`; now and then a right one."""
    first, *rest = generator.choice(corpus)
    match generator.randrange(12):
        case 0 | 1 | 2:
            first = flipped(generator, first)
        case 3 | 4 | 5 | 6:
            first = misbuilt(generator, first)
        case 7:
            first = first[: generator.randrange(len(first))]
        case 8:
            other = generator.choice(corpus)[0]
            first = first[: generator.randrange(len(first))] + other[generator.randrange(len(other)) :]
        case 9:
            at = generator.randrange(len(first))
            first = first[:at] + generator.choice(LENGTHS) + first[at:]
        case 10:
            match generator.randrange(4):
                case 0:
                    first = generator.choice((b"\x91", b"\x81\xa1a", b"\xdc\0\1")) * generator.randrange(1, 3_000)
                case 1:
                    first = generator.randbytes(generator.randrange(1, 400))
                case 2:
                    rest = [first] * generator.randrange(1, 6)
                case _:
                    rest = [generator.randbytes(generator.randrange(0, 40))]
        case _:
            pass
    return [first, *rest]


def corpus() -> list[list[bytes]]:
    return [to_frames(message, blob_for(message)) for message in samples()]


def through_the_codec(frames: int, number: int) -> Counter[str]:
    """What became of so many; raises whatever is not `RemoteProtocolError`."""
    generator, known, counts, longest = random.Random(number), corpus(), Counter[str](), 0
    for _ in range(frames):
        try:
            message, _ = decode(mutated(generator, known))
        except RemoteProtocolError as error:
            counts["refused"] += 1
            longest = max(longest, len(str(error)))
        else:
            encode(message)  # what came in can be said again
            counts["taken"] += 1
    assert longest < 1_000, "a refusal quotes too much"
    return counts


def hello(generator: random.Random, role: Role, model: str, fingerprint: str = "") -> bytes:
    capacity = Capacity(1_000, 16, 8, 1_000) if role in (Role.PREFILL, Role.DECODE) else None
    incarnation = generator.randrange(1, 1 << 62)
    address = "tcp://127.0.0.1:9"
    return encode(Hello(PROTOCOL_VERSION, role, incarnation, "fuzz", model, fingerprint, address, capacity))


def through_a_port(
    address: str, frames: int, number: int, *, roles: Sequence[Role], model: str, fingerprint: str = ""
) -> Counter[str]:
    """Throws so many at a port without keys, from connections that shake hands as one of `roles` in between; counts the kinds
    of answers. Raises `zmq.Again` where the port takes nothing more for a minute."""
    generator, known, counts = random.Random(number), corpus(), Counter[str]()
    context = zmq.Context()
    try:
        sent = 0
        while sent < frames:
            with context.socket(zmq.DEALER) as socket:
                socket.linger, socket.sndtimeo = 5_000, 60_000
                socket.connect(address)
                batch = min(FRAMES_EACH, frames - sent)
                role = generator.choice(roles)
                for index in range(batch):
                    if index % SAID_AGAIN == 0 and generator.random() < 0.7:
                        socket.send(hello(generator, role, model, fingerprint))
                    socket.send_multipart(mutated(generator, known))
                    _read(socket, counts, 0)
                sent += batch
                counts["sent"] += batch
                # A question after all the rest: once it is answered, all of it has been looked at.
                socket.send(struct.pack(">I", 0))
                while _read(socket, counts, 500):
                    pass
    finally:
        context.destroy(linger=0)
    return counts


def _read(socket: "zmq.Socket[bytes]", counts: Counter[str], wait_ms: int) -> bool:
    """Count the answers that are there; whether there was one."""
    found = False
    while socket.poll(wait_ms):
        name = msgpack.unpackb(socket.recv_multipart()[0])[0]
        counts[str(name)] += 1
        found, wait_ms = True, 0
    return found
