"""What the coordinator makes of how long decode steps take, as workers report it."""

import msgspec
import pytest

from proto.errors import RemoteProtocolError
from proto.limits import PROTOCOL_VERSION
from proto.messages import Message
from proto.progress import DecodeProgress
from proto.versions import read
from tests.coordinator.world import Harness


def timed(steps: int, ms: float, sequences: int, kv_tokens: int) -> DecodeProgress:
    return DecodeProgress(steps, 10, 0, (), (), steps, ms, sequences, kv_tokens)


@pytest.mark.parametrize(
    "impossible",
    [
        timed(0, 100.0, 0, 0),
        timed(4, 0.0, 12, 6_000),
        timed(4, 100.0, 3, 6_000),
        timed(4, 100.0, 4 * 64 + 1, 6_000),
        DecodeProgress(4, 10, 0),
    ],
)
def test_impossible_step_times_are_ignored(impossible: DecodeProgress) -> None:
    """A report with impossible step times is not kept, and is no protocol violation."""
    h = Harness.make()
    h.receive(20, impossible)
    worker = h.core.cluster.workers[20]
    assert worker.token_ms == 0 and not h.protocol_violation
    h.receive(20, timed(4, 100.0, 4 * 64, 6_000))
    assert worker.token_ms > 0


@pytest.mark.parametrize(
    ("field", "value"),
    [(6, -1), (6, 1 << 41), (7, float("nan")), (7, float("inf")), (7, -0.5), (8, 1.5), (9, "x"), (9, 1 << 60)],
)
def test_wire_step_times_are_checked(field: int, value: object) -> None:
    """Impossible step times in a message are refused when it is decoded."""
    plain = msgspec.msgpack.decode(msgspec.msgpack.encode(timed(4, 100.0, 12, 6_000)))
    assert read([msgspec.msgpack.encode(plain)], PROTOCOL_VERSION)[0] == timed(4, 100.0, 12, 6_000)
    plain[field] = value
    with pytest.raises(RemoteProtocolError):
        read([msgspec.msgpack.encode(plain)], PROTOCOL_VERSION)


def test_previous_version_sends_no_times() -> None:
    """A message of the previous protocol version is read without step times."""
    plain = msgspec.msgpack.decode(msgspec.msgpack.encode(timed(4, 100.0, 12, 6_000)))
    message: Message | None = read([msgspec.msgpack.encode(plain[:6])], PROTOCOL_VERSION - 1)[0]
    assert message == DecodeProgress(4, 10, 0)
