"""Where the tests of batches keep them."""

from pathlib import Path

import pytest


@pytest.fixture(params=["sqlite", "postgresql"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Path | str:
    """Of a store of batches: an SQLite file, and the URL of an empty database."""
    return tmp_path / "batches.sqlite" if request.param == "sqlite" else str(request.getfixturevalue("pg_url"))
