"""What is decided about GPUs without one: who can use which transport, words from the wire, idle pairs."""

import fcntl
import os
import struct
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvtransfer.driver import TransferDriver
from kvtransfer.memory import cuda as cuda_memory
from kvtransfer.memory.cuda import CudaError, DeviceMemory, Mapping
from kvtransfer.memory.layout import KvLayout
from kvtransfer.memory.shared import SEALS
from kvtransfer.session.limits import AUTO, KvSettings
from kvtransfer.transports import cuda_ipc, nccl
from kvtransfer.transports import registry as transports
from kvtransfer.transports.cuda_ipc import CancelFlags
from kvtransfer.transports.transport import LocalEnd, PairBroken

LAYOUT = KvLayout(layers=2, kv_heads=2, head_dim=8, block_size=4, dtype="float32")
UUID, HANDLE = bytes(range(16)), bytes(range(1, 65))


def local(device: str, memory: Any) -> LocalEnd:
    rows: Any = SimpleNamespace(device=torch.device(device))
    return LocalEnd(rows, 8, KvSettings(), "127.0.0.1", memory)


def device_memory() -> DeviceMemory:
    memory = DeviceMemory("cuda")
    memory.bytes, memory.handle = 1 << 20, HANDLE
    return memory


@pytest.fixture
def with_nccl(monkeypatch):
    monkeypatch.setattr(nccl.distributed, "is_nccl_available", lambda: True)  # type: ignore[attr-defined]
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")


@pytest.mark.parametrize(
    ("sends_from", "receives_on", "same_host", "expected"),
    [
        ("cuda", "cuda", True, ["cuda_ipc", "nccl", "tcp"]),
        ("cuda", "cuda", False, ["nccl", "tcp"]),
        ("cpu", "cuda", True, ["tcp"]),
        ("cuda", "cpu", True, ["tcp"]),
        ("cpu", "cpu", True, ["shm", "tcp"]),
        ("cpu", "cpu", False, ["tcp"]),
    ],
)
def test_pair_gets_best_common_transports(with_nccl, sends_from, receives_on, same_host, expected):
    """A pair gets the transports that both ends can use, best first, and the others are refused by name."""
    memory = device_memory() if receives_on == "cuda" else None
    offered = transports.suited(AUTO, sends_from)
    found, against = transports.usable(local(receives_on, memory), offered, AUTO, same_host)
    assert found == expected
    assert all(f"{name}: " in against for name in set(offered) - set(found))


def test_fatal_nccl_is_not_used(monkeypatch):
    """NCCL is not used where its asynchronous error handling would end the process."""
    monkeypatch.setattr(nccl.distributed, "is_nccl_available", lambda: True)  # type: ignore[attr-defined]
    monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", raising=False)
    found, against = transports.usable(local("cuda", device_memory()), ("nccl", "tcp"), AUTO, True)
    assert found == ["tcp"] and "TORCH_NCCL_ASYNC_ERROR_HANDLING is not 0" in against


def test_unsuitable_transport_is_refused():
    """A transport that the device cannot use is refused by its name, with those that it can use."""
    with pytest.raises(transports.WrongTransport, match="nccl cannot be used with KV on cpu; there are shm or tcp"):
        transports.allowed_on("nccl", "cpu")
    assert transports.allowed_on("auto", "cuda") == ("cuda_ipc", "nccl", "tcp")
    assert transports.memory_for(("shm", "tcp"), "cpu") is None, "nobody maps a pool in host memory"
    assert isinstance(transports.memory_for(("cuda_ipc",), "cuda"), DeviceMemory)
    assert transports.memory_for(("nccl", "tcp"), "cuda") is None


def a_board() -> list[int]:
    descriptor = os.memfd_create("board", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, CancelFlags.SIZE)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
    return [descriptor, os.open("/dev/null", os.O_RDONLY)]


def told(message: bytes, descriptors: list[int]) -> Any:
    try:
        return cuda_ipc._Told(LAYOUT, UUID, message, descriptors)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def word(**changed: Any) -> bytes:
    fields = {
        "magic": b"cdkvipc1", "bytes": 1 << 20, "blocks": 64, "ratio": 1, "cell": LAYOUT.block_bytes, "every": 1,
        "uuid": UUID, "handle": HANDLE,
    }  # fmt: skip
    return struct.pack("<8sQQQQQ16s64s", *(fields | changed).values())


def test_valid_hello_is_accepted():
    """A valid cuda_ipc hello gives the pool's size, block ratio, handle and digest sampling."""
    rows: Any = SimpleNamespace(sub_blocks=128, ratio=2, layout=LAYOUT)
    one = told(cuda_ipc.hello(rows, device_memory(), 16, UUID), a_board())
    assert (one.pool_bytes, one.ratio, one.used, one.digest_every) == (1 << 20, 2, 128 * LAYOUT.block_bytes, 16)
    assert one.handle == HANDLE


