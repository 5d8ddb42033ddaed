"""How much of a prompt rides on the next step of a decode worker: what its streams notice of it is bounded."""

import random

import pytest

from decode_worker.suffixes import TARGET_SHARE, SliceSizes


def step_ms(sequences: int, tokens: int, *, token_ms: float) -> float:
    return 20.0 + 3.0 * sequences + token_ms * tokens


@pytest.mark.parametrize("share", [0.25, 0.5, 1.0])
@pytest.mark.parametrize("token_ms", [0.02, 0.4, 3.5])
def test_slice_keeps_to_its_share(share: float, token_ms: float) -> None:
    """A slice lengthens a step by about its share at most, and it uses that share."""
    source, sizes = random.Random(1), SliceSizes(share)
    for number in range(400):
        sequences = source.randint(1, 12)
        alone_ms = step_ms(sequences, 0, token_ms=token_ms)
        tokens = sizes.tokens(sequences) if number % 3 else 0
        took_ms = step_ms(sequences, tokens, token_ms=token_ms)
        if number > 150 and tokens > 1:
            assert took_ms - alone_ms <= 1.25 * share * alone_ms, (sequences, tokens)
        sizes.measured(sequences, tokens, took_ms * source.uniform(0.98, 1.02))
    assert sizes.tokens(4) >= 0.6 * share * step_ms(4, 0, token_ms=token_ms) / token_ms, "and it is used"


def test_each_stream_keeps_its_limit() -> None:
    """Streams with a TPOT target bound slices by it, the others by the share; at least one token is computed."""
    sizes = SliceSizes(0.5)
    for _ in range(50):
        sizes.measured(4, 0, 32.0)
        sizes.measured(4, 8, 40.0)
    assert sizes.tokens(4) == 16
    assert sizes.tokens(4, {100.0, 200.0}) == int(TARGET_SHARE * 100 - 32)
    assert sizes.tokens(4, {0.0, 1000.0}) == 16, "a lax target takes nothing from a stream without one"
    assert sizes.tokens(4, {0.0, 40.0}) == 4
    assert sizes.tokens(4, {30.0}) == 1, "even then the prompt gets on"


def test_unmeasured_sizes_start_small() -> None:
    """Slices beside a number of streams that was never measured begin with very few tokens."""
    sizes = SliceSizes(0.5)
    assert sizes.tokens(3) == 1
    sizes.measured(3, 0, 30.0)
    assert sizes.tokens(3) == 2, "a token is taken to add a quarter of a step"
    sizes.measured(0, 64, 200.0)
    assert sizes.tokens(3) == 2, "what ran alone says nothing of streams"


def test_one_slow_step_is_soon_forgotten() -> None:
    """One slow step does not make the slices much smaller."""
    sizes = SliceSizes(0.5)
    for _ in range(50):
        sizes.measured(4, 0, 32.0)
        sizes.measured(4, 8, 40.0)
    sizes.measured(4, 8, 5000.0)
    assert sizes.tokens(4) >= 8
