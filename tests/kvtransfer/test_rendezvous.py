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
from kvtransfer.transports.tcp.listener import TcpListener
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


def test_nccl_store_hides_line_secret() -> None:
    """The store of an NCCL pair never holds the token or key of its line."""
    rows: Any = SimpleNamespace(device=torch.device("cpu"))
    door = TcpListener("127.0.0.1", lambda reason: None)
    listener = nccl.Nccl().listen(LocalEnd(rows, 8, KvSettings(), "127.0.0.1", listener=door))
    assert isinstance(listener, nccl._Listener)
    store = distributed.HashStore()  # type: ignore[attr-defined]
    with pytest.raises(PairBroken, match="did not come in time"):
        listener._make(store, rendezvous.RECEIVER_RANK, "127.0.0.1", 0.1)
    door.close()
    held = [entry for key in store.list_keys() for entry in (key.encode(), store.get(key))]
    told = listener.meeting
    assert len(told.token) == 16 and len(told.key) == 32
    assert held and not any(
        secret in entry for entry in held for secret in (told.token, told.key, told.key.hex().encode())
    )
