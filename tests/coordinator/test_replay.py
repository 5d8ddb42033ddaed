"""Event logs: what was recorded replays to the same actions; what was changed, cut off or planted is seen."""

import dataclasses
import io
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import get_args

import msgpack
import msgspec
import pytest

from coordinator.accounting.billing import Opened, Past
from coordinator.accounting.quota import Ask
from coordinator.event_log.format import (
    End,
    EventLogError,
    EventRecord,
    Header,
    decode_header,
    decode_record,
    encode_header,
)
from coordinator.event_log.replay import Replay
from coordinator.events import Configured, Event, Limits, PeerDown, PeerUp, ProtocolViolation, Received, Tick
from lab.cluster.surroundings import Timing
from proto.errors import CancelReason
from proto.messages import Cancel, Ping, Role, StatusRequest, Step, StepDone, Submit
from proto.parts import Held
from runtime.tenancy.priority_classes import PriorityClass
from runtime.tenancy.tenants import Tenants, parse
from tests.coordinator.logged_core import LoggedCore, as_logged, replay
from tests.coordinator.world import Harness, RandomWorld, gateway_hello, submit, worker_hello
from tests.helpers import first
from tests.uniform_cluster import UniformCluster

ROOT = Path(__file__).parents[2]


def random_world(seed: int, steps: int = 400) -> LoggedCore:
    world = RandomWorld(seed, make=LoggedCore)
    for step in range(steps):
        world.step()
        if step % 7 == 0:
            world.core.next_deadline()  # A driver asks; a replay does not: it must not matter.
            world.receive(1, StatusRequest())
    return as_logged(world.core)


def contended_world(seed: int) -> LoggedCore:
    """Many tenants, priority classes, deadlines, cancels, decode workers that are full, and queues that run over."""
    rnd = random.Random(seed)
    limits = Limits(queue_requests_max=12, weights={"standard/t1": 3.0}, bypasses_max=3, overtaken_max=3)
    world = UniformCluster(
        limits, Timing(decode_step_s=0.01), prefill=2, decode=2, decode_blocks=300, max_seqs=8, core=LoggedCore
    )
    for number in range(120):
        name, tenant = f"r{number}", f"t{rnd.randrange(4)}/u{rnd.randrange(2)}"
        tokens, deadline_ms = rnd.choice([40, 600, 3000]), rnd.choice([0.0, 0.0, 300.0])

        def come(
            name: str = name, tenant: str = tenant, tokens: int = tokens, deadline_ms: float = deadline_ms
        ) -> None:
            world.submit(name, tenant, tokens, max_tokens=rnd.randrange(1, 60), deadline_ms=deadline_ms)

        world.at(rnd.uniform(0, 8), come)
        if rnd.random() < 0.1:
            world.at(rnd.uniform(0, 8), lambda name=name: world.cancel(name))  # type: ignore[misc]
    world.run(30)
    assert {"finished", "rejected"} <= {request.state for request in world.requests.values()}, seed
    return as_logged(world.core)


def tenants_world(seed: int) -> LoggedCore:
    """Quotas that deny, priority classes that may not be used, a tenants file that changes, and a past."""
    rnd = random.Random(seed)
    h = Harness.make(limits=Limits(step_tokens=16), core=LoggedCore)
    h.post(Configured(parse(TENANTS), 1e9, Past((), (("acme", 11574, 50),), (("acme", 1.0, 4),))))
    for number in range(80):
        h.now += rnd.uniform(0, 2)
        request = submit(f"r{number}", rnd.randint(1, 30), max_tokens=rnd.randint(1, 20))
        tenant, priority_class = (
            rnd.choice(["acme", "acme/bob", "default", "nobody"]),
            rnd.choice(["", "standard", "batch", "x"]),
        )
        h.receive(1, msgspec.structs.replace(request, tenant=tenant, priority_class=priority_class))
        for step in h.take(Step):
            assert isinstance(step, Step)
            h.receive(10, StepDone(step.step_id, step.chunks, 5.0, 0))
        if number == 40:
            h.post(Configured(parse(TENANTS.replace("100", "30")), 1e9 + 1))
    assert h.core.cluster.counters["rejected_quota"] > 5 and h.core.cluster.counters["rejected_priority_class"] > 5
    return as_logged(h.core)


@pytest.mark.parametrize("seed", first(1, range(3)))
def test_tenants_and_quotas_replay(seed: int) -> None:
    """An event log with tenants and quotas replays to the same actions."""
    assert replay(tenants_world(seed).event_log()).run() is None, seed


@pytest.mark.parametrize("seed", range(12))
def test_random_world_replays_same_actions(seed: int) -> None:
    """A random cluster's event log replays to the same actions, to its last byte."""
    core = random_world(seed)
    again = replay(core.event_log())
    assert again.run() is None, seed
    assert again.events == len(core.records) - 1 > 100 and again.actions > 100
    assert not again.ended and again.bytes_read == len(core.event_log())


