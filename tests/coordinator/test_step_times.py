"""What the coordinator tells of how long steps take."""

import random

import msgspec
import pytest

from coordinator.events import PeerUp, Tick
from coordinator.reporting.report import status
from proto.errors import RemoteProtocolError
from proto.limits import PROTOCOL_VERSION
from proto.messages import Message, Role, Step, StepDone
from proto.progress import DecodeProgress
from proto.status import StepTimes
from proto.versions import read
from scheduler.step_times import KEPT, SIZES, SPACING_S, StepTimeSample
from tests.coordinator.world import Harness, submit, worker_hello


def timed(steps: int, ms: float, sequences: int, kv_tokens: int) -> DecodeProgress:
    return DecodeProgress(steps, 10, 0, (), (), steps, ms, sequences, kv_tokens)


def of(h: Harness, role: Role) -> StepTimes:
    (found,) = (one for one in status(h.core).step_times if one.role is role)
    return found


def test_sample_is_bounded_per_size() -> None:
    """A sample of step times is bounded and keeps some of each size, a burst counting once."""
    seen = StepTimeSample()
    for number in range(50_000):
        seen.add(1, 1 << number % 20, 5.0, 7.0, 0.01 * number)
    found = seen.report("m", Role.DECODE, 500.0)
    assert len(found.ms) == SIZES * KEPT <= 1024
    assert set(range(1, SIZES)) <= {int(size).bit_length() for size in found.sizes}
    for _ in range(50_000):
        seen.add(1, 2.0, 5.0, 9.0, 1_000.0)
    assert seen.report("m", Role.DECODE, 1_000.0).ms.count(9.0) == 1, "a burst is one sample"


def test_sample_spreads_over_workers() -> None:
    """Two workers report ten times a second each, one always a moment behind the other."""
    seen = StepTimeSample()
    for number in range(1_000):
        seen.add(1, 4.0, 0.0, 1.0, 0.1 * number)
        seen.add(1, 4.0, 0.0, 2.0, 0.1 * number + 0.05)
    found = seen.report("m", Role.DECODE, 100.0)
    assert min(found.ms.count(1.0), found.ms.count(2.0)) >= KEPT / 4
    assert max(found.ages_ms) > 1000 * SPACING_S * (KEPT - 2)


def test_long_steps_are_not_oversampled() -> None:
    """One in five takes 100 times as long: it runs at almost any given moment."""
    source, seen, now, long = random.Random(1), StepTimeSample(), 0.0, 0
    for _ in range(KEPT):
        until = now + 60.0
        while now < until:
            ms = 1_000.0 if source.random() < 0.2 else 10.0
            now += ms / 1000
            seen.add(1, 4.0, 0.0, ms, now)
        found = seen.report("m", Role.DECODE, now).ms
        long += found.count(1_000.0)
    assert long < 0.3 * KEPT * len(found)


def test_prefill_steps_keep_attention_tokens() -> None:
    """Prefill step times are kept with the number of token pairs that attend to each other."""
    h = Harness.make()
    h.receive(1, submit("a", 30))
    (step,) = h.take(Step)
    assert isinstance(step, Step)
    h.now = 1.0
    h.receive(10, StepDone(step.step_id, step.chunks, 12.5, 30))
    h.now = 3.0
    h.post(Tick())
    assert of(h, Role.PREFILL) == StepTimes("m", Role.PREFILL, (2000.0,), (1,), (30.0,), (450.0,), (12.5,))
    assert of(h, Role.DECODE).ms == ()


def test_decode_steps_are_kept_as_means() -> None:
    h = Harness.make()
    h.receive(20, timed(4, 100.0, 12, 6_000))
    assert of(h, Role.DECODE) == StepTimes("m", Role.DECODE, (0.0,), (4,), (3.0,), (1_500.0,), (25.0,))


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
    assert of(h, Role.DECODE).ms == () and not h.protocol_violation
    h.receive(20, timed(4, 100.0, 4 * 64, 6_000))
    assert len(of(h, Role.DECODE).ms) == 1


def test_mixed_decode_steps_are_left_out() -> None:
    """Prompts are computed between them."""
    h = Harness.make(decode=0)
    h.post(PeerUp(20, msgspec.structs.replace(worker_hello(Role.DECODE, 20), process="mixed-0")))
    h.receive(20, timed(4, 100.0, 12, 6_000))
    assert of(h, Role.DECODE).ms == ()


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
