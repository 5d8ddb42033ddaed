"""What NCCL and torch are told before they start."""

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from runtime.settings import gpu_environment
from runtime.settings.gpu_environment import (
    claim_ordinal,
    gpu_identity,
    gpu_variables,
    gpus_here,
    host_id_of,
    interface_of,
)
from tests.launcher.test_cluster_file import HOST, plans

ROOT = Path(__file__).parents[2]
PLAIN = {"interface": "eth1", "timeout_ms": 10_000, "host_id": ""}
UUIDS = ["GPU-1a00", "GPU-1b00", "GPU-2c00", "GPU-3d00"]


@pytest.fixture
def claims(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, tuple[int, socket.socket]]]:
    made: dict[str, tuple[int, socket.socket]] = {}
    monkeypatch.setattr(gpu_environment, "_claims", made)
    yield made
    for _, claim in made.values():
        claim.close()


def test_worker_gets_nccl_variables():
    """A worker gets the NCCL variables for many GPUs and hosts, and its interface if one is known."""
    found = gpu_variables({}, **PLAIN)  # type: ignore[arg-type]
    assert found["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0" and found["TORCH_NCCL_ENABLE_MONITORING"] == "0"
    assert found["TORCH_NCCL_NONBLOCKING_TIMEOUT"] == "10" and found["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"
    assert found["NCCL_SOCKET_IFNAME"] == "=eth1"
    assert not {"NCCL_HOSTID", "NCCL_IB_DISABLE"} & found.keys()
    assert "NCCL_SOCKET_IFNAME" not in gpu_variables({}, **PLAIN | {"interface": ""})  # type: ignore[arg-type]


def test_loopback_disables_other_networks():
    """NCCL uses the loopback interface alone and no InfiniBand if the worker is on loopback."""
    found = gpu_variables({}, **PLAIN | {"interface": "lo"})  # type: ignore[arg-type]
    assert found["NCCL_SOCKET_IFNAME"] == "=lo" and found["NCCL_IB_DISABLE"] == "1"


def test_user_variables_are_kept():
    """NCCL variables that the user has set are kept."""
    present = {"NCCL_SOCKET_IFNAME": "eth1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3", "NCCL_HOSTID": "mine"}
    found = gpu_variables(present, **PLAIN | {"host_id": "h-1", "timeout_ms": 100})  # type: ignore[arg-type]
    assert not present.keys() & found.keys() and found["TORCH_NCCL_NONBLOCKING_TIMEOUT"] == "1"


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, "GPU-1a00"),
        ("", ""),
        ("-1", ""),
        ("3", "GPU-3d00"),
        ("2,0", "GPU-2c00"),
        ("GPU-2c00", "GPU-2c00"),
        ("gpu-2c", "GPU-2c00"),
        ("GPU-1", "gpu-1"),
        ("7", "number-7"),
        ("MIG-5f", "MIG"),
    ],
)
def test_gpu_identity_follows_visible_devices(visible, expected):
    """The GPU of a process is identified from CUDA_VISIBLE_DEVICES."""
    assert gpu_identity(visible, UUIDS) == expected


def test_gpus_are_ordered_by_pci_address(tmp_path: Path):
    """GPUs are listed in the order of their PCI addresses."""
    for bus, uuid in (("0000:81:00.0", "GPU-b"), ("0000:01:00.0", "GPU-a")):
        (tmp_path / bus).mkdir()
        (tmp_path / bus / "information").write_text(f"Model: \t\t H200\nGPU UUID: \t {uuid}\nDevice Minor: 0\n")
    assert gpus_here(tmp_path) == ["GPU-a", "GPU-b"]
    assert gpus_here(tmp_path / "absent") == []


def host_ids(monkeypatch: pytest.MonkeyPatch, visible: list[str]) -> list[str]:
    """Of processes that start one after the other with these CUDA_VISIBLE_DEVICES."""
    found = []
    held = []
    for each in visible:
        monkeypatch.setattr(gpu_environment, "_claims", {})
        found.append(host_id_of("host", claim_ordinal("test-" + gpu_identity(each, UUIDS))))
        held.append(gpu_environment._claims)
    for claims in held:
        for _, claim in claims.values():
            claim.close()
    return found


def test_gpu_sharers_get_own_host_ids(monkeypatch):
    """With an NCCL that compares host and GPU: two ranks with one host name must never have one GPU."""
    assert host_ids(monkeypatch, ["0", "1", "3"]) == ["", "", ""]
    assert host_ids(monkeypatch, ["3", "3", "GPU-3d00"]) == ["", "host-1", "host-2"]
    assert host_ids(monkeypatch, ["0", "0", "1", "1"]) == ["", "host-1", "", "host-1"]


def test_launched_workers_use_nvlink(monkeypatch):
    """The launcher gives each worker its GPU by CUDA_VISIBLE_DEVICES; the last two share one."""
    processes = plans(HOST + 'workers = "2P2D"\ngpus = [0, 1, 3, 3]\n')["a"].processes
    visible = [one.environment["CUDA_VISIBLE_DEVICES"] for one in processes if one.role in ("prefill", "decode")]
    assert host_ids(monkeypatch, visible) == ["", "", "", "host-1"]


def test_gpu_ordinal_belongs_to_one_process(claims):
    """An ordinal on a GPU is held by one process and is free again when that process ends."""
    child = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "from runtime.settings.gpu_environment import claim_ordinal\nprint(claim_ordinal('test-gpu'), flush=True)\ninput()",
        ],
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert child.stdin is not None and child.stdout is not None
    assert child.stdout.readline() == "0\n"
    assert claim_ordinal("test-gpu") == 1 == claim_ordinal("test-gpu")
    assert claim_ordinal("test-other") == 0
    child.kill()
    child.communicate(timeout=30)
    claims.pop("test-gpu")[1].close()
    assert claim_ordinal("test-gpu") == 0


@pytest.mark.parametrize(
    ("host", "expected"), [("10.0.0.5", "eth1"), ("fe80::7", "eth1"), ("127.0.0.1", "lo"), ("10.0.0.6", "")]
)
def test_interface_is_found_by_address(host, expected, monkeypatch):
    """The network interface is found by the address of the host."""
    there = {"lo": ["127.0.0.1"], "eth10": ["10.0.0.4"], "eth1": ["10.0.0.5", "fe80::7%eth1"]}
    addresses = {name: [SimpleNamespace(address=one) for one in found] for name, found in there.items()}
    monkeypatch.setattr(gpu_environment.psutil, "net_if_addrs", lambda: addresses)  # type: ignore[attr-defined]
    assert interface_of(host) == expected


def test_unknown_host_has_no_interface(monkeypatch):
    """A host name that cannot be resolved has no interface."""

    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "unknown")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    assert interface_of("nowhere.invalid") == ""
