"""The transports, and the choice of those that two peers can use. Best first."""

import os
from dataclasses import replace
from pathlib import Path

import xxhash

from kvtransfer.memory.cuda import DeviceMemory
from kvtransfer.session.limits import allowed_transports
from kvtransfer.transports.cuda_ipc import CudaIpc
from kvtransfer.transports.nccl import Nccl
from kvtransfer.transports.shm import Shm
from kvtransfer.transports.tcp.transport import Tcp
from kvtransfer.transports.transport import Channel, Listener, LocalEnd, PairBroken, PoolMemory, Rendezvous, Transport
from proto.errors import BadOption

TRANSPORTS: dict[str, Transport] = {transport.name: transport for transport in (Shm(), CudaIpc(), Nccl(), Tcp())}


def host_id() -> str:
    """Equal for two processes only if they run on one host, for one user, and can reach each other by Unix sockets: boot id,
    network and user namespace, user id. Equality is a hint; meeting is the test."""
    parts = [Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip(), str(os.getuid())]
    parts += [os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "user")]
    return xxhash.xxh3_128_hexdigest("|".join(parts).encode())


def memory_for(names: tuple[str, ...], device: str) -> PoolMemory | None:
    """Memory for the pool of a receiver that may use these transports; None: no other process need map it."""
    return DeviceMemory(device) if device != "cpu" and "cuda_ipc" in names else None


def suited(names: tuple[str, ...], device: str) -> tuple[str, ...]:
    """The transports that can send from, and receive into, a pool on a device of this type."""
    return tuple(name for name in names if device in TRANSPORTS[name].devices)


def within_process(names: tuple[str, ...]) -> tuple[str, ...]:
    """The transports whose pairs may have both ends in one process."""
    return tuple(name for name in names if TRANSPORTS[name].within_process)


def allowed_on(option: str, device: str, confidential: bool = False) -> tuple[str, ...]:
    """The transports that `--kv-transport` stands for in a worker whose KV is on a device of this type; with `confidential`,
    only those that never send KV to another host in the clear. Raises `WrongTransport`."""
    found = suited(allowed_transports(option), device)
    if not found:
        there = " or ".join(suited(tuple(TRANSPORTS), device))
        raise WrongTransport(f"{option} cannot be used with KV on {device}; there are {there}")
    if confidential and not (found := tuple(name for name in found if TRANSPORTS[name].confidential)):
        raise WrongTransport(f"{option} sends KV in the clear, which --transfer-encryption on forbids")
    return found


class WrongTransport(BadOption):
    """Before anything is allocated."""

    option = "--kv-transport"


def usable(
    local: LocalEnd, offered: tuple[str, ...], allowed: tuple[str, ...], same_host: bool
) -> tuple[list[str], str]:
    """The offered transports that the receiver can use, in the sender's order; and what speaks against others."""
    found, against = [], []
    for name in offered:
        transport = TRANSPORTS.get(name)
        why = "not known here" if transport is None else "" if name in allowed else "not allowed here"
        if transport is not None and why and not transport.confidential:
            why += f" (with --keys, --kv-transport {name} or --transfer-encryption off allows it)"
        if transport is not None and not why and local.rows.device.type not in transport.devices:
            why = f"the receiver's KV is on {local.rows.device.type}"
        elif transport is not None and not why:
            why = transport.unusable(local, same_host)
        if why:
            against.append(f"{name}: {why}")
        else:
            found.append(name)
    return found, "; ".join(against)


def listen(local: LocalEnd, names: tuple[str, ...], why: str) -> Listener:
    """Listen by the first of these that can. Raises what the last one raises."""
    assert names
    for name in names[:-1]:
        try:
            return _because(TRANSPORTS[name].listen(local), why)
        except (OSError, RuntimeError, PairBroken) as error:
            why = "; ".join(filter(None, (why, f"{name}: {error}")))
    return _because(TRANSPORTS[names[-1]].listen(local), why)


def connect(local: LocalEnd, meeting: Rendezvous) -> Channel:
    return TRANSPORTS[meeting.transport].connect(local, meeting)


def _because(listener: Listener, why: str) -> Listener:
    listener.meeting = replace(listener.meeting, why=why[:400])
    return listener
