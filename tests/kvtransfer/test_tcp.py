"""`tcp` with somebody between its ends or in the place of one: what can be read and done, which is nothing."""

import asyncio
import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from kvtransfer.memory.pool import PoolRows
from kvtransfer.session.session import KvFailed, KvSent
from kvtransfer.transports.registry import WrongTransport, allowed_on
from kvtransfer.transports.tcp.handshake import HELLO_BYTES
from kvtransfer.transports.tcp.stream import HEADER_BYTES
from kvtransfer.transports.tcp.transport import Tcp
from kvtransfer.transports.transport import LocalEnd, PairBroken, Rendezvous
from proto.kv import PairListen
from proto.messages import Message
from tests.kvtransfer import ends as ends_module
from tests.kvtransfer.ends import LAYOUT, SMALL, WAIT_S, Ends, filled_pool, meeting_of, shuffled, transfer, with_ends


@pytest.fixture(autouse=True)
def _tcp(monkeypatch):
    monkeypatch.setattr(ends_module, "TRANSPORT", "tcp")


class Relay:
    """Passes bytes on from a sender to a receiver, and keeps them. `change` may change what passes."""

    def __init__(self, to: tuple[str, int], change: Callable[[bytes], bytes] = lambda data: data) -> None:
        self.seen = bytearray()
        self._to, self._change = to, change
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self._sockets = [self._listening]
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        sender, _ = self._listening.accept()
        receiver = socket.create_connection(self._to)
        self._sockets += [sender, receiver]
        threading.Thread(target=self._pass_on, args=(receiver, sender, bytes), daemon=True).start()
        self._pass_on(sender, receiver, self._kept)

    def _kept(self, data: bytes) -> bytes:
        self.seen += data
        return self._change(data)

    def _pass_on(self, source: socket.socket, target: socket.socket, change: Callable[[bytes], bytes]) -> None:
        try:
            while data := source.recv(1 << 16):
                target.sendall(change(data))
            target.shutdown(socket.SHUT_WR)
        except OSError:
            return

    def close(self) -> None:
        for one in self._sockets:
            one.close()


def with_relay(
    test: Callable[[Ends, Relay], Any], change: Callable[[bytes], bytes] = lambda data: data, **options: Any
) -> None:
    """The first pair meets through a relay."""
    relays: list[Relay] = []

    async def body(ends: Ends) -> None:
        plain = ends._send_to_sender

        def send(incarnation: int, message: Message, blob: bytes) -> None:
            if isinstance(message, PairListen) and not relays:
                relays.append(Relay((message.host, message.port), change))
                message = msgspec.structs.replace(message, port=relays[0].port)
            plain(incarnation, message, blob)

        ends.receiver._send = send
        ends.transfer("r", shuffled(64, 20, 1))
        await ends.ended(1)
        await test(ends, relays[0])
        relays[0].close()

    with_ends(body, **options)


@pytest.mark.parametrize("transport", ["tcp", "tcp-plain"])
def test_encrypted_kv_cannot_be_read(transport: str, monkeypatch) -> None:
    """KV on the wire can be read only where encryption is off."""
    monkeypatch.setattr(ends_module, "TRANSPORT", transport)

    async def test(ends: Ends, relay: Relay) -> None:
        assert isinstance(ends.results[0], KvSent)
        blocks = [bytes(ends.source[block].view(-1).numpy().tobytes()) for block in shuffled(64, 20, 1)]
        readable = [block[:64] in relay.seen for block in blocks]
        assert readable == [transport == "tcp-plain"] * 20
        assert len(relay.seen) > 20 * LAYOUT.block_bytes

    with_relay(test)


def test_changed_byte_ends_the_pair() -> None:
    """A byte changed on its way ends the pair, nothing is committed, and the next transfer arrives."""
    left = [HELLO_BYTES + HEADER_BYTES + 100]

    def flip(data: bytes) -> bytes:
        at, left[0] = left[0], left[0] - len(data)
        return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] if 0 <= at < len(data) else data

    async def test(ends: Ends, relay: Relay) -> None:
        assert isinstance(ends.results[0], KvFailed) and not ends.committed and len(ends.failed) == 1
        ends.results.clear()
        ends.failed.clear()
        await transfer(ends, "next")

    with_relay(test, flip)


def test_overheard_hello_is_refused() -> None:
    """A hello that was overheard and sent again is refused and counted as a stranger."""

    async def test(ends: Ends, relay: Relay) -> None:
        overheard = bytes(relay.seen[:HELLO_BYTES])
        with socket.create_connection(relay._to, timeout=WAIT_S) as again:
            again.sendall(overheard)
            assert await asyncio.to_thread(again.recv, 1) == b""
        await transfer(ends, "next")
        assert ends.receiver.counters["strangers"] == 1

    with_relay(test)


def test_keyless_listener_gets_nothing() -> None:
    """Between what the control link tells and the connection, another process may have taken the port."""
    with socket.create_server(("127.0.0.1", 0)) as impostor:
        heard: list[bytes] = []

        def answer() -> None:
            connected, _ = impostor.accept()
            with connected:
                heard.append(connected.recv(HELLO_BYTES, socket.MSG_WAITALL))
                connected.sendall(heard[0][-48:])
                heard.append(connected.recv(1))

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        meeting = Rendezvous("tcp", *impostor.getsockname(), "", token=b"t" * 16, key=b"k" * 32, encrypted=False)  # type: ignore[call-arg]
        with pytest.raises(PairBroken, match="does not know the key"):
            Tcp().connect(LocalEnd(PoolRows(filled_pool(LAYOUT, 4, 1), LAYOUT), 1, SMALL), meeting)
        thread.join(WAIT_S)
        assert len(heard[0]) == HELLO_BYTES and heard[1] == b"" and b"k" * 32 not in heard[0]


@pytest.mark.parametrize(("sender", "receiver"), [(True, False), (False, True), (True, True), (False, False)])
def test_either_end_can_demand_encryption(sender: bool, receiver: bool) -> None:
    """The connection is encrypted if at least one end asks for it."""

    async def test(ends: Ends) -> None:
        meeting = meeting_of(ends)
        await transfer(ends, "r")
        assert (await meeting).encrypted is (sender or receiver)

    base = replace(SMALL, transports=("tcp",))
    with_ends(test, settings=replace(base, encrypt=sender), receiver_settings=replace(base, encrypt=receiver))


def test_encrypting_sender_refuses_cleartext() -> None:
    """A sender that encrypts refuses a rendezvous without encryption."""
    local = LocalEnd(PoolRows(filled_pool(LAYOUT, 4, 1), LAYOUT), 1, SMALL, encrypt=True)
    with pytest.raises(PairBroken, match="unencrypted"):
        Tcp().connect(local, Rendezvous("tcp", "127.0.0.1", 1, "", token=b"t" * 16, key=b"k" * 32, encrypted=False))


def test_cleartext_transport_is_refused() -> None:
    """A transport that sends KV in the clear is refused by name where transfers are confidential."""
    assert allowed_on("auto", "cpu", confidential=True) == ("shm", "tcp")
    assert allowed_on("auto", "cuda", confidential=True) == ("cuda_ipc", "tcp")
    with pytest.raises(WrongTransport, match="nccl sends KV in the clear"):
        allowed_on("nccl", "cuda", confidential=True)
