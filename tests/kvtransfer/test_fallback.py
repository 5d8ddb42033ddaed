"""Where a pair cannot use one transport, it uses the next one."""

import os
from dataclasses import replace

import pytest

from kvtransfer.session.limits import AUTO
from kvtransfer.session.session import KvFailed, KvSent
from kvtransfer.transports import registry as transports
from kvtransfer.transports.unix_socket import READY, UnixConnection
from proto.kv import PairListen, PairOpen
from proto.messages import Message
from tests.kvtransfer import ends as ends_module
from tests.kvtransfer.ends import SMALL, Ends, shuffled, with_ends


@pytest.fixture(autouse=True)
def _any_transport(monkeypatch):
    monkeypatch.setattr(ends_module, "TRANSPORT", "")


def test_failed_shm_falls_back_to_tcp(monkeypatch):
    """The sessions, offered before, need not know."""
    monkeypatch.setattr(
        "kvtransfer.transports.shm.connect",
        lambda *ignored: (_ for _ in ()).throw(ConnectionRefusedError(111, "refused")),
    )

    async def test(ends: Ends) -> None:
        ends.transfer("r", shuffled(64, 20, 1))
        await ends.ended(1)
        assert isinstance(ends.results[0], KvSent)
        assert [frame.transports for frame in ends.frames if isinstance(frame, PairOpen)] == [("shm", "tcp"), ("tcp",)]
        assert ends.sender.counters["bytes_tcp"] == ends.sender.counters["bytes"] > 0
        (state,) = ends.sender.transports()
        assert state.transport == "tcp" and "refused" in state.why

    with_ends(test)


def test_same_process_pair_uses_tcp(monkeypatch):
    """As between the halves of a mixed worker on a GPU, where only tcp does."""
    monkeypatch.setattr("kvtransfer.transports.shm.Shm.within_process", False)

    async def test(ends: Ends) -> None:
        ends.sender._own_peers = {2}
        ends.transfer("r", [1, 2, 3])
        await ends.ended(1)
        assert isinstance(ends.results[0], KvSent)
        assert [frame.transports for frame in ends.frames if isinstance(frame, PairOpen)] == [("tcp",)]

    with_ends(test)
    assert transports.within_process(("cuda_ipc", "nccl", "tcp")) == ("tcp",)


def test_another_host_is_served_by_tcp(monkeypatch):
    """A pair across two hosts uses tcp, and its state says why it does not use shm."""
    monkeypatch.setattr("kvtransfer.driver.host_id", lambda: os.urandom(4).hex())

    async def test(ends: Ends) -> None:
        ends.transfer("r", [1, 2, 3])
        await ends.ended(1)
        (state,) = ends.sender.transports()
        assert isinstance(ends.results[0], KvSent) and state.transport == "tcp" and "shm: another host" in state.why

    with_ends(test)


def test_broken_transport_is_tried_again():
    """A transport that broke is left out for the next transfer, and tried again when its time has passed."""

    def no_grant(self: UnixConnection, kind: int, sequence: int, payload: bytes = b"") -> bool:
        return True if broken and kind not in (READY,) else plain(self, kind, sequence, payload)

    plain, broken = UnixConnection.send, [True]
    listened: list[str] = []

    def watch(message: Message) -> bool:
        if isinstance(message, PairListen):
            listened.append(message.transport)
        return True

    async def test(ends: Ends) -> None:
        ends.transfer("r0", [1, 2])
        await ends.ended(1)
        assert isinstance(ends.results[0], KvFailed) and "shm" in ends.results[0].reason
        ends.transfer("r1", [1, 2])
        await ends.ended(2)
        broken.clear()
        ends.sender._choice._records[2]["shm"].until = 0.0  # as if that time had passed
        ends.transfer("r2", [1, 2])
        await ends.ended(3)
        assert [type(result) for result in ends.results[1:]] == [KvSent, KvSent]
        assert listened == ["shm", "tcp", "shm"]
        assert ends.sender.counters["broken_shm"] + ends.receiver.counters["broken_shm"] >= 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(UnixConnection, "send", no_grant)
        quick = replace(SMALL, segment_timeout_ms=400)
        with_ends(test, to_sender=watch, settings=quick)


def test_host_id_is_stable():
    """The host id is the same each time, and the automatic choice covers all transports but gloo."""
    assert transports.host_id() == transports.host_id()
    assert set(transports.TRANSPORTS) - {"gloo"} == set(AUTO)
