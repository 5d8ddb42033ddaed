"""Tokens against a plain float64 reference that sorts and sums everything: the same ones, whatever the options and logits."""

import itertools
import random

import numpy as np
import pytest
import torch

from engine.sampling.draw import draw
from engine.sampling.sampler import Sampled, SamplerState, sample
from proto.sampling import Sampling

HIGHEST_UNIFORM = 1.0 - 2.0**-53


def reference_weights(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    weights = np.exp((logits.astype(np.float64) - logits.max()) / sampling.temperature)
    if sampling.min_p > 0.0:
        weights[weights < sampling.min_p] = 0.0
    if 0 < sampling.top_k < len(weights):
        weights[weights < np.partition(weights, -sampling.top_k)[-sampling.top_k]] = 0.0
    if sampling.top_p < 1.0:
        ordered = np.sort(weights[weights > 0.0])[::-1]
        cumulative = np.cumsum(ordered)
        last = int(np.searchsorted(cumulative, sampling.top_p * cumulative[-1], side="left"))
        weights[weights < ordered[last]] = 0.0
    return weights


def reference_draw(logits: np.ndarray, sampling: Sampling, uniform: float) -> int:
    cumulative = np.cumsum(reference_weights(logits, sampling))
    at = int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))
    return at if at < len(cumulative) else int(np.searchsorted(cumulative, cumulative[-1], side="left"))


def reference_token(row: torch.Tensor, state: SamplerState) -> int | None:
    if not torch.isfinite(row.max()):
        return None
    adjusted = state.apply_penalties(row)
    if state.sampling.temperature == 0.0:
        return int(adjusted.argmax())
    return reference_draw(adjusted.numpy(), state.sampling, state.uniform())


def drawn(logits: np.ndarray, sampling: Sampling, uniform: float) -> int:
    return draw(logits, float(logits.max()), sampling, uniform, np.empty(len(logits)))


def batch(vocab: int, rng: np.random.Generator) -> torch.Tensor:
    """Usual, peaked, flat and constant rows, some with ties, with tokens ruled out or with huge logits, and broken ones."""
    usual = rng.normal(0.0, 3.0, vocab)
    peak = np.where(np.arange(vocab) == rng.integers(vocab), 9.0, usual)
    ruled_out = np.where(rng.random(vocab) < 0.9, -np.inf, usual)
    ruled_out[rng.integers(vocab)] = 1.0
    broken = [np.where(np.arange(vocab) == rng.integers(vocab), bad, usual) for bad in (np.nan, np.inf)]
    rows = [usual, broken[0], peak, usual / 300.0, np.ones(vocab), np.round(usual), ruled_out, usual * 1e4, broken[1]]
    return torch.from_numpy(np.stack([*rows, np.full(vocab, -np.inf)]).astype(np.float32))


@pytest.mark.parametrize("temperature", [0.0, 1e-300, 1e-9, 0.02, 0.6, 1.0, 1.7, 100.0])
def test_all_option_combinations_match_reference(temperature: float) -> None:
    """Draws equal those of the reference for every combination of sampling options."""
    generator, rng = np.random.default_rng(int(temperature * 100)), random.Random(temperature)
    grid = itertools.product([0, 1, 40, 100_000], [1e-9, 0.5, 0.9, 1.0 - 1e-9, 1.0], [0.0, 0.05, 1.0])
    for top_k, top_p, min_p in grid:
        vocab = rng.choice([12, 700, 6000])
        logits = batch(vocab, generator)
        states = []
        for _ in range(len(logits)):
            tokens = [rng.randrange(vocab) for _ in range(20)]
            sampling = Sampling(
                max_tokens=100, seed=rng.getrandbits(63), temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
                repetition_penalty=rng.choice([1.0, 1.0, 1.3]), presence_penalty=rng.choice([0.0, 0.0, 0.7]),
                frequency_penalty=rng.choice([0.0, 0.0, -0.4]), logprobs=rng.choice([-1, -1, 0, 3]),
                logit_bias=rng.choice([(), (), ((3, 2.5), (7, -100.0))]),
            )  # fmt: skip
            states.append(SamplerState(sampling, rng.randrange(4), vocab, tokens[:10], tokens[10:]))
        results = sample(logits, states)
        expected = [reference_token(row, state) for row, state in zip(logits, states, strict=True)]
        assert [result and result.token for result in results] == expected
        for result, state in zip(results, states, strict=True):
            assert result is None or (result.logprobs is not None) == (state.sampling.logprobs >= 0)


