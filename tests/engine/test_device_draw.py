"""Sampling in one pass on a device draws what the host's sampler draws, run here on CPU tensors."""

import numpy as np
import pytest
import torch

from engine.sampling.device_draw import DrawParameters, draw_rows, ordered
from engine.sampling.philox import uniforms
from engine.sampling.sampler import SamplerState, sample
from proto.sampling import Sampling

VOCAB = 500
CASES = {
    "plain": Sampling(max_tokens=9, temperature=1.0, seed=5),
    "cold": Sampling(max_tokens=9, temperature=0.05, seed=6),
    "top_k": Sampling(max_tokens=9, temperature=1.3, top_k=7, seed=7),
    "top_p": Sampling(max_tokens=9, temperature=1.0, top_p=0.6, seed=8),
    "min_p": Sampling(max_tokens=9, temperature=2.0, min_p=0.05, seed=9),
    "all": Sampling(max_tokens=9, temperature=1.1, top_k=40, top_p=0.8, min_p=0.01, seed=10),
    "one": Sampling(max_tokens=9, temperature=1.0, top_k=1, seed=11),
    "greedy": Sampling(max_tokens=9, temperature=0.0),
    "tiny": Sampling(max_tokens=9, temperature=1e-6, top_p=0.9, seed=12),
}


def parameters(states: list[SamplerState]) -> DrawParameters:
    def of(name: str) -> torch.Tensor:
        return torch.tensor([float(getattr(state.sampling, name)) for state in states], dtype=torch.float64)

    uniform = torch.tensor([state.uniform() for state in states], dtype=torch.float64)
    return DrawParameters(of("temperature"), of("top_k").long(), of("top_p"), of("min_p"), uniform)


def random_logits(rows: int, seed: int) -> torch.Tensor:
    """With ties, zeros of both signs, and minus infinity."""
    logits = torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    logits[:, ::7] = logits[:, ::7].round()
    logits[:, 3] = -torch.inf
    logits[:, 10:12] = torch.tensor([0.0, -0.0])
    return logits


def test_batch_draws_same_tokens_as_rows() -> None:
    """A batch drawn on the device gets the same tokens as the host's sampler."""
    for index in range(40):
        states = [SamplerState(one, choice, VOCAB, [], start_index=index) for choice, one in enumerate(CASES.values())]
        logits = random_logits(len(states), index)
        want = [drawn.token for drawn in sample(logits, states) if drawn is not None]
        assert draw_rows(logits, parameters(states), filters=True).tolist() == want


def test_draws_without_filters_match_host() -> None:
    """Draws with filters switched off equal those of the host for a batch that has no filters."""
    states = [SamplerState(Sampling(max_tokens=9, temperature=0.9, seed=seed), 0, VOCAB, []) for seed in range(30)]
    logits = random_logits(30, 1)
    want = [drawn.token for drawn in sample(logits, states) if drawn is not None]
    assert draw_rows(logits, parameters(states), filters=False).tolist() == want


def test_ordered_integers_follow_floats() -> None:
    """The integer keys of floats are in the floats' order, and both zeros have one key."""
    values = torch.tensor([-torch.inf, -3.0e38, -1.5, -1e-40, 0.0, 1e-40, 2.0, torch.inf])
    assert ordered(values).tolist() == sorted(set(ordered(values).tolist()))
    assert ordered(torch.tensor([-0.0])).equal(ordered(torch.tensor([0.0])))


@pytest.mark.parametrize("seed", [0, 1, 2**53 + 1, 2**63 - 1])
def test_random_numbers_match_the_generator(seed: int) -> None:
    """Random numbers computed for a batch equal those that the sampler state draws."""
    indices = np.array([0, 1, 77, 2**32 + 5], dtype=np.uint64)
    got = uniforms(np.full(4, seed, np.uint64), np.array([0, 1, 2, 3], np.uint64), indices)
    sampling = Sampling(max_tokens=9, temperature=1.0, seed=seed)
    want = [
        SamplerState(sampling, choice, VOCAB, [], start_index=int(index)).uniform()
        for choice, index in enumerate(indices)
    ]
    assert got.tolist() == want