@pytest.mark.parametrize("seed", range(4))
def test_contended_world_replays_same_actions(seed: int) -> None:
    """A contended cluster's event log replays to the same actions."""
    assert replay(contended_world(seed).event_log()).run() is None, seed


@pytest.mark.parametrize("hash_seed", ["1", "2"])
def test_replay_ignores_hash_seed(hash_seed: str, tmp_path: Path) -> None:
    """Another process with another hash seed replays an event log to the same actions."""
    paths = [tmp_path / name for name in ("contended", "random", "tenants")]
    for path, core in zip(paths, (contended_world(7), random_world(7), tenants_world(7)), strict=True):
        path.write_bytes(core.event_log())
    script = (
        "import sys; from coordinator.event_log.replay import Replay\n"
        "sys.exit(any(Replay(open(name, 'rb')).run() is not None for name in sys.argv[1:]))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, paths)], env=environment, cwd=tmp_path, capture_output=True, timeout=60
    )
    assert done.returncode == 0, done.stderr.decode()


def test_cut_event_log_replays_whole_records() -> None:
    """An event log cut off at any byte of its last records replays up to the last whole one."""
    core = random_world(3, steps=60)
    log = core.event_log()
    whole = len(log) - sum(map(len, core.records[-4:]))
    ends = [whole + sum(map(len, core.records[-4:][:count])) for count in range(5)]
    for length in range(whole, len(log) + 1):
        again = replay(log[:length])
        assert again.run() is None
        assert again.bytes_read == max(end for end in ends if end <= length)


@pytest.mark.parametrize("seed", first(1, range(3)))
def test_flipped_bit_is_detected(seed: int) -> None:
    core = random_world(seed, steps=40)
    log = core.event_log(ended=True)
    rnd = random.Random(seed)
    first = len(core.records[0])
    for position in rnd.sample(range(first, len(log)), 400):
        changed = bytearray(log)
        changed[position] ^= 1 << rnd.randrange(8)
        try:
            again = replay(bytes(changed))
            difference = again.run()
        except EventLogError:
            continue
        assert difference is not None or again.bytes_read < len(log) or again.ended != "stopped", (seed, position)


def test_missing_or_extra_record_is_told() -> None:
    """A missing or repeated record is told as a changed log, not as different actions."""
    core = random_world(1, steps=40)
    without = core.records[:20] + core.records[21:]
    difference = replay(b"".join(without)).run()
    assert difference is not None and difference.number == 20 and "changed" in difference.why
    planted = core.records[:20] + core.records[19:]
    difference = replay(b"".join(planted)).run()
    assert difference is not None and difference.number == 20 and "changed" in difference.why


