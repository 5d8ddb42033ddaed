"""What a rendezvous leaves open, and what a stranger finds in its store."""

import socket
import threading
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed

from kvtransfer.session.limits import KvSettings
from kvtransfer.transports import nccl, rendezvous
from kvtransfer.transports.side_channel import RendezvousListener
from kvtransfer.transports.transport import LocalEnd, PairBroken
from tests.kvtransfer import gloo
from tests.kvtransfer.ends import WAIT_S

LIMIT = timedelta(seconds=WAIT_S)


def test_gloo_store_ends_after_meeting() -> None:
    """The group alone would keep it, and its listening socket, for as long as it lives."""
    listener = rendezvous.StoreListener("127.0.0.1", WAIT_S)
    groups: list[Any] = []
    meeting = threading.Thread(target=lambda: groups.append(listener.meet(gloo.gloo_group)), daemon=True)
    meeting.start()
    sender = rendezvous.connect(gloo.gloo_group, "127.0.0.1", listener.port, listener.secret, WAIT_S)
    meeting.join(WAIT_S)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", listener.port), timeout=WAIT_S)
    said, heard = torch.arange(8), torch.zeros(8, dtype=torch.int64)
    receiving = groups[0].recv([heard], rendezvous.SENDER_RANK, 1)
    sender.send([said], rendezvous.RECEIVER_RANK, 1).wait(LIMIT)
    receiving.wait(LIMIT)
    assert torch.equal(said, heard)


def test_nccl_store_hides_line_secret(monkeypatch) -> None:
    """The store of an NCCL pair never holds the secret of its line."""

    def nobody(rendezvous_listener: RendezvousListener, timeout_s: float) -> None:
        doors.append(rendezvous_listener)
        raise PairBroken("nobody")

    doors: list[RendezvousListener] = []
    monkeypatch.setattr(RendezvousListener, "accept", nobody)
    rows: Any = SimpleNamespace(device=torch.device("cpu"))
    listener = nccl._Listener(LocalEnd(rows, 8, KvSettings(), "127.0.0.1"))
    store = distributed.HashStore()  # type: ignore[attr-defined]
    with pytest.raises(PairBroken):
        listener._make(store, rendezvous.RECEIVER_RANK, "127.0.0.1", WAIT_S)
    held = [entry for key in store.list_keys() for entry in (key.encode(), store.get(key))]
    secret = doors[0].secret
    doors[0].close()
    assert secret == listener.meeting.key.hex() and len(secret) == 32
    assert held and not any(secret.encode() in entry for entry in held)
