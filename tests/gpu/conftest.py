"""Everything here needs one NVIDIA GPU, and is skipped without."""

import pytest
import torch

from runtime.settings import gpu_environment
from tests.kvtransfer import ends

HAS_GPU = torch.cuda.is_available()
if HAS_GPU:
    gpu_environment.prepare("127.0.0.1", 30_000)  # before NCCL is loaded; the launcher does so for workers


def pytest_collection_modifyitems(items):
    for item in items:
        if "tests/gpu" in item.path.as_posix():
            item.add_marker(pytest.mark.skipif(not HAS_GPU, reason="torch sees no NVIDIA GPU"))


@pytest.fixture(params=ends.ON_GPU)
def transport(request, monkeypatch):
    """Runs a test once for each transport between GPUs."""
    monkeypatch.setattr(ends, "TRANSPORT", request.param)
    return request.param
