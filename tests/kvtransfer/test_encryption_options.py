"""Which transports a worker may use, by its options: what may send KV to another host in the clear, and who is told."""

from types import SimpleNamespace

import pytest
import structlog
import torch

from kvtransfer.transports.registry import WrongTransport, allowed_on, usable
from runtime.settings.workers import WorkerSettings
from worker.process import say_what_is_encrypted


def _settings(**options: object) -> WorkerSettings:
    return WorkerSettings.model_validate({"role": "decode", "model": "m"} | options)


def test_keys_forbid_unencrypted_transports() -> None:
    """A worker with keys uses only encrypted or local transports unless an option allows another."""

    def transports(device: str = "cuda", **options: str) -> tuple[str, ...]:
        settings = _settings(**options)
        return allowed_on(settings.kv_transport, device, settings.confidential_transfers)

    assert transports(keys="/k") == ("cuda_ipc", "tcp") and transports("cpu", keys="/k") == ("shm", "tcp")
    assert transports() == transports(keys="/k", transfer_encryption="off") == ("cuda_ipc", "nccl", "tcp")
    assert transports(keys="/k", kv_transport="nccl") == ("nccl",)
    with pytest.raises(WrongTransport, match="--transfer-encryption on forbids"):
        transports(keys="/k", kv_transport="nccl", transfer_encryption="on")


def test_start_logs_unencrypted_transports() -> None:
    """The start logs which transports may send KV in the clear, and how to allow those left out."""

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


def test_refused_nccl_names_its_option() -> None:
    """A worker that may not use NCCL names the options that would allow it."""
    local = SimpleNamespace(rows=torch.zeros(1))
    _, why = usable(local, ("nccl", "tcp"), ("shm", "tcp"), same_host=False)  # type: ignore[arg-type]
    assert "nccl: not allowed here (with --keys, --kv-transport nccl or --transfer-encryption off allows it)" in why
