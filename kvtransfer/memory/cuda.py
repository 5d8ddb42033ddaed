"""Memory of a GPU that other processes of this host can map: the pool of a receiver, and a sender's view of it.

`tests/gpu` runs this module on a GPU. The checks of messages from the wire are tested without one.

The driver's own functions (libcuda, by ctypes) are used, for three reasons. A pool is one allocation of its own, so the
handle of an allocation is the handle of the pool; memory from torch's allocator may be part of a larger one, or of a kind
that cannot be shared. torch's own way of sharing keeps its counts in files of /dev/shm, which outlive a killed process. And
this interface of the driver is the same for every version of CUDA and torch.

A handle is 64 bytes that only the driver can interpret and check. The memory stays allocated until both processes have
released it. So a sender whose receiver died writes to memory that is no longer read, without a fault.
"""

import ctypes
import re
import threading
from functools import lru_cache
from typing import Any

import torch

_cuda: Any = torch.cuda  # it has no types in part
HANDLE_BYTES = 64
_PEER_ACCESS = 1
_POINTER = ctypes.c_uint64


class CudaError(RuntimeError):
    """A driver call failed; the text names the call and the driver's error."""


class _Handle(ctypes.Structure):
    """Passed by value, as the driver wants it."""

    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


@lru_cache(maxsize=1)
def _driver() -> Any:
    """Raises `CudaError`."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise CudaError(f"the CUDA driver cannot be loaded: {error}") from None
    pointer = ctypes.POINTER
    for name, arguments in (
        ("cuInit", (ctypes.c_uint,)),
        ("cuDeviceGet", (pointer(ctypes.c_int), ctypes.c_int)),
        ("cuDevicePrimaryCtxRetain", (pointer(ctypes.c_void_p), ctypes.c_int)),
        ("cuCtxSetCurrent", (ctypes.c_void_p,)),
        ("cuMemAlloc_v2", (pointer(_POINTER), ctypes.c_size_t)),
        ("cuMemFree_v2", (_POINTER,)),
        ("cuMemGetAddressRange_v2", (pointer(_POINTER), pointer(ctypes.c_size_t), _POINTER)),
        ("cuIpcGetMemHandle", (pointer(_Handle), _POINTER)),
        ("cuIpcOpenMemHandle_v2", (pointer(_POINTER), _Handle, ctypes.c_uint)),
        ("cuIpcCloseMemHandle", (_POINTER,)),
        ("cuGetErrorName", (ctypes.c_int, pointer(ctypes.c_char_p))),
    ):
        function = getattr(driver, name)
        function.argtypes, function.restype = arguments, ctypes.c_int
    return driver


def _call(name: str, *arguments: Any) -> None:
    driver = _driver()
    result = getattr(driver, name)(*arguments)
    if result:
        text = ctypes.c_char_p()
        driver.cuGetErrorName(result, ctypes.byref(text))
        raise CudaError(f"{name}: {(text.value or b'error').decode()} ({result})")


@lru_cache(maxsize=64)
def _context(index: int) -> int:
    """The context of this device that torch computes in."""
    _call("cuInit", 0)
    device, context = ctypes.c_int(), ctypes.c_void_p()
    _call("cuDeviceGet", ctypes.byref(device), index)
    _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    return context.value or 0


def _enter(device: torch.device) -> None:
    """Make the device's context current in this thread."""
    _call("cuCtxSetCurrent", _context(device_index(device)))


def device_index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def device_uuid(device: torch.device) -> bytes:
    digits = re.sub("[^0-9a-fA-F]", "", str(torch.cuda.get_device_properties(device).uuid))
    if len(digits) != 32:
        raise CudaError("this GPU has no id that torch knows")
    return bytes.fromhex(digits)


