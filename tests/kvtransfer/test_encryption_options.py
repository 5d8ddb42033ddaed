"""Which transports a worker may use, by its options: what may send KV to another host in the clear, and who is told."""

from types import SimpleNamespace

import pytest
import structlog
import torch

from kvtransfer.transports.registry import WrongTransport, allowed_on, usable
from launcher.worker_roles import say_what_is_encrypted
from runtime.settings.workers import WorkerSettings


def _settings(**options: object) -> WorkerSettings:
    return WorkerSettings.model_validate({"role": "decode", "model": "m"} | options)


def test_with_keys_nothing_crosses_in_the_clear_unless_it_is_asked_for_by_name() -> None:
    def transports(device: str = "cuda", **options: str) -> tuple[str, ...]:
        settings = _settings(**options)
        return allowed_on(settings.kv_transport, device, settings.confidential_transfers)

    assert transports(keys="/k") == ("cuda_ipc", "tcp") and transports("cpu", keys="/k") == ("shm", "tcp")
    assert transports() == transports(keys="/k", transfer_encryption="off") == ("cuda_ipc", "nccl", "tcp")
    assert transports(keys="/k", kv_transport="nccl") == ("nccl",)
    with pytest.raises(WrongTransport, match="--transfer-encryption on forbids"):
        transports(keys="/k", kv_transport="nccl", transfer_encryption="on")


def test_the_start_says_what_may_cross_in_the_clear() -> None:
    def said(device: str = "cuda", **options: str) -> list[tuple[str, object]]:
        settings = _settings(**options)
        allowed = allowed_on(settings.kv_transport, device, settings.confidential_transfers)
        with structlog.testing.capture_logs() as lines:
            say_what_is_encrypted(settings, allowed, device, structlog.get_logger())
        return [(line["log_level"], line.get("transports") or line["to_use_them"]) for line in lines]

    assert said() == [] and said("cpu", keys="/k") == []
    assert said(keys="/k") == [("info", "--kv-transport nccl or --transfer-encryption off")]
    assert said(keys="/k", kv_transport="nccl") == [("warning", ["nccl"])]
    assert said(keys="/k", transfer_encryption="off") == [("warning", ["nccl", "tcp"])]
    assert said("cpu", keys="/k", transfer_encryption="off") == [("warning", ["tcp"])]


def test_a_worker_that_is_proposed_nccl_and_may_not_use_it_names_the_option() -> None:
    local = SimpleNamespace(rows=torch.zeros(1))
    _, why = usable(local, ("nccl", "tcp"), ("shm", "tcp"), same_host=False)  # type: ignore[arg-type]
    assert "nccl: not allowed here (with --keys, --kv-transport nccl or --transfer-encryption off allows it)" in why
