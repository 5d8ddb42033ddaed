"""Variables that NCCL and torch's layer over it read once, when they start. A role sets them before it imports torch, and
never again: another thread may be reading.

Variables that a user has set already stay as they are.
"""

import hashlib
import os
import re
import socket
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

_NCCL_WHEELS = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")
_SHARES_A_GPU_SINCE = (2, 30)
_DRIVER_GPUS = Path("/proc/driver/nvidia/gpus")
_SHARERS_MAX = 64  # processes on one GPU that are told apart by number
_NO_TORCH_WATCHMEN = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # a pair that breaks must not end the process
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "0",
    "TORCH_FR_BUFFER_SIZE": "0",  # its name from torch 2.10 on
}


def gpu_variables(present: Mapping[str, str], *, interface: str, timeout_ms: int, host_id: str) -> dict[str, str]:
    """The variables to set beside `present`. `interface` is the network interface for KV, empty: any; `host_id` is a name for
    this host in place of NCCL's own, empty: NCCL's own (see `host_id_of`)."""
    found = dict(_NO_TORCH_WATCHMEN)
    found["TORCH_NCCL_NONBLOCKING_TIMEOUT"] = str(max(1, -(-timeout_ms // 1000)))
    found["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    if host_id:
        found["NCCL_HOSTID"] = host_id
    if interface:
        found["NCCL_SOCKET_IFNAME"] = exactly(interface)
    if interface == "lo":
        found["NCCL_IB_DISABLE"] = "1"
    return {name: value for name, value in found.items() if name not in present}


def exactly(interface: str) -> str:
    """Returns the interface's name in NCCL's exact form: a bare name would allow every interface that begins with it."""
    return f"={interface}"


def prepare(transfer_host: str, timeout_ms: int) -> None:
    """Set them for this process, which must not have begun to use torch."""
    gpu = gpu_identity(os.environ.get("CUDA_VISIBLE_DEVICES"), gpus_here()) if has_gpus() else ""
    ordinal = claim_ordinal(gpu) if gpu and nccl_version() < _SHARES_A_GPU_SINCE else 0
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    os.environ.update(
        gpu_variables(
            os.environ,
            interface=interface_of(transfer_host),
            timeout_ms=timeout_ms,
            host_id=host_id_of(f"{socket.gethostname()}-{boot_id}", ordinal),
        )
    )


def host_id_of(host: str, ordinal: int) -> str:
    """The name of the host for the process that is number `ordinal` on its GPU; empty: NCCL's own.

    NCCL treats two processes on one GPU as an error. From 2.30 on, a setting allows them. An older version compares host and
    GPU, so all but the first process on a GPU use another host name. Processes of one number share a name, whatever their GPU:
    NVLink and shared memory are used only between processes that have the same host name."""
    return f"{host}-{ordinal}" if ordinal else ""


def gpu_identity(visible: str | None, uuids: Sequence[str]) -> str:
    """The GPU that a process uses, the first that CUDA_VISIBLE_DEVICES allows; empty: none. `uuids` are of the GPUs here, by
    number. Where the driver does not tell them, what CUDA_VISIBLE_DEVICES says must do."""
    first = "0" if visible is None else visible.partition(",")[0].strip()
    if not first or first.startswith("-"):
        return ""
    if first.isdecimal():
        return uuids[int(first)] if int(first) < len(uuids) else f"number-{int(first)}"
    if first.upper().startswith("MIG-"):
        return "MIG"  # NCCL knows the GPU that an instance is a part of, and we do not
    found = [uuid for uuid in uuids if uuid.lower().startswith(first.lower())]  # CUDA allows the beginning of one
    return found[0] if len(found) == 1 else first.lower()


def gpus_here(folder: Path = _DRIVER_GPUS) -> list[str]:
    """UUIDs in the order of their PCI addresses, as CUDA numbers them under CUDA_DEVICE_ORDER=PCI_BUS_ID."""
    found = []
    for gpu in sorted(folder.glob("*/information")):
        uuid = re.search(r"GPU UUID:\s*(\S+)", gpu.read_text(encoding="utf-8", errors="replace"))
        found.append(uuid[1] if uuid else gpu.parent.name)
    return found


def has_gpus() -> bool:
    """Told without importing torch: whether there is an NVIDIA driver with a GPU."""
    return _DRIVER_GPUS.is_dir() or any(Path("/dev").glob("nvidia[0-9]*"))


_claims: dict[str, tuple[int, socket.socket]] = {}


def claim_ordinal(gpu: str) -> int:
    """Returns the lowest number that no other process of this host has on this GPU. The process keeps it while it lives, by an
    abstract socket name that the kernel frees at its end. If all numbers are taken, returns the process id."""
    if gpu in _claims:
        return _claims[gpu][0]
    digest = hashlib.sha256(gpu.encode()).hexdigest()[:32]
    for ordinal in range(_SHARERS_MAX):
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            claim.bind(f"\0crossdock-gpu-{digest}-{ordinal}")
        except OSError:
            claim.close()
            continue
        _claims[gpu] = (ordinal, claim)
        return ordinal
    return os.getpid()


def interface_of(host: str) -> str:
    """The network interface that has this address or the first of this name; empty where none here has it."""
    try:
        address = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]).partition("%")[0]
    except OSError:
        return ""
    if address.startswith("127."):
        return "lo"
    for name, there in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == address for one in there):
            return str(name)
    return ""


def nccl_version() -> tuple[int, int]:
    """The version of the wheel that torch will load; (0, 0) where none is installed."""
    for wheel in _NCCL_WHEELS:
        try:
            found = re.match(r"(\d+)\.(\d+)", version(wheel))
        except PackageNotFoundError:
            continue
        if found is not None:
            return int(found[1]), int(found[2])
    return 0, 0
