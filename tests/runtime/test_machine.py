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


def test_transfers_are_encrypted_with_keys_and_never_by_a_key_in_the_clear() -> None:
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


def test_cores_that_are_not_there_are_named_and_the_affinity_stays() -> None:
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
def test_device_and_memory(has_gpu: bool, device: str, kv_gib: float, refused_with: str, refused_without: str) -> None:
    settings, expected = _settings(device=device, kv_gib=kv_gib), refused_with if has_gpu else refused_without
    if not expected:
        machine.prepare(settings)
        return
    with pytest.raises(ConfigError) as caught:
        machine.prepare(settings)
    assert str(caught.value).startswith(expected)


def test_the_memory_of_this_machine_is_more_than_nothing() -> None:
    assert machine.host_memory_bytes() >= 1 << 26


def test_an_address_in_use_may_become_free_one_of_another_machine_will_not() -> None:
    machine.check_listening("--bind", OSError(errno.EADDRINUSE, "in use"))
    machine.check_listening("--host", socket.gaierror(socket.EAI_AGAIN, "try again"))
    with pytest.raises(ConfigError, match="--bind: cannot assign"):
        machine.check_listening("--bind", OSError(errno.EADDRNOTAVAIL, "cannot assign"))


def test_a_refusal_is_one_line() -> None:
    assert str(ConfigError("--model: a\n  b")) == "--model: a b"


def test_the_interface_for_kv_is_told_to_the_libraries_and_its_address_is_listened_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "before")
    assert machine.prepare(_settings(device="cpu")).transfer_host == "127.0.0.1"
    assert os.environ["NCCL_SOCKET_IFNAME"] == "before", "nothing was asked for"
    assert machine.prepare(_settings(device="cpu", kv_interface="lo")).transfer_host == "127.0.0.1"
    assert os.environ["NCCL_SOCKET_IFNAME"] == "=lo", "a bare name would allow every interface that begins so"
    with pytest.raises(ConfigError, match=r"--kv-interface: there is no absent0 here, but .*lo"):
        machine.prepare(_settings(kv_interface="absent0"))
    with pytest.raises(ConfigError, match=r"--transfer-host: 10.1.2.3 is not an address of lo"):
        machine.prepare(_settings(kv_interface="lo", transfer_host="10.1.2.3"))


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
def test_what_is_advertised_takes_the_bound_port_where_it_names_none(asked: str, told: str) -> None:
    settings = _settings(kv_bind="tcp://0.0.0.0:0", advertise=asked or "127.0.0.1:1")
    assert advertised(settings.advertise if asked else "", "tcp://0.0.0.0:77") == told


@pytest.mark.parametrize("asked", ["tcp://", "*", "0.0.0.0:5", "10.0.0.5:70000", "a b", "http://x"])
def test_what_nobody_can_connect_to_is_not_advertised(asked: str) -> None:
    with pytest.raises(ValueError, match="advertise"):
        _settings(advertise=asked)
