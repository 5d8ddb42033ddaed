"""One cluster for the tests that only use it; those that hurt it make their own."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import tiny_models
from tests.e2e.live import Live, live

HERE = Path(__file__).parent


START_S = 400 if os.environ.get("CROSSDOCK_ENGINE", "own") == "own" else 900
"""Real processes that import torch, on a machine with other work, take their time; a test may start a cluster."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(START_S))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.make("llama", tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="session")
def cluster(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with live(tiny, tmp_path_factory.mktemp("state"), STEP_TOKENS="64") as up:
        yield up
