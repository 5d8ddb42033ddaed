"""Peers that play a role at a ZeroMQ port, with a listed key where the cluster has keys."""

import itertools
import random
import time
from collections import Counter
from contextlib import suppress

import msgpack
import msgspec
import psutil
import zmq

from proto import limits
from proto.codec import pack_tokens, to_frames
from proto.messages import Bye, Hello, Message, Ping, Released, Role, Submit
from proto.parts import Capacity
from proto.sampling import Sampling
from runtime.link.keys import Keys
from tools.attacks.cluster import Target

_PORTS = {"coordinator": Role.COORDINATOR, "gateway": Role.GATEWAY, "decode_worker": Role.DECODE}
_CONTEXT = zmq.Context()
_numbers = itertools.count(random.SystemRandom().randrange(1, 1 << 60))
PING_MS, SEND_MS = 250, 2_000
_NOWHERE = "tcp://127.0.0.1:9"


class FakePeer:
    """A connection to the port of process `port`; it says Hello if it has a role. A connection that is closed stays so."""

    def __init__(self, target: Target, port: str, role: Role | None, model: str = "") -> None:
        self.heard: Counter[str] = Counter()  # messages by name
        self._socket = _CONTEXT.socket(zmq.DEALER)
        self._socket.reconnect_ivl, self._socket.sndtimeo = -1, SEND_MS
        self._gone = False
        if target.keys:
            keys = Keys(target.keys, role or Role.OBSERVER)
            self._socket.curve_publickey, self._socket.curve_secretkey = keys.public, keys.secret
            self._socket.curve_serverkey = keys.of(_PORTS[port])[0]
        self._socket.connect(target.addresses[port])
        if role is not None:
            hello = Hello(
                limits.PROTOCOL_VERSION, role, next(_numbers), f"evil-{next(_numbers) % 100_000}", address=_NOWHERE
            )
            if role in (Role.PREFILL, Role.DECODE):
                capacity = Capacity(1_000, 16, 8, 4_096)
                hello = msgspec.structs.replace(hello, model=model, fingerprint="f", capacity=capacity)
            self.say(hello)

    def say(self, message: Message, blob: bytes = b"") -> None:
        """Sends a message; does nothing where the connection is closed."""
        try:
            if not self._gone:
                self._socket.send_multipart(to_frames(message, blob))
        except zmq.Again:
            self._gone = True

    def ping(self) -> None:
        self.say(Ping())
        self.listen(0)

    def listen(self, wait_ms: int) -> None:
        while self._socket.poll(wait_ms):
            name = str(msgpack.unpackb(self._socket.recv_multipart()[0])[0])
            self.heard[name] += 1
            wait_ms = 0

    def bye(self) -> None:
        self.say(Bye("it leaves"))
        self.close(500)

    def close(self, linger_ms: int = 0) -> None:
        self._socket.close(linger_ms)

    def send_frames(self, count: int, size: int) -> None:
        """Sends one message of `count` frames."""
        frame = bytes(size)
        with suppress(zmq.Again):  # it was cut off in the middle
            self._socket.send_multipart([frame] * count, copy=size < 1_000)


def worker(target: Target, role: str, model: str) -> FakePeer:
    return FakePeer(target, "coordinator", Role(role), model)


def many_frames(target: Target, port: str, count: int, size: int) -> Counter[str]:
    """Sends many frames in one message, with the key `client`."""
    peer = FakePeer(target, port, None)
    peer.send_frames(count, size)
    peer.listen(8_000)
    connected = open_connections(target, port)
    peer.close(2_000)
    return peer.heard + Counter({"still connected" if connected else "cut off": 1})


def open_connections(target: Target, port: str) -> int:
    """Returns how many connections this process has with that port."""
    number = int(target.addresses[port].rpartition(":")[2])
    found = psutil.Process().net_connections("tcp")
    return sum(one.status == psutil.CONN_ESTABLISHED and one.raddr.port == number for one in found if one.raddr)


def stay(peers: list[FakePeer], seconds: float) -> None:
    """Heartbeats of all."""
    for _ in range(round(1000 * seconds / PING_MS)):
        for peer in peers:
            peer.ping()
        time.sleep(PING_MS / 1000)


def renew_with_another_model(target: Target) -> Counter[str]:
    """A gateway's next attempt at a request names another model; then the decode worker that had room for it goes."""
    gateway = FakePeer(target, "coordinator", Role.GATEWAY)
    prefill, decode, *others = (worker(target, role, model) for model in ("ma", "mb") for role in ("prefill", "decode"))
    stay([gateway, prefill, decode, *others], 1.0)

    def submit(request_id: str, attempt: int, model: str) -> None:
        tokens = [1] * 40
        gateway.say(Submit(request_id, attempt, model, len(tokens), Sampling(max_tokens=50)), pack_tokens(tokens))

    submit("evil-1", 1, "ma")
    stay([gateway, prefill, decode, *others], 0.5)
    prefill.bye()
    stay([gateway, decode, *others], 0.5)
    decode.say(Released("evil-1", 1))
    stay([gateway, decode, *others], 0.5)
    submit("evil-1", 2, "mb")
    stay([gateway, decode, *others], 0.5)
    decode.bye()
    again = [worker(target, role, "ma") for role in ("prefill", "decode")]
    stay([gateway, *again, *others], 1.0)
    submit("evil-2", 1, "ma")
    stay([gateway, *again, *others], 1.0)
    heard = Counter({f"gateway heard {name}": count for name, count in gateway.heard.items() if name != "Pong"})
    for peer in (gateway, *again, *others):
        peer.bye()
    return heard
