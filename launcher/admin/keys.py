"""`crossdock keys new`: the keys with which the processes of a cluster know each other."""

from pathlib import Path

from pydantic import Field
from rich.console import Console

from runtime.link.keys import ROLES, KeysError, make
from runtime.settings.options import SettingsError
from runtime.settings.types import CommaList, Options


class NewKeysSettings(Options):
    """Make a pair of keys for each role, in a folder that only you can read.

    Every process is given the folder with --keys. It needs all NAME.key, which are public, and of NAME.key_secret only its own:
    take the others away where you copy the folder to a host. `client` is for crossdock status.
    """

    folder: str = Field(
        min_length=1,
        description="Folder to make; files in it are not overwritten.",
        json_schema_extra={"argument": "DIR"},
    )
    names: CommaList = Field(
        default_factory=lambda: list(ROLES),
        description="Roles, separated by commas; a role may have several keys, as decode-b beside decode, for rotating one"
        " or for keeping hosts apart.",
    )


def run(settings: NewKeysSettings) -> int:
    """Raises `SettingsError`."""
    folder = Path(settings.folder).expanduser()
    try:
        written = make(folder, settings.names)
    except KeysError as error:
        raise SettingsError(f"DIR: {error}") from None
    console = Console(soft_wrap=True, highlight=False)
    console.print(f"Wrote to {folder}:", markup=False)
    for name in written:
        console.print(f"    {name}", markup=False)
    console.print("Give every process --keys with this folder; on each host only its own roles' .key_secret files.")
    return 0
