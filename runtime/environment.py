"""Environment variables that look like options and are none: said, since a slip in a name would go unnoticed."""

import difflib
from collections.abc import Iterable
from typing import Final

from runtime.setting_types import ENV_PREFIX, Options

SUPERVISED: Final = ENV_PREFIX + "SUPERVISED"
"""Set for processes whose launcher has looked at the environment already."""
NO_OPTIONS: Final = frozenset({ENV_PREFIX + "CONFIG", ENV_PREFIX + "PYTHON", SUPERVISED})
"""Variables of ours that are not options: the file with settings, the interpreter of the scripts."""
TEST_PREFIX: Final = ENV_PREFIX + "TEST_"


def known_names() -> set[str]:
    """Of every option of every command that this program has, whichever of them runs."""
    found: set[str] = set()
    classes: list[type[Options]] = [Options]
    while classes:
        cls = classes.pop()
        classes += cls.__subclasses__()
        found.update(ENV_PREFIX + name.upper() for name in cls.model_fields)
    return found


def notes(environment: Iterable[str], known: set[str]) -> list[str]:
    """A line for each of the names that is not known, with the nearest that is; none where the launcher has said them."""
    present = {name.upper(): name for name in environment}
    if SUPERVISED in present:
        return []
    short = {name.removeprefix(ENV_PREFIX): name for name in known | NO_OPTIONS - {SUPERVISED}}
    lines = []
    for upper, name in sorted(present.items()):
        if not upper.startswith(ENV_PREFIX) or upper.startswith(TEST_PREFIX) or upper in known | NO_OPTIONS:
            continue
        near = difflib.get_close_matches(upper.removeprefix(ENV_PREFIX), short, n=1)
        guess = f"; did you mean {short[near[0]]}?" if near else ""
        lines.append(f"note: {name} in the environment is no option, and is ignored{guess}")
    return lines