def test_first_different_action_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A core that acts differently is caught at its first different action."""
    core = contended_world(2)
    monkeypatch.setattr("scheduler.waiting.margin.LEAST", 0.05)
    difference = replay(core.event_log()).run()
    assert difference is not None and difference.why == "the actions differ"
    assert difference.recorded != difference.replayed and difference.actions
    assert isinstance(difference.event, Received | Tick)


def test_event_log_has_event_of_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """The event log has the event at which the core failed, with the error."""
    h = Harness.make(core=LoggedCore)
    h.receive(1, submit("a"))

    def broken(*_: object) -> None:
        raise AssertionError("planted")

    with monkeypatch.context() as patch:
        patch.setattr("coordinator.core.processes.on_down", broken)
        with pytest.raises(AssertionError, match="planted"):
            h.post(PeerDown(10, "gone"))
        again = replay(as_logged(h.core).event_log())
        assert again.run() is None and again.failed == "AssertionError('planted')"
    difference = replay(as_logged(h.core).event_log()).run()
    assert difference is not None and difference.why == "the actions differ"
    assert difference.recorded == "AssertionError('planted')"


TENANTS = """
[priority_classes.standard]
weight = 1
floor_share = 0.1
[priority_classes.batch]
weight = 0.5
[tenants.acme]
weight = 2
cache_group = "unguessable"
keys = ["0000000000000000000000000000000000000000000000000000000000000000"]
limits = { tokens_per_min = 100 }
[tenants.acme.users.bob]
priority_class = "batch"
priority_classes = ["batch", "standard"]
"""


def without_secrets(tenants: Tenants) -> Tenants:
    policies = {name: dataclasses.replace(policy, cache_group="") for name, policy in tenants.policies.items()}
    return dataclasses.replace(tenants, keys={}, policies=policies)


EVENTS: list[Event] = [
    PeerUp(1, gateway_hello(1)),
    PeerUp(10, msgspec.structs.replace(worker_hello(Role.PREFILL, 10), held=(Held("a", 1, 2, 3),))),
    PeerDown(10, "killed"),
    Received(1, submit("a", 3), b"\1\2\3\4" * 3),
    Received(1, submit("b", 3), b""),
    Received(1, Cancel("a", 1, CancelReason.DEADLINE)),
    Received(10, Ping()),
    Tick(),
    Configured(
        without_secrets(parse(TENANTS)),
        1.5,
        Past((Opened("a", 3, "acme", "m", "standard", False, Ask(1, 2, 3)),), (("acme", 3, 7),), (("acme", 1.0, 4),)),
    ),
]


def test_every_event_kind_round_trips() -> None:
    """Every kind of event is read back with the length of its prompt, but without the prompt."""
    assert {type(event) for event in EVENTS} == set(get_args(Event)), "a new kind of event: add one of it here"
    core = LoggedCore()
    for event in EVENTS:
        core.handle(event, 2.5)
    for event, raw in zip(EVENTS, core.records[1:], strict=True):
        record = decode_record(msgpack.unpackb(raw))
        assert isinstance(record, EventRecord) and record.now == 2.5
        blank = event
        if isinstance(event, Received) and isinstance(event.message, Submit):
            blank = Received(event.incarnation, event.message, bytes(len(event.blob)), event.fingerprint)
        assert record.event == blank
    assert b"\1\2\3\4" not in core.event_log()
    again = replay(core.event_log())
    assert again.run() is None and again.events == len(EVENTS)


def test_hashes_of_keys_are_not_written() -> None:
    """Hashes of keys and cache groups are not written to the event log."""
    core = LoggedCore()
    tenants = parse(TENANTS)
    assert tenants.keys
    core.handle(Configured(tenants, 0.0), 1.0)
    again = replay(core.event_log())
    assert again.run() is None and not again.core.accounts.billing.quotas.tenants.keys
    assert (
        b"acme" in core.event_log()
        and b"unguessable" not in core.event_log()
        and not any(digest in core.event_log() for digest in tenants.keys)
    )


def test_whole_number_options_replay() -> None:
    """Options given as whole numbers where fractions are allowed do not change a replay."""
    h = Harness.make(limits=Limits(quantum_tokens=1024, weights={"standard/default": 2}), core=LoggedCore)
    h.receive(1, submit("a"))
    assert replay(as_logged(h.core).event_log()).run() is None


def test_options_round_trip() -> None:
    """The options in an event log's header are read back unchanged."""
    limits = Limits(
        step_tokens=7,
        weights={"a/b": 2.0},
        priority_classes={"standard": PriorityClass(1.0), "x": PriorityClass(2.0, 0.5)},
    )
    header = Header(limits, software="1", platform="p", process="c", unix_s=1.5, started=2.5)
    assert decode_header(msgpack.unpackb(encode_header(header))) == header


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "no whole record"),
        (b"hello, this is text", "not an event log"),
        (msgpack.packb(["crossdock-event-log", 99, {}]), "format 99"),
        (msgpack.packb(["crossdock-event-log", 2, {"limits": 3}]), "header cannot be read"),
        (encode_header(Header(Limits(), protocol=99)), "protocol 99"),
        (b"\xc1" * 9, "no record"),
    ],
)
def test_foreign_file_is_no_event_log(content: bytes, why: str) -> None:
    """A file that is no event log, or a damaged header, is refused with the reason."""
    with pytest.raises(EventLogError, match=why):
        Replay(io.BytesIO(content))


@pytest.mark.parametrize(
    "record",
    [
        7,
        [],
        [[1.0, "Tick", {}]],
        [[1.0, "Tock", {}], [0, 0, 0]],
        [[1.0, "PeerDown", {}], [0, 0, 0]],
        [[1.0, "Received", 1, None, ["Ping"]], [0, -7, 0]],
        [[1.0, "Received", 1, None, ["Pang", 3]], [0, 0, 0]],
        [[1.0, "Received", 1, None, ["Submit"]], [0, 0, 0]],
        [[1.0, "Received", 1, [1 << 40, 0], msgspec.to_builtins(submit("a"))], [0, 0, 0]],
        [[1.0, "PeerUp", 1, ["Ping"]], [0, 0, 0]],
        [[1.0, "Tick", {}], [0, -5, 0]],
        ["end"],
    ],
)
def test_malformed_record_is_refused(record: object) -> None:
    with pytest.raises(EventLogError):
        decode_record(record)


def test_record_after_the_end_is_refused() -> None:
    core = random_world(0, steps=5)
    assert decode_record(["end", "stopped"]) == End("stopped")
    with pytest.raises(EventLogError, match="behind the last"):
        replay(core.event_log(ended=True) + core.records[-1]).run()


def test_peer_misbehaviour_is_replayed() -> None:
    """A protocol violation of a peer is replayed like other events."""
    h = Harness.make(core=LoggedCore)
    assert any(isinstance(action, ProtocolViolation) for action in h.receive(10, submit("a")))
    assert replay(as_logged(h.core).event_log()).run() is None


def test_grammars_are_not_written() -> None:
    """A request's grammar is not written to the event log, which still replays."""
    h = Harness.make(core=LoggedCore)
    plain = submit("a")
    sampling = msgspec.structs.replace(plain.sampling, grammar='start: "unguessable"')
    h.receive(1, msgspec.structs.replace(plain, sampling=sampling))
    log = as_logged(h.core).event_log()
    assert replay(log).run() is None
    assert b"unguessable" not in log and b"start:" not in log
