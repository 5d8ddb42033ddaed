"""`--database` takes no password, and takes the place of other options."""

import pytest

from runtime.settings.options import SettingsError, checked
from runtime.settings.roles import CoordinatorSettings, GatewaySettings


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"database": "postgresql://u:secret@h/d"}, "--database: has a password"),
        ({"database": "postgresql://u@h/d?password=secret"}, "--database: has a password"),
        ({"database": "mysql://u:secret@h/d"}, "--database: is not a URL like postgresql://"),
        ({"database": "postgresql://u@h/d", "usage_db": "f"}, "--database: takes the place of --usage-db"),
        ({"database": "postgresql://u@h/d", "standby": "true"}, "--database: takes the place of --usage-db"),
    ],
)
def test_bad_database_option_is_refused(options: dict[str, str], why: str) -> None:
    """A database with a password in its URL, or beside a file, is refused, and the password is not shown."""
    with pytest.raises(SettingsError) as refused:
        checked(CoordinatorSettings, options)
    assert why in str(refused.value) and "secret" not in str(refused.value)


def test_gateway_refuses_bad_database() -> None:
    """A gateway refuses a password in the URL as a coordinator does, and takes the same URL beside its other options."""
    with pytest.raises(SettingsError) as refused:
        checked(GatewaySettings, {"model": "m", "database": "postgresql://u:secret@h/d"})
    assert "--database: has a password" in str(refused.value) and "secret" not in str(refused.value)
    assert checked(GatewaySettings, {"model": "m", "database": "postgresql://u@h/d"}).database


def test_gateway_keeps_batches_in_one_place() -> None:
    """A gateway with a database refuses a file of batches, and may switch batches off."""
    options = {"model": "m", "database": "postgresql://u@h/d"}
    with pytest.raises(SettingsError, match="--database: takes the place of --batch-db"):
        checked(GatewaySettings, {**options, "batch_db": "f"})
    assert checked(GatewaySettings, {**options, "batch_db": "off"}).database
