"""Priority bands: weighted, each with a share it never falls below; none is strict."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Band:
    weight: float = 1.0
    floor_share: float = 0.0
    """Of all service, while every band has work; more when some have none."""
    ttft_s: float = 2.0
    """A request without a deadline of its own is due so long after its arrival …"""
    ttft_s_per_chunk: float = 2.0
    """… and so much later for each chunk of its prompt: an old long prompt is not due before every new short one."""


DEFAULT_BANDS: Mapping[str, Band] = {
    "interactive": Band(8.0, 0.0, 0.5, 1.0),
    "standard": Band(4.0, 0.0, 2.0, 2.0),
    "batch": Band(1.0, 0.05, 60.0, 10.0),
}
DEFAULT_BAND = "standard"


def ring_weights(bands: Mapping[str, Band]) -> dict[str, float]:
    """Weights that give each band its share by weight, or its floor where that is more. Raises ValueError if floors leave
    nothing to share.

    Bands at their floor are taken out, and the rest is shared by weight among the others, until no further one falls below.
    """
    if sum(band.floor_share for band in bands.values()) >= 1:
        raise ValueError("the bands' floor_share add up to 1 or more")
    floored: dict[str, float] = {}
    while True:
        rest = 1 - sum(floored.values())
        total = sum(band.weight for name, band in bands.items() if name not in floored)
        shares = {name: rest * band.weight / total for name, band in bands.items() if name not in floored}
        below = {name: bands[name].floor_share for name, share in shares.items() if share < bands[name].floor_share}
        if not below:
            return {name: floored.get(name, shares.get(name, 0.0)) for name in bands}
        floored |= below
