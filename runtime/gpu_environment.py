"""Variables that NCCL and torch's layer over it read once, when they start. A role sets them before it imports torch, and
never again: another thread may be reading.

What a user has set already is left as it is.
"""

import os
import re
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_NCCL_WHEELS = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")
_SHARES_A_GPU_SINCE = (2, 30)
_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_NO_TORCH_WATCHMEN = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # a pair that breaks must not end the process
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "0",
    "TORCH_FR_BUFFER_SIZE": "0",  # its name from torch 2.10 on
}


def gpu_variables(
    present: Mapping[str, str], *, transfer_host: str, timeout_ms: int, gpus: int, nccl: tuple[int, int], process: str
) -> dict[str, str]:
    """What to set beside `present`. `gpus` are those that this process may use, 0: it is not known; `nccl` is the version that
    will be loaded, (0, 0): not known; `process` is a name that no other process of the cluster has.

    Two workers on one GPU: NCCL takes that for a mistake. From 2.30 on it can be told that it is none; an older one compares
    host and GPU, so the host gets another name in each process. That makes all traffic between the two go through sockets, and
    where a machine has one GPU there is no other traffic within the machine."""
    found = dict(_NO_TORCH_WATCHMEN)
    found["TORCH_NCCL_NONBLOCKING_TIMEOUT"] = str(max(1, -(-timeout_ms // 1000)))
    found["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    if gpus == 1 and nccl < _SHARES_A_GPU_SINCE:
        found["NCCL_HOSTID"] = process
    if transfer_host in _LOOPBACK:
        found["NCCL_SOCKET_IFNAME"] = "lo"
        found["NCCL_IB_DISABLE"] = "1"
    return {name: value for name, value in found.items() if name not in present}


def prepare(transfer_host: str, timeout_ms: int) -> None:
    """Set them for this process, which must not have begun to use torch."""
    process = f"{Path('/proc/sys/kernel/random/boot_id').read_text(encoding='ascii').strip()}-{os.getpid()}"
    os.environ.update(
        gpu_variables(
            os.environ,
            transfer_host=transfer_host,
            timeout_ms=timeout_ms,
            gpus=usable_gpus(os.environ.get("CUDA_VISIBLE_DEVICES")),
            nccl=nccl_version(),
            process=process,
        )
    )


def usable_gpus(visible: str | None) -> int:
    """Told without importing torch; 0 where there is no NVIDIA driver."""
    there = Path("/proc/driver/nvidia/gpus")
    count = len(list(there.iterdir())) if there.is_dir() else len(list(Path("/dev").glob("nvidia[0-9]*")))
    return count if visible is None else min(count, len([name for name in visible.split(",") if name.strip()]))


def nccl_version() -> tuple[int, int]:
    """Of the wheel that torch will load; (0, 0) where none is installed."""
    for wheel in _NCCL_WHEELS:
        try:
            found = re.match(r"(\d+)\.(\d+)", version(wheel))
        except PackageNotFoundError:
            continue
        if found is not None:
            return int(found[1]), int(found[2])
    return 0, 0
