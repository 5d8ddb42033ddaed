"""How rank 0 gets the pools of the other ranks: an anonymous file on a CPU, a handle on a GPU."""

import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvtransfer.memory.cuda import HANDLE_BYTES, CudaError
from worker import rank

GPU = torch.device("cuda", 0)


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """The sockets of rank 0 and of a further rank."""
    one, other = socket.socketpair()
    one.settimeout(5)
    with one, other:
        yield one, other


def test_file_of_a_rank_is_shared(ends: tuple[socket.socket, socket.socket]) -> None:
    """Both ranks write to the same memory; a file of another size is refused before it is mapped."""
    pool = rank.make_pool(ends[1], 1, 4096)
    mapped = rank.map_pool(ends[0], 4096, torch.device("cpu"))
    pool.fill_(7)
    mapped[0] = 9
    assert pool[:2].tolist() == [9, 7] and mapped.shape == (4096,)
    rank.make_pool(ends[1], 1, 4096)
    with pytest.raises(RuntimeError, match="different sizes"):
        rank.map_pool(ends[0], 8192, torch.device("cpu"))


def test_handle_of_a_rank_is_mapped(ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank allocates on its own GPU; rank 0 maps that memory so that its own GPU reaches it."""
    made: list[Any] = []

    def memory(device: str) -> Any:
        made.append(device)
        return SimpleNamespace(allocate=torch.zeros, handle=b"h" * HANDLE_BYTES)

    def mapping(*arguments: Any, **named: Any) -> Any:
        made.append((arguments, named))
        return SimpleNamespace(tensor=torch.ones(8))

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(rank, "DeviceMemory", memory)
    monkeypatch.setattr(rank, "Mapping", mapping)
    assert rank.make_pool(ends[1], 3, 8).shape == (8,)
    assert rank.map_pool(ends[0], 8, GPU).sum() == 8
    assert made == ["cuda:3", ((b"h" * HANDLE_BYTES, 8, GPU), {"of_peer": True})]


def test_unreadable_gpus_are_named(ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a GPU cannot read another's memory, the error says what tensor parallelism needs; a lost rank is told apart."""

    def mapping(*_: Any, **__: Any) -> Any:
        raise CudaError("cuIpcOpenMemHandle_v2: CUDA_ERROR_PEER_ACCESS_UNSUPPORTED (217)")

    monkeypatch.setattr(rank, "Mapping", mapping)
    ends[1].sendall(b"h" * HANDLE_BYTES)
    with pytest.raises(RuntimeError, match=r"needs GPUs that read each other's memory.*PEER_ACCESS"):
        rank.map_pool(ends[0], 8, GPU)
    ends[1].close()
    with pytest.raises(ConnectionError, match="before it had a pool"):
        rank.map_pool(ends[0], 8, GPU)
