"""A Python with vLLM, in which programs of these tests run. `./scripts/test vllm` makes it."""

import os
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def vllm_python() -> str:
    python = os.environ.get("CROSSDOCK_ENGINE_PYTHON", str(ROOT / ".venv-vllm/bin/python"))
    if shutil.which(python) is None:
        pytest.skip("needs .venv-vllm, which ./scripts/test vllm makes")
    return python
