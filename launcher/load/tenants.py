"""The senders: tenants with their keys and shares, priorities, and ratios of workers, parsed from what a user writes."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

TENANTS_MAX = 1000
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}(/[A-Za-z0-9_.-]{1,64})?")
_RATIO = re.compile(r"(?:([1-9]\d?)P([1-9]\d?)D)?(\+(?=\d))?(?:([1-9]\d?)M)?", re.IGNORECASE)


@dataclass(frozen=True)
class LoadTenant:
    """`share`: of the load. `weight`: the server's, for fairness. `abuse`: additional load, as a multiple of the whole
    load."""

    name: str
    key: str = ""
    share: float = 1.0
    weight: float = 1.0
    priority: str = ""
    abuse: float = 0.0


@dataclass(frozen=True)
class Ratio:
    """`mixed` workers do both phases."""

    prefill: int
    decode: int
    mixed: int = 0

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises `ValueError`."""
        found = _RATIO.fullmatch(text)
        counts = [int(count or 0) for count in found.group(1, 2, 4)] if found else []
        if (
            found is None
            or not any(counts)
            or max(counts) > 64
            or bool(found[3]) != (bool(found[1]) and bool(found[4]))
        ):
            raise ValueError(f"has {text!r}, which is not a ratio like 2P1D, 3M or 1P1D+1M, of at most 64 each")
        return cls(*counts)

    @property
    def total(self) -> int:
        return self.prefill + self.decode + self.mixed

    def __str__(self) -> str:
        parts = [f"{self.prefill}P{self.decode}D"] if self.prefill or self.decode else []
        return "+".join(parts + ([f"{self.mixed}M"] if self.mixed else []))


def _number(text: str, what: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 < value <= 1e6:
        raise ValueError(f"has {what} {text!r}, which is not a number over 0, up to 1e6")
    return value


def _name(text: str) -> str:
    if not _NAME.fullmatch(text):
        raise ValueError(f"has {text!r}, which is no name of a tenant")
    return text


def parse_tenants(texts: Sequence[str]) -> list[LoadTenant]:
    """Parses texts like `NAME:KEY:SHARE[:WEIGHT[:PRIORITY]]`. Raises `ValueError`, which never contains a key."""
    found: list[LoadTenant] = []
    for text in texts:
        parts = text.split(":")
        if not 3 <= len(parts) <= 5:
            raise ValueError("must be NAME:KEY:SHARE[:WEIGHT[:PRIORITY]]")
        name, key, share, weight, priority = parts + ["1", ""][len(parts) - 3 :]
        found.append(LoadTenant(_name(name), key, _number(share, "share"), _number(weight or "1", "weight"), priority))
    if len({tenant.name for tenant in found}) != len(found) or len(found) > TENANTS_MAX:
        raise ValueError(f"names a tenant twice, or more than {TENANTS_MAX}")
    return found


def parse_abuser(text: str) -> LoadTenant:
    """`NAME:KEY:FACTOR`. Raises `ValueError`."""
    parts = text.split(":")
    if len(parts) != 3:
        raise ValueError("must be NAME:KEY:FACTOR")
    return LoadTenant(_name(parts[0]), parts[1], share=0.0, abuse=_number(parts[2], "factor"))
