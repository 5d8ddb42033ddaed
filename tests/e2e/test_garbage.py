"""Ten thousand frames of rubbish at the coordinator's and the gateway's ports: counted, survived, unnoticed by others."""

import random
import socket
import threading
from collections.abc import Iterator

import msgpack
import psutil
import zmq

from proto import limits
from proto.codec import encode
from proto.limits import PROTOCOL_VERSION
from proto.messages import Hello, Role
from tests.e2e.live import Live

FRAMES_EACH = 5_000
SEED = 20


def rubbish(generator: random.Random) -> list[bytes]:
    """One multipart message that is not one of ours."""
    good = encode(Hello(PROTOCOL_VERSION, Role.GATEWAY, generator.randrange(1, 1 << 60), "intruder"))
    match generator.randrange(8):
        case 0:
            return [generator.randbytes(generator.randrange(1, 300))]
        case 1:
            return [good[: generator.randrange(1, len(good))]]
        case 2:
            return [b"\x91" * generator.randrange(1_000, 50_000)]
        case 3:
            return [msgpack.packb(["Hello", "1", [], {}, None])]
        case 4:
            return [msgpack.packb(["Submit", "r" * 100_000, 1])]
        case 5:
            return [msgpack.packb(["NoSuchMessage", generator.random()])]
        case 6:
            return [good] * limits.MAX_FRAMES
        case _:
            return [msgpack.packb(["Hello", 1, "decode", -5, "x", "", "", "", [1 << 50, 0, 0, 0]])]


def throw(address: str, seed: int) -> Iterator[None]:
    """Sends rubbish over many connections, among them frames over the limit and bytes that are not even ZMTP."""
    generator = random.Random(seed)
    context = zmq.Context()
    try:
        for number in range(FRAMES_EACH):
            if number % 50 == 0:
                sender = context.socket(zmq.DEALER)
                sender.setsockopt(zmq.LINGER, 2_000)
                sender.setsockopt(zmq.SNDTIMEO, 60_000)
                sender.setsockopt(zmq.RCVTIMEO, 60_000)
                sender.connect(address)
            sender.send_multipart(rubbish(generator))
            if number % 50 == 49:
                for _ in range(
                    50
                ):  # each is refused; leaving before that would reset the connection with frames unread
                    assert b"Refused" in sender.recv()
                sender.close()
                yield
        for count in range(limits.MAX_FRAMES + 1, 50):  # no message has as many: the connection is ended
            many = context.socket(zmq.DEALER)
            many.setsockopt(zmq.LINGER, 2_000)
            many.connect(address)
            many.send_multipart([b"\0"] * count)
            many.close()
        oversized = context.socket(zmq.DEALER)
        oversized.setsockopt(zmq.LINGER, 2_000)
        oversized.connect(address)
        oversized.send(b"\0" * (limits.MAX_FRAME_BYTES + 1))
        oversized.send(b"\0" * (3 * limits.MAX_FRAME_BYTES))
        oversized.close()
        host, port = address.removeprefix("tcp://").split(":")
        for _ in range(20):
            with socket.create_connection((host, int(port)), timeout=30) as raw:
                raw.sendall(generator.randbytes(200))
        yield
    finally:
        context.destroy()


def gateway_protocol_errors(cluster: Live) -> int:
    return int(cluster.scrape("gateway-0")["crossdock_link_protocol_errors_total", frozenset({("port", "tokens")})])


def test_cluster_survives_garbage_frames(cluster: Live) -> None:
    """Ten thousand garbage frames per port are counted and leave streams, processes and memory unharmed."""
    cluster.hears_garbage = True
    expected = cluster.token_ids([30, 31, 32], 40, ignore_eos=True)
    pids = sorted(p.pid for members in cluster.processes().values() for p in members)
    ports = {"coordinator": cluster.coordinator, "gateway": cluster.tokens}
    errors_before = (cluster.status().counters.get("protocol_errors", 0), gateway_protocol_errors(cluster))
    attacks = [throw(address, SEED + index) for index, address in enumerate(ports.values())]
    for attack in attacks:  # the first few rounds warm buffers up
        for _ in range(5):
            next(attack)
    rss_before = {name: psutil.Process(cluster.one(name).pid).memory_info().rss for name in ports}
    answers: list[list[int]] = []
    asking = threading.Thread(
        target=lambda: answers.extend(cluster.token_ids([30, 31, 32], 40, ignore_eos=True) for _ in range(20))
    )
    asking.start()
    for attack in attacks:
        for _ in attack:
            pass
    asking.join(120)
    assert answers == [expected] * 20, "requests in flight finish, and rightly"
    cluster.wait_for(
        "all of it is counted",
        lambda: (
            cluster.status().counters.get("protocol_errors", 0) - errors_before[0] >= FRAMES_EACH
            and gateway_protocol_errors(cluster) - errors_before[1] >= FRAMES_EACH
        ),
    )
    grown = {name: psutil.Process(cluster.one(name).pid).memory_info().rss - rss_before[name] for name in ports}
    assert all(extra < 48 << 20 for extra in grown.values()), f"resident memory grew (seed {SEED}): {grown}"
    assert sorted(p.pid for members in cluster.processes().values() for p in members) == pids, "nothing was restarted"
    cluster.wait_idle()
