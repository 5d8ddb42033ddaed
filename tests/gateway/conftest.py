"""Where the tests of batches keep them."""

from pathlib import Path

import pytest


@pytest.fixture(params=["sqlite", "postgresql"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path | str:
    """Of a store of batches: an SQLite file, and the URL of an empty database."""
    if request.param == "sqlite":
        return tmp_path / "batches.sqlite"
    url: str = request.getfixturevalue("pg_url")
    from gateway import postgres_pool
    from gateway.batches import postgres_store

    for module, name in ((postgres_pool, "ANSWER_S"), (postgres_pool, "WAIT_S"), (postgres_store, "SOON_S")):
        monkeypatch.setattr(module, name, 30.0)  # on a machine that other tests share
    return url
