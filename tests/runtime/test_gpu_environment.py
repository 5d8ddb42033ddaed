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


def test_a_worker_among_many_gpus_and_hosts():
    found = gpu_variables({}, **PLAIN)  # type: ignore[arg-type]
    assert found["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0" and found["TORCH_NCCL_ENABLE_MONITORING"] == "0"
    assert found["TORCH_NCCL_NONBLOCKING_TIMEOUT"] == "10" and found["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"
    assert found["NCCL_SOCKET_IFNAME"] == "=eth1"
    assert not {"NCCL_HOSTID", "NCCL_IB_DISABLE"} & found.keys()
    assert "NCCL_SOCKET_IFNAME" not in gpu_variables({}, **PLAIN | {"interface": ""})  # type: ignore[arg-type]


def test_on_loopback_no_other_network_is_looked_for():
    found = gpu_variables({}, **PLAIN | {"interface": "lo"})  # type: ignore[arg-type]
    assert found["NCCL_SOCKET_IFNAME"] == "=lo" and found["NCCL_IB_DISABLE"] == "1"


def test_what_the_user_has_set_stays():
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
def test_which_gpu_a_process_uses(visible, expected):
    assert gpu_identity(visible, UUIDS) == expected


def test_gpus_are_numbered_by_their_pci_addresses(tmp_path: Path):
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


def test_processes_on_different_gpus_are_on_one_host_and_those_on_one_gpu_are_not(monkeypatch):
    """With an NCCL that compares host and GPU: two ranks with one host name must never have one GPU."""
    assert host_ids(monkeypatch, ["0", "1", "3"]) == ["", "", ""]
    assert host_ids(monkeypatch, ["3", "3", "GPU-3d00"]) == ["", "host-1", "host-2"]
    assert host_ids(monkeypatch, ["0", "0", "1", "1"]) == ["", "host-1", "", "host-1"]


def test_the_workers_of_our_own_deployment_use_nvlink(monkeypatch):
    """The launcher gives each worker its GPU by CUDA_VISIBLE_DEVICES; the last two share one."""
    processes = plans(HOST + 'workers = "2P2D"\ngpus = [0, 1, 3, 3]\n')["a"].processes
    visible = [one.environment["CUDA_VISIBLE_DEVICES"] for one in processes if one.role in ("prefill", "decode")]
    assert host_ids(monkeypatch, visible) == ["", "", "", "host-1"]


def test_a_number_on_a_gpu_is_held_by_one_process_and_goes_with_it(claims):
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
def test_the_interface_is_found_by_its_address(host, expected, monkeypatch):
    there = {"lo": ["127.0.0.1"], "eth10": ["10.0.0.4"], "eth1": ["10.0.0.5", "fe80::7%eth1"]}
    addresses = {name: [SimpleNamespace(address=one) for one in found] for name, found in there.items()}
    monkeypatch.setattr(gpu_environment.psutil, "net_if_addrs", lambda: addresses)  # type: ignore[attr-defined]
    assert interface_of(host) == expected


def test_a_host_that_has_no_address_has_no_interface(monkeypatch):
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "unknown")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    assert interface_of("nowhere.invalid") == ""