@pytest.mark.parametrize(
    ("message", "fault"),
    [
        (word()[:-1], "127 bytes"),
        (word() + b"\0", "129 bytes"),
        (word(magic=b"cdkvipc2"), "another version"),
        (word(uuid=bytes(16)), "different GPUs"),
        (word(cell=LAYOUT.block_bytes + 4), "blocks have"),
        (word(blocks=1 << 20), "do not fit"),
        (word(blocks=0), "do not fit"),
        (word(ratio=0), "do not fit"),
        (word(ratio=(1 << 64) - 1), "do not fit"),
        (word(every=0), "one segment in 0"),
        (word(every=1 << 40), "one segment in"),
    ],
)
def test_bad_hello_maps_nothing(message, fault):
    """A hello with a wrong size, version, GPU or block count breaks the pair."""
    with pytest.raises(PairBroken, match=fault):
        told(message, a_board())


def test_unsealed_cancel_flags_are_refused():
    """Cancel flags in memory that can still shrink, or without both descriptors, break the pair."""
    descriptor = os.memfd_create("board", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, CancelFlags.SIZE)
    with pytest.raises(PairBroken, match="not sealed"):
        told(word(), [descriptor, os.open("/dev/null", os.O_RDONLY)])
    with pytest.raises(PairBroken, match="1 descriptors"):
        told(word(), [os.open("/dev/null", os.O_RDONLY)])


@pytest.mark.parametrize(("handle", "size"), [(HANDLE[:-1], 4096), (bytes(64), 4096), (HANDLE, 0), (HANDLE, 1 << 50)])
def test_bad_handle_never_reaches_the_driver(monkeypatch, handle, size):
    """An impossible handle or size is refused before the driver is asked."""
    monkeypatch.setattr(cuda_memory, "_driver", lambda: pytest.fail("the driver was asked"))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=1 << 36))
    with pytest.raises(ValueError):
        Mapping(handle, size, torch.device("cuda", 0))


class FakeDriver:
    """Maps a handle once, and knows the size of what it mapped."""

    def __init__(self, size: int) -> None:
        self.size, self.calls = size, []

    def __call__(self, name: str, *arguments: Any) -> None:
        self.calls.append(name)
        if name == "cuIpcOpenMemHandle_v2":
            arguments[0]._obj.value = 0x7F0000000000
        elif name == "cuMemGetAddressRange_v2":
            arguments[0]._obj.value, arguments[1]._obj.value = 0x7F0000000000, self.size


@pytest.fixture
def driver(monkeypatch):
    fake = FakeDriver(1 << 20)
    monkeypatch.setattr(cuda_memory, "_call", fake)
    monkeypatch.setattr(cuda_memory, "_context", lambda index: 1)
    monkeypatch.setattr(cuda_memory, "_as_tensor", lambda address, size, device: torch.zeros(1))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=1 << 36))
    return fake


def test_mapping_lives_until_last_user(driver):
    """A handle is mapped once for several users and unmapped when the last of them closes it."""
    one, other = (Mapping(HANDLE, 1 << 20, torch.device("cuda", 0)) for _ in range(2))
    assert driver.calls.count("cuIpcOpenMemHandle_v2") == 1
    one.close()
    one.close()
    assert "cuIpcCloseMemHandle" not in driver.calls
    other.close()
    assert driver.calls.count("cuIpcCloseMemHandle") == 1 and cuda_memory._mapped == {}


def test_undersized_memory_is_unmapped(driver):
    """Mapped memory that is smaller than its owner says is unmapped and refused."""
    with pytest.raises(CudaError, match="1048576 bytes, not 1048577"):
        Mapping(HANDLE, (1 << 20) + 1, torch.device("cuda", 0))
    assert driver.calls[-1] == "cuIpcCloseMemHandle" and cuda_memory._mapped == {}


def test_missing_driver_is_reported():
    """A machine without a CUDA driver says that the driver cannot be loaded."""
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    cuda_memory._driver.cache_clear()
    with pytest.raises(CudaError, match="driver cannot be loaded"):
        cuda_memory._call("cuInit", 0)


def test_wait_ends_with_the_process():
    """The wait for a process returns when the process has ended, or when its time is over."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    descriptor = os.pidfd_open(process.pid)
    cuda_ipc.wait_until_gone(descriptor, 10)
    assert process.poll() is None
    process.kill()
    cuda_ipc.wait_until_gone(descriptor, 60_000)
    assert process.poll() is not None
    os.close(descriptor)


@pytest.mark.parametrize(
    ("limit_mib", "dropped"),
    [(20, []), (19, [3]), (14, [3, 1]), (1, [3, 1, 4])],
    ids=["fits", "one", "two", "all idle"],
)
def test_oldest_idle_pairs_close_first(limit_mib: int, dropped: list[int]) -> None:
    """The idle pairs that were not used for longest are dropped, no more than needed, and busy pairs never."""
    found: list[int] = []
    used = {1: 5.0, 2: 1.0, 3: 2.0, 4: 9.0}
    driver: Any = SimpleNamespace(
        _settings=KvSettings(pairs_bytes=limit_mib << 20),
        _peers={
            one: SimpleNamespace(
                number=one, transport="tcp", used_at=at, ready=True, sessions={1: 1} if one == 2 else {}
            )
            for one, at in used.items()
        },
        _drop=lambda peer, reason, tell_peer: found.append(peer.number),
    )
    TransferDriver._make_room(driver, ("tcp",))
    assert found == dropped
