"""What NCCL and torch are told before they start."""

import pytest

from runtime.gpu_environment import gpu_variables, usable_gpus

PLAIN = {"transfer_host": "10.0.0.5", "timeout_ms": 10_000, "gpus": 8, "nccl": (2, 28), "process": "boot-17"}


def test_a_worker_among_many_gpus_and_hosts():
    found = gpu_variables({}, **PLAIN)
    assert found["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0" and found["TORCH_NCCL_ENABLE_MONITORING"] == "0"
    assert found["TORCH_NCCL_NONBLOCKING_TIMEOUT"] == "10" and found["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"
    assert not {"NCCL_HOSTID", "NCCL_SOCKET_IFNAME", "NCCL_IB_DISABLE"} & found.keys()


@pytest.mark.parametrize(("nccl", "renamed"), [((2, 28), True), ((0, 0), True), ((2, 30), False), ((3, 0), False)])
def test_two_workers_on_the_one_gpu_of_a_machine(nccl, renamed):
    found = gpu_variables({}, **PLAIN | {"gpus": 1, "nccl": nccl})
    assert (found.get("NCCL_HOSTID") == "boot-17") is renamed


def test_on_loopback_no_other_network_is_looked_for():
    found = gpu_variables({}, **PLAIN | {"transfer_host": "127.0.0.1"})
    assert found["NCCL_SOCKET_IFNAME"] == "lo" and found["NCCL_IB_DISABLE"] == "1"


def test_what_the_user_has_set_stays():
    present = {"NCCL_SOCKET_IFNAME": "eth1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"}
    found = gpu_variables(present, **PLAIN | {"transfer_host": "127.0.0.1", "timeout_ms": 100})
    assert not present.keys() & found.keys() and found["TORCH_NCCL_NONBLOCKING_TIMEOUT"] == "1"


def test_gpus_hidden_from_a_process_do_not_count():
    assert usable_gpus("") == 0
    assert usable_gpus("0") <= 1
