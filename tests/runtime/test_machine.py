"""What a machine cannot give is refused by the option's name, and asking changes nothing."""

import errno
import os
import socket

import pytest

from runtime.process.exits import ConfigError
from runtime.settings import machine
from runtime.settings.addresses import advertised
from runtime.settings.cores import cores_text
from runtime.settings.workers import WorkerSettings

GPU_BYTES, HOST_BYTES = 8 << 30, 4 << 30


def _settings(**options: object) -> WorkerSettings:
    return WorkerSettings.model_validate({"role": "decode", "model": "m", "kv_gib": 1.0} | options)


def test_transfers_are_encrypted_with_keys() -> None:
    """Transfers are encrypted if there are keys, unless switched off; encryption without keys is refused."""
    assert not _settings().encrypts_transfers
    assert _settings(keys="/k").encrypts_transfers
    assert not _settings(keys="/k", transfer_encryption="off").encrypts_transfers
    assert _settings(keys="/k", transfer_encryption="on").encrypts_transfers
    with pytest.raises(ValueError, match="--transfer-encryption: on needs --keys"):
        _settings(transfer_encryption="on")


@pytest.fixture
def has_gpu(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> bool:
    monkeypatch.setattr(machine, "gpu_memory_bytes", lambda: GPU_BYTES if request.param else 0)
    monkeypatch.setattr(machine, "host_memory_bytes", lambda: HOST_BYTES)
    return bool(request.param)


def test_missing_cores_are_refused() -> None:
    """Cores that are not there are named, and the affinity stays as it was."""
    before = os.sched_getaffinity(0)
    with pytest.raises(ConfigError, match=r"^--cpu-cores: 8000-8001 cannot be used"):
        machine.check_cores(_settings(cpu_cores=f"{min(before)},8000-8001"))
    with pytest.raises(ConfigError, match=r"^--cpu-cores: 8000 "):
        machine.check_cores(_settings(cpu_cores="8000"))
    machine.check_cores(_settings(cpu_cores=cores_text(tuple(before))))
    machine.check_cores(_settings())
    assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize("has_gpu", [True, False], indirect=True)
@pytest.mark.parametrize(
    ("device", "kv_gib", "refused_with", "refused_without"),
    [
        ("auto", 1.0, "", ""),
        ("auto", 6.0, "", "--kv-gib: 6 GiB is over the memory of this machine, 4.0 GiB"),
        ("auto", 9.0, "--kv-gib: 9 GiB is over the memory of the GPU, 8.0 GiB", "--kv-gib: 9 GiB is over"),
        ("cpu", 1.0, "", ""),
        ("cpu", 6.0, "--kv-gib: 6 GiB is over the memory of this machine", "--kv-gib: 6 GiB is over"),
        ("cuda", 6.0, "", "--device: cuda cannot be used here"),
    ],
)
def test_device_and_memory_are_checked(
    has_gpu: bool, device: str, kv_gib: float, refused_with: str, refused_without: str
) -> None:
    """A device that is not there, or a KV pool larger than its memory, is refused."""
    settings, expected = _settings(device=device, kv_gib=kv_gib), refused_with if has_gpu else refused_without
    if not expected:
        machine.prepare(settings)
        return
    with pytest.raises(ConfigError) as caught:
        machine.prepare(settings)
    assert str(caught.value).startswith(expected)


def test_host_memory_is_found() -> None:
    """The memory of this machine is found to be at least 64 MiB."""
    assert machine.host_memory_bytes() >= 1 << 26


def test_foreign_address_is_refused() -> None:
    """An address of another machine is refused for good, but one in use may become free."""
    machine.check_listening("--bind", OSError(errno.EADDRINUSE, "in use"))
    machine.check_listening("--host", socket.gaierror(socket.EAI_AGAIN, "try again"))
    with pytest.raises(ConfigError, match="--bind: cannot assign"):
        machine.check_listening("--bind", OSError(errno.EADDRNOTAVAIL, "cannot assign"))


def test_refusal_is_one_line() -> None:
    """The text of a refusal is joined into one line."""
    assert str(ConfigError("--model: a\n  b")) == "--model: a b"


def test_kv_interface_is_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interface for KV is told to NCCL, and the worker listens for transfers on its address."""
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "before")
    assert machine.prepare(_settings(device="cpu")).transfer_host == "127.0.0.1"
    assert os.environ["NCCL_SOCKET_IFNAME"] == "before", "nothing was asked for"
    assert machine.prepare(_settings(device="cpu", transfer_host="lo")).transfer_host == "127.0.0.1"
    assert os.environ["NCCL_SOCKET_IFNAME"] == "=lo", "a bare name would allow every interface that begins so"
    with pytest.raises(ConfigError, match=r"--transfer-host: there is no absent0 here, but .*lo"):
        machine.prepare(_settings(transfer_host="absent0"))


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ("", "tcp://0.0.0.0:77"),
        ("10.0.0.5", "tcp://10.0.0.5:77"),
        ("tcp://10.0.0.5", "tcp://10.0.0.5:77"),
        ("tcp://[fd00::5]", "tcp://[fd00::5]:77"),
        ("node-5:88", "tcp://node-5:88"),
        ("tcp://[fd00::5]:88", "tcp://[fd00::5]:88"),
    ],
)
def test_advertised_address_takes_bound_port(asked: str, told: str) -> None:
    """An advertised address without a port takes the bound port."""
    settings = _settings(kv_bind="tcp://0.0.0.0:0", advertise=asked or "127.0.0.1:1")
    assert advertised(settings.advertise if asked else "", "tcp://0.0.0.0:77") == told


@pytest.mark.parametrize("asked", ["tcp://", "*", "0.0.0.0:5", "10.0.0.5:70000", "a b", "http://x"])
def test_unreachable_address_is_not_advertised(asked: str) -> None:
    """An address to which no peer can connect is refused as the advertised one."""
    with pytest.raises(ValueError, match="advertise"):
        _settings(advertise=asked)
