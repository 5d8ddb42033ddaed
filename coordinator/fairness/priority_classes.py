"""From the bands' weights and floors to the weights of the fair queue's first ring."""

from collections.abc import Mapping

from runtime.tenancy.tenants import Band


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
