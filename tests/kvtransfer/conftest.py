"""What the tests of transfers share."""

import pytest

from tests.kvtransfer import ends


@pytest.fixture(params=["gloo", "shm", "tcp", "tcp-plain"])
def transport(request, monkeypatch):
    """Runs a test once for each transport that this machine has; `Ends` uses it where the settings do not say."""
    monkeypatch.setattr(ends, "TRANSPORT", request.param)
    return request.param
