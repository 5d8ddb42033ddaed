"""How a process ends: its exit statuses, and what the two that another start cannot help are raised as."""

from typing import Final

from proto.errors import CrossdockError

USAGE_EXIT: Final = 2
"""A setting is missing, malformed or out of bounds: see `runtime.options.SettingsError`."""
BUG_EXIT: Final = 70
"""After an exception that nobody caught. As EX_SOFTWARE of sysexits.h."""
CONFIG_EXIT: Final = 78
"""The settings are well-formed, but cannot work on this machine or with this model. As EX_CONFIG of sysexits.h."""
HOPELESS_EXITS: Final = frozenset({USAGE_EXIT, CONFIG_EXIT})
"""The same process started again would end in the same way."""


class ConfigError(CrossdockError):
    """A setting cannot work here; `str()` is one line that begins with the option."""

    def __init__(self, text: str) -> None:
        super().__init__(" ".join(text.split()))
