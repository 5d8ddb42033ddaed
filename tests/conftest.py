"""The tiers of the tests, which `scripts/test` runs one after the other."""

import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
from hypothesis import HealthCheck, settings

from tests.postgres_server import PostgresServer, postgres_server, query

if not torch.cuda.is_available():
    # Triton interprets kernels then; it must know before anything imports it.
    os.environ.setdefault("TRITON_INTERPRET", "1")

# How long an example takes is the machine's business.
settings.register_profile("crossdock", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("crossdock")

CLUSTER_FOLDERS = ("e2e",)
HERE = Path(__file__).parent


def pytest_configure() -> None:
    """A shell starts what runs in its background with SIGINT ignored, and children inherit that: no Ctrl-C would reach them."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _loggers_as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process's main part that a test runs here sets up the log for good; the next test must be able to capture it."""
    monkeypatch.setattr(structlog, "configure", partial(_configure_uncached, structlog.configure))
    yield
    structlog.reset_defaults()


@pytest.fixture(scope="module")
def pg_server() -> Iterator[PostgresServer]:
    with postgres_server() as running:
        yield running


@pytest.fixture
def pg_url(pg_server: PostgresServer) -> Iterator[str]:
    """An empty database."""
    yield pg_server.url
    query(pg_server.url, "DROP SCHEMA IF EXISTS crossdock CASCADE")


def _configure_uncached(configure: Callable[..., None], **options: Any) -> None:
    configure(**options | {"cache_logger_on_first_use": False})


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of whole clusters run one after the other; elsewhere, those of several processes are marked by hand."""
    for item in items:
        if item.path.is_relative_to(HERE) and item.path.relative_to(HERE).parts[0] in CLUSTER_FOLDERS:
            item.add_marker(pytest.mark.cluster)
