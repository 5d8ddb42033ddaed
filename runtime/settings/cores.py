"""CPU cores as people write them: 0-2,5."""

import re

_CORES = re.compile(r"^\d{1,5}(-\d{1,5})?(,\d{1,5}(-\d{1,5})?)*\Z")


def parse_cores(text: str) -> tuple[int, ...]:
    """`"0-2,5"` → `(0, 1, 2, 5)`; empty → `()`. Raises `ValueError` on anything else."""
    if not text:
        return ()
    if not _CORES.match(text):
        raise ValueError("is not a list of cores like 0-2,5")
    cores: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        if int(last or first) < int(first):
            raise ValueError(f"has a range that runs backwards: {part}")
        cores.update(range(int(first), int(last or first) + 1))
    return tuple(sorted(cores))


def cores_text(cores: tuple[int, ...]) -> str:
    """`(0, 1, 2, 5)` → `"0-2,5"`."""
    parts: list[list[int]] = []
    for core in sorted(cores):
        if parts and parts[-1][1] == core - 1:
            parts[-1][1] = core
        else:
            parts.append([core, core])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)