class _Foreign:
    """Memory that torch did not allocate, described by the array interface that torch accepts."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


def _as_tensor(address: int, size: int, device: torch.device) -> torch.Tensor:
    """This memory as a tensor of bytes, without a copy."""
    with torch.cuda.device(device):
        tensor: torch.Tensor = torch.as_tensor(_Foreign(address, size), device=device)
    if tensor.data_ptr() != address:
        raise CudaError("torch copied memory that it was to use where it lies")
    return tensor


def _as_tensor_of(address: int, size: int, device: torch.device) -> torch.Tensor:
    """The same for memory of another GPU that `device` reads. torch would copy it, since the driver names the other GPU."""
    private: Any = torch._C
    storage = private._construct_storage_from_data_pointer(address, device, size)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


class DeviceMemory:
    """The memory of one pool, kept until the process ends."""

    def __init__(self, device: str) -> None:
        self.bytes = 0
        self.handle = b""  # by which another process maps it
        self._device = torch.device(device)
        self._address = 0

    def allocate(self, size: int) -> torch.Tensor:
        """Allocate `size` zero bytes and return them as a tensor of bytes. Called once. Raises `CudaError`."""
        assert not self._address and size > 0
        _cuda.init()
        _enter(self._device)
        address, handle = _POINTER(), _Handle()
        _call("cuMemAlloc_v2", ctypes.byref(address), size)
        try:
            _call("cuIpcGetMemHandle", ctypes.byref(handle), address)
            pool = _as_tensor(address.value, size, self._device).zero_()
        except RuntimeError:
            _call("cuMemFree_v2", address)
            raise
        self._address, self.bytes, self.handle = address.value, size, bytes(handle)
        return pool

    def close(self) -> None:
        """Does nothing: the driver frees the memory when this process ends, and a thread may use it until then."""
        return


_mapped: dict[tuple[int, bytes], tuple[int, int]] = {}  # (device, handle) → (address, users): once in a process
_lock = threading.Lock()


class Mapping:
    """Another process's `DeviceMemory` on the same device, or, as `of_peer`, on a GPU that this one reads, until `close`."""

    def __init__(self, handle: bytes, size: int, device: torch.device, of_peer: bool = False) -> None:
        """`size` is the size that the other process claims; it is checked against the driver's. Raises `CudaError`, or
        `ValueError` before anything is mapped if the handle or the size is not plausible."""
        if len(handle) != HANDLE_BYTES or not any(handle):
            raise ValueError(f"{len(handle)} bytes that are no handle of GPU memory")
        total = int(torch.cuda.get_device_properties(device).total_memory)
        if not 0 < size <= total:
            raise ValueError(f"{size} bytes of memory on a GPU that has {total}")
        self._key = (device_index(device), handle)
        self._device = device
        self._address = self._open()
        try:
            there = self._size_there()
            if size > there:
                raise CudaError(f"the memory mapped has {there} bytes, not {size}")
            as_tensor = _as_tensor_of if of_peer else _as_tensor
            self.tensor: torch.Tensor | None = as_tensor(self._address, size, device)
        except RuntimeError:
            self.close()
            raise

    def _open(self) -> int:
        index, handle = self._key
        with _lock:
            address, users = _mapped.get(self._key, (0, 0))
            if not users:
                _enter(torch.device("cuda", index))
                opened = _POINTER()
                _call("cuIpcOpenMemHandle_v2", ctypes.byref(opened), _Handle.from_buffer_copy(handle), _PEER_ACCESS)
                address = opened.value
            _mapped[self._key] = (address, users + 1)
            return address

    def _size_there(self) -> int:
        base, size = _POINTER(), ctypes.c_size_t()
        _enter(self._device)
        _call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), self._address)
        return size.value - (self._address - base.value)

    def close(self) -> None:
        """Unmap the memory. Work enqueued by this process must no longer touch it. Repeated calls do nothing. Raises
        `CudaError`."""
        self.tensor = None
        if not self._address:
            return
        address, self._address = self._address, 0
        with _lock:
            _, users = _mapped.pop(self._key)
            if users > 1:
                _mapped[self._key] = (address, users - 1)
                return
            _enter(self._device)
            _call("cuIpcCloseMemHandle", address)