def test_mixed_batch_draws_as_rows_alone() -> None:
    """Rows with different options draw in one batch the same tokens as alone."""
    rng = np.random.default_rng(3)
    logits = torch.from_numpy(rng.normal(0.0, 3.0, (5, 5000)).astype(np.float32))
    asked = [{"temperature": 0.0}, {}, {"top_p": 0.9}, {"temperature": 0.0, "logprobs": 2}, {"top_k": 9, "min_p": 0.1}]
    states = [SamplerState(Sampling(max_tokens=9, seed=4, **one), 0, 5000, ()) for one in asked]  # type: ignore[arg-type]
    alone: list[Sampled | None] = [sample(row[None], [state])[0] for row, state in zip(logits, states, strict=True)]
    assert sample(logits, states) == alone
    padded = torch.nn.functional.pad(logits, (0, 24))[:, :5000]  # as the CPU backend returns them
    assert sample(padded, states) == alone


@pytest.mark.parametrize("options", [{}, {"top_p": 0.5}, {"top_k": 2}, {"min_p": 0.1}, {"temperature": 0.0}])
def test_infinite_logit_from_penalty_is_drawn(options: dict[str, float]) -> None:
    """A logit that the repetition penalty makes infinite is drawn."""
    logits = torch.zeros(1, 12)
    logits[0, 5] = 3e38
    state = SamplerState(Sampling(max_tokens=9, repetition_penalty=0.1, **options), 0, 12, [5])  # type: ignore[arg-type]
    [result] = sample(logits, [state])
    assert result is not None and result.token == 5


@pytest.mark.parametrize("scale", [0.001, 1.0, 4.0])
def test_top_p_is_exact_between_tokens(scale: float) -> None:
    """There, the last bit of a sum decides. Tokens lie in order of their weight, so the highest draw is the last that stays."""
    rng = np.random.default_rng(6)
    logits = np.sort(rng.normal(0.0, scale, 20_000).astype(np.float32))[::-1].copy()
    sums = np.cumsum(reference_weights(logits, Sampling(max_tokens=1)))
    for at in [*range(20), *rng.integers(20, 19_990, 60).tolist()]:
        share = float(sums[at] / sums[-1])
        for top_p in (np.nextafter(share, 0.0), share, np.nextafter(share, 1.0)):
            sampling = Sampling(max_tokens=1, top_p=float(top_p))
            assert drawn(logits, sampling, HIGHEST_UNIFORM) == reference_draw(logits, sampling, HIGHEST_UNIFORM)


def test_draw_is_exact_between_tokens() -> None:
    """Draws equal the reference when the random number lies on the border between two tokens."""
    rng = np.random.default_rng(7)
    logits = rng.normal(0.0, 3.0, 20_000).astype(np.float32)
    for sampling in (Sampling(max_tokens=1), Sampling(max_tokens=1, top_p=0.9), Sampling(max_tokens=1, min_p=1e-5)):
        sums = np.cumsum(reference_weights(logits, sampling))
        borders = [float(sums[at] / sums[-1]) for at in rng.integers(0, 20_000, 100)]
        for uniform in (0.0, HIGHEST_UNIFORM, *borders, *(np.nextafter(border, 0.0) for border in borders)):
            if uniform < 1.0:
                assert drawn(logits, sampling, float(uniform)) == reference_draw(logits, sampling, float(uniform))
