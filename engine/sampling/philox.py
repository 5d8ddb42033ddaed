"""The random numbers of many draws at once: Philox4x64-10 (Salmon et al. 2011), as numpy's generator has it."""

from typing import Final

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]

_MULTIPLIERS: Final = (np.uint64(0xD2E7470EE14C6C93), np.uint64(0xCA5A826395121157))
_WEYL: Final = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBB67AE8584CAA73B))
_ROUNDS: Final = 10
_HALF, _LOW = np.uint64(32), np.uint64(0xFFFFFFFF)


def uniforms(seeds: Words, choices: Words, indices: Words) -> npt.NDArray[np.float64]:
    """Numbers in [0, 1): of each draw what `SamplerState.uniform` has for this seed, choice and token index."""
    key = [seeds.copy(), choices.copy()]
    # numpy counts before it computes, so its first numbers are those of a counter that begins with 1.
    one, zero = np.ones_like(indices), np.zeros_like(indices)
    counter = [one, indices, zero, zero]
    for turn in range(_ROUNDS):
        if turn:
            key = [key[0] + _WEYL[0], key[1] + _WEYL[1]]
        high0, low0 = _product(counter[0], _MULTIPLIERS[0])
        high1, low1 = _product(counter[2], _MULTIPLIERS[1])
        counter = [high1 ^ counter[1] ^ key[0], low1, high0 ^ counter[3] ^ key[1], low0]
    return (counter[0] >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _product(a: Words, b: np.uint64) -> tuple[Words, Words]:
    """(high, low) words of 64 by 64 bits."""
    a_high, a_low, b_high, b_low = a >> _HALF, a & _LOW, b >> _HALF, b & _LOW
    middle = a_high * b_low + (a_low * b_low >> _HALF)
    other = a_low * b_high + (middle & _LOW)
    return a_high * b_high + (middle >> _HALF) + (other >> _HALF), a * b
