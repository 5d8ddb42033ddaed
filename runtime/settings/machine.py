"""Checks whether this machine meets the needs of the settings."""

import errno
import os
import socket
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

import psutil

from proto.limits import KV_TIMEOUT_MS
from runtime.process.exits import ConfigError
from runtime.settings import gpu_environment
from runtime.settings.cores import cores_text
from runtime.settings.workers import WorkerSettings

GIB: Final = 1 << 30
_FAMILIES = (socket.AF_INET, socket.AF_INET6)
_PASSING = (errno.EADDRINUSE, socket.EAI_AGAIN)
_CORES_MAX: Final = 8192
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def prepare(settings: WorkerSettings) -> WorkerSettings:
    """Before anything is loaded, torch included: checks what is asked of this machine, and tells NCCL, which will be
    loaded later, which network interface to use. Returns the settings with what was found here filled in. Raises
    `ConfigError`."""
    check_cores(settings)
    address = transfer_address(settings.transfer_host)
    if address != settings.transfer_host:
        # Read by the library when it starts; never changed later, since that would be while threads read them.
        os.environ["NCCL_SOCKET_IFNAME"] = gpu_environment.exactly(settings.transfer_host)
        settings = settings.model_copy(update={"transfer_host": address})
    gpu_environment.prepare(address, KV_TIMEOUT_MS)
    check_device(settings)
    return settings


def transfer_address(host: str) -> str:
    """Returns the first address of the network interface of this name, or `host` itself. Raises `ConfigError`."""
    there = psutil.net_if_addrs()
    if host in there:
        found: list[str] = [one.address for family in _FAMILIES for one in there[host] if one.family == family]
        found = [address for address in found if "%" not in address]  # of one link only
        if not found:
            raise ConfigError(f"--transfer-host: {host} has no address")
        return found[0]
    try:
        socket.getaddrinfo(host, None)
    except socket.gaierror as error:
        if error.errno not in _PASSING or "." not in host:
            raise ConfigError(f"--transfer-host: there is no {host} here, but {', '.join(sorted(there))}") from None
    return host


def check_cores(settings: WorkerSettings) -> None:
    """Whether `--cpu-cores` are there. Raises `ConfigError`."""
    asked = set(settings.cores)
    if absent := asked - usable_cores(asked):
        there = cores_text(tuple(usable_cores(set(range(_CORES_MAX)))))
        raise ConfigError(f"--cpu-cores: {cores_text(tuple(absent))} cannot be used; this process may have {there}")


def usable_cores(asked: set[int]) -> set[int]:
    """Returns the cores of `asked` that this process may use. It sets its affinity to them for a moment to find out, since no
    table distinguishes the machine's cores from its container's."""
    if not asked:
        return set()
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, asked)
        return set(os.sched_getaffinity(0))
    except OSError:
        return set()
    finally:
        os.sched_setaffinity(0, before)


def check_device(settings: WorkerSettings) -> None:
    """Whether `--device` is there and has memory for `--kv-gib`. Raises `ConfigError`."""
    gpu_bytes = 0 if settings.device == "cpu" else gpu_memory_bytes()
    if settings.device == "cuda" and not gpu_bytes:
        why = "torch is a build for the CPU" if torch_is_cpu_build() else "torch sees no GPU"
        raise ConfigError(f"--device: cuda cannot be used here: {why}")
    where, memory_bytes = ("the GPU", gpu_bytes) if gpu_bytes else ("this machine", host_memory_bytes())
    if settings.kv_gib * GIB > memory_bytes:
        raise ConfigError(
            f"--kv-gib: {settings.kv_gib:g} GiB is over the memory of {where}, {memory_bytes / GIB:.1f} GiB"
        )


def torch_is_cpu_build() -> bool:
    """Told without importing torch, which takes seconds; so is its absence."""
    try:
        return version("torch").endswith("+cpu")
    except PackageNotFoundError:
        return True


def gpu_memory_bytes() -> int:
    """Memory of the GPU that torch will use; 0 where it sees none."""
    if torch_is_cpu_build():
        return 0
    import torch

    return int(torch.cuda.get_device_properties(0).total_memory) if torch.cuda.is_available() else 0


def check_listening(option: str, error: OSError) -> None:
    """After a failure to listen: raises `ConfigError` unless the address may become free by itself."""
    if error.errno not in _PASSING:
        raise ConfigError(f"{option}: {error.strerror}") from None


def free_memory_bytes() -> int:
    """Bytes that a process may still take: no more than a container has at all."""
    return min(int(psutil.virtual_memory().available), host_memory_bytes())


def host_memory_bytes() -> int:
    """Memory of the machine, or what a container leaves of it."""
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for path in _CGROUP_LIMITS:
        try:
            text = Path(path).read_text(encoding="ascii").strip()
        except OSError:
            continue
        if text.isdigit():
            memory_bytes = min(memory_bytes, int(text))
    return memory_bytes
