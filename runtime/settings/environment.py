"""Reports environment variables that look like options but are not, since a typo in a name would otherwise go unnoticed.

Kubernetes sets some by itself: for a Service named `crossdock`, `CROSSDOCK_PORT=tcp://10.0.0.1:8000` and more in every
container of the namespace whose pod does not have `enableServiceLinks: false`. They are ignored.
"""

import difflib
import re
from collections.abc import Mapping
from typing import Final

from runtime.settings.types import ENV_PREFIX, Options

SUPERVISED: Final = ENV_PREFIX + "SUPERVISED"  # set for processes whose launcher has checked the environment already
NO_OPTIONS: Final = frozenset({ENV_PREFIX + "CONFIG", ENV_PREFIX + "PYTHON", SUPERVISED})
"""Variables of ours that are not options: the file with settings, the interpreter of the scripts."""
TEST_PREFIX: Final = ENV_PREFIX + "TEST_"
_LINK: Final = re.compile(r"(tcp|udp|sctp)://([^\s/:\[\]]+|\[[^\s\]]+\]):\d{1,5}", re.IGNORECASE)
_LINK_NAME: Final = re.compile(
    rf"{ENV_PREFIX}(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)


def known_names() -> set[str]:
    """Names of every option of every command that this program has, whichever of them runs."""
    found: set[str] = set()
    classes: list[type[Options]] = [Options]
    while classes:
        cls = classes.pop()
        classes += cls.__subclasses__()
        found.update(ENV_PREFIX + name.upper() for name in cls.model_fields)
    return found


def is_service_link(name: str, value: object) -> bool:
    """Returns whether Kubernetes has set this variable for a Service, although an option has the same name. Its value is a
    URL, and no option for a port has such a value."""
    return name.upper().endswith("_PORT") and isinstance(value, str) and _LINK.fullmatch(value) is not None


def notes(environment: Mapping[str, str], known: set[str]) -> list[str]:
    """A line for each of the names that is not known, with the nearest that is, and one for what Kubernetes has set; none where
    the launcher has said them."""
    present = {name.upper(): name for name in environment}
    if SUPERVISED in present:
        return []
    short = {name.removeprefix(ENV_PREFIX): name for name in known | NO_OPTIONS - {SUPERVISED}}
    links = {
        upper
        for upper, name in present.items()
        if upper.startswith(ENV_PREFIX)
        and (is_service_link(upper, environment[name]) or (upper not in known and _LINK_NAME.fullmatch(upper)))
    }
    lines = [_of_links(sorted(links))] if links else []
    for upper, name in sorted(present.items()):
        if not upper.startswith(ENV_PREFIX) or upper.startswith(TEST_PREFIX) or upper in known | NO_OPTIONS | links:
            continue
        near = difflib.get_close_matches(upper.removeprefix(ENV_PREFIX), short, n=1)
        guess = f"; did you mean {short[near[0]]}?" if near else ""
        lines.append(f"note: {name} in the environment is no option, and is ignored{guess}")
    return lines


def _of_links(names: list[str]) -> str:
    return (
        f"note: {', '.join(names)} in the environment: as Kubernetes sets for a Service, and ignored;"
        " enableServiceLinks: false in the pod's spec keeps them out"
    )
