"""Every sampling option against a naive twin, the distribution of draws, and draws that depend on nothing else."""

import math
import random
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from engine.sampling.sampler import SamplerState, sample
from proto.sampling import Sampling

VOCAB = 12


def state_of(
    output: tuple[int, ...] = (), prompt: tuple[int, ...] = (), choice: int = 0, **options: Any
) -> SamplerState:
    return SamplerState(Sampling(max_tokens=100, **options), choice, VOCAB, prompt, output)


def twin_adjusted(
    logits: list[float], prompt: tuple[int, ...], output: tuple[int, ...], sampling: Sampling
) -> list[float]:
    result = list(logits)
    for token in range(len(result)):
        if token in prompt or token in output:
            value = result[token]
            result[token] = value / sampling.repetition_penalty if value > 0 else value * sampling.repetition_penalty
        result[token] -= sampling.frequency_penalty * output.count(token)
        result[token] -= sampling.presence_penalty * (token in output)
        result[token] += dict(sampling.logit_bias).get(token, 0.0)
    return result


def twin_probabilities(logits: list[float], sampling: Sampling) -> list[float]:
    """The distribution after temperature, min_p, top_k and top_p, in the plainest way."""

    def normal(weights: list[float]) -> list[float]:
        total = sum(weights)
        return [weight / total for weight in weights]

    highest = max(logits)
    chances = normal([math.exp((value - highest) / sampling.temperature) for value in logits])
    chances = normal([p if p >= sampling.min_p * max(chances) else 0.0 for p in chances])
    order = sorted(range(len(chances)), key=lambda token: -chances[token])
    if sampling.top_k:
        chances = normal([p if token in order[: sampling.top_k] else 0.0 for token, p in enumerate(chances)])
    kept, mass = set[int](), 0.0
    for token in order:
        if mass < sampling.top_p:
            kept.add(token)
        mass += chances[token]
    return normal([p if token in kept else 0.0 for token, p in enumerate(chances)])


def twin_draw(probabilities: list[float], uniform: float) -> int:
    total = 0.0
    for token, p in enumerate(probabilities):
        total += p
        if uniform < total:
            return token
    return max(token for token, p in enumerate(probabilities) if p > 0)


options = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**63 - 1),
        "temperature": st.sampled_from([0.3, 1.0, 1.7]),
        "top_k": st.sampled_from([0, 1, 3, 100]),
        "top_p": st.sampled_from([0.2, 0.71, 0.93, 1.0]),
        "min_p": st.sampled_from([0.0, 0.05, 0.37]),
        "repetition_penalty": st.sampled_from([1.0, 0.7, 1.8]),
        "presence_penalty": st.sampled_from([0.0, 0.9]),
        "frequency_penalty": st.sampled_from([0.0, -0.4, 1.1]),
        "logit_bias": st.sampled_from([(), ((1, 2.5), (7, -100.0))]),
        "logprobs": st.sampled_from([-1, 0, 4]),
    }
)


@settings(max_examples=200, deadline=None)
@given(options=options, seed=st.integers(0, 2**32), choice=st.integers(0, 15))
def test_every_option_matches_the_twin(options: dict[str, Any], seed: int, choice: int) -> None:
    """Tokens and log probabilities equal those of the plain Python twin for every option."""
    rng = random.Random(seed)
    logits = torch.tensor([rng.gauss(0, 2) for _ in range(VOCAB)])
    prompt = tuple(rng.randrange(VOCAB) for _ in range(rng.randrange(4)))
    output = tuple(rng.randrange(VOCAB) for _ in range(rng.randrange(6)))
    state = state_of(output, prompt, choice, **options)
    [drawn] = sample(logits[None], [state])
    apply_penalties = twin_adjusted(logits.tolist(), prompt, output, state.sampling)
    probabilities = twin_probabilities(apply_penalties, state.sampling)
    # At the very edge between two tokens rounding decides, and the twin computes in double precision.
    assume(all(abs(edge - state.uniform()) > 1e-6 for edge in accumulate(probabilities)))
    expected = twin_draw(probabilities, state.uniform())
    assert drawn.token == expected
    if state.sampling.logprobs < 0:
        assert drawn.logprobs is None
        return
    assert drawn.logprobs is not None
    normaliser = math.log(sum(math.exp(value) for value in apply_penalties))
    assert drawn.logprobs.logprob == pytest.approx(apply_penalties[expected] - normaliser, abs=1e-4)
    best = sorted(range(VOCAB), key=lambda token: -apply_penalties[token])[: state.sampling.logprobs]
    assert [token for token, _ in drawn.logprobs.top] == best
    assert [value for _, value in drawn.logprobs.top] == pytest.approx(
        [apply_penalties[t] - normaliser for t in best], abs=1e-4
    )


@pytest.mark.parametrize(
    "options", [{}, {"top_k": 3}, {"top_p": 0.8}, {"min_p": 0.1}, {"temperature": 2.0, "top_k": 6, "top_p": 0.9}]
)
def test_draws_follow_the_distribution(options: dict[str, Any]) -> None:
    """Draws pass a chi-square test against the expected distribution."""
    logits = torch.linspace(-1.0, 2.0, VOCAB)
    state = state_of(seed=2024, **options)
    counts = [0] * VOCAB
    draws = 2500
    for _ in range(draws):
        [drawn] = sample(logits[None], [state])
        state.accept(drawn.token)
        counts[drawn.token] += 1
    expected = [draws * p for p in twin_probabilities(logits.tolist(), state.sampling)]
    assert all(count == 0 for count, mean in zip(counts, expected, strict=True) if mean == 0)
    chi_square = sum((count - mean) ** 2 / mean for count, mean in zip(counts, expected, strict=True) if mean > 0)
    assert chi_square < 40, "with at most 11 degrees of freedom, above 40 once in 30,000 seeds"


def test_draws_depend_on_seed_and_index() -> None:
    """A resumed stream draws the same tokens as the uninterrupted one."""
    logits = torch.randn(60, VOCAB, generator=torch.Generator().manual_seed(4))
    whole = state_of(seed=9, choice=2, presence_penalty=0.5, repetition_penalty=1.3, prompt=(3, 4))
    tokens = []
    for row in logits:
        [drawn] = sample(row[None], [whole])
        whole.accept(drawn.token)
        tokens.append(drawn.token)
    for cut in (0, 1, 17, 59):
        resumed = state_of(
            tuple(tokens[:cut]), seed=9, choice=2, presence_penalty=0.5, repetition_penalty=1.3, prompt=(3, 4)
        )
        others = [state_of(seed=1), state_of(seed=9, temperature=0.0), state_of(seed=9, choice=3, top_k=2)]
        for step, row in enumerate(logits[cut:], start=cut):
            assert resumed.index == step
            batch = sample(torch.stack([logits[0], row, logits[1], logits[2]]), [others[0], resumed, *others[1:]])
            assert batch[1].token == tokens[step]
            resumed.accept(batch[1].token)
    uniforms = {state_of(seed=seed, choice=choice, output=(0,) * n).uniform()
                for seed in (0, 1, 2**63 - 1) for choice in (0, 1) for n in range(50)}  # fmt: skip
    assert len(uniforms) == 300 and all(0 <= value < 1 for value in uniforms)


def test_random_number_stream_is_fixed() -> None:
    """A worker of another version must draw the same: these values may not change."""
    state = state_of(seed=42, choice=1)
    first = state.uniform()
    state.accept(0)
    assert (first, state.uniform()) == FIXED


FIXED = (0.443746921343274, 0.8008436655973474)


def test_greedy_obeys_bias_and_penalties() -> None:
    """A greedy draw takes the first of equal logits, after bias and penalties."""
    logits = torch.zeros(3, VOCAB)
    logits[:, [4, 9]] = 3.0
    states = [state_of(temperature=0.0), state_of(temperature=0.0, logit_bias=((9, 1.0),)),
              state_of(output=(4,), temperature=0.0, frequency_penalty=0.1)]  # fmt: skip
    assert [drawn.token for drawn in sample(logits, states)] == [4, 9, 9]
    assert sample(torch.empty(0, VOCAB), []) == []


def test_extreme_values_stay_finite() -> None:
    """Extreme logits and options draw the highest token with finite log probabilities."""
    logits = torch.tensor([[0.0, 1e4, -torch.inf] + [-1e4] * (VOCAB - 3)])
    cases: list[dict[str, Any]] = [{}, {"temperature": 1e-9}, {"top_p": 1e-9}, {"min_p": 1.0}, {"top_k": 100}]
    for options in [*cases, {"temperature": 100.0, "top_p": 0.5}]:
        [drawn] = sample(logits, [state_of(logprobs=20, **options)])
        assert drawn.token == 1
        assert drawn.logprobs is not None and len(drawn.logprobs.top) == VOCAB
        assert all(math.isfinite(value) for _, value in drawn.logprobs.top)
    [far] = sample(torch.zeros(1, VOCAB), [SamplerState(Sampling(max_tokens=1, logit_bias=((99, 5.0),)), 0, VOCAB, ())])
    assert 0 <= far.token < VOCAB, "a bias on a token the model lacks is nobody's"


def test_large_vocabulary_truncation_matches_twin() -> None:
    """Top-p and min-p over a large vocabulary draw the same tokens as the twin."""
    generator = torch.Generator().manual_seed(8)
    for scale, top_p, min_p in ((0.01, 0.5, 0.0), (3.0, 0.9, 0.0), (3.0, 0.9, 0.02), (0.01, 0.99, 0.9)):
        logits = torch.randn(3000, generator=generator) * scale
        sampling = Sampling(max_tokens=1, top_p=top_p, min_p=min_p, seed=5)
        state = SamplerState(sampling, 0, 3000, ())
        expected = twin_draw(twin_probabilities(logits.double().tolist(), sampling), state.uniform())
        [drawn] = sample(logits[None], [state])
        assert drawn.token == expected


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nonfinite_row_draws_nothing(bad: float) -> None:
    """A row that is not finite draws no token, and the other rows draw theirs."""
    logits = torch.zeros(3, VOCAB)
    logits[0, 7] = 1.0
    logits[1, 5] = bad
    first, second, third = sample(logits, [state_of(temperature=0.0), state_of(), state_of()])
    assert first is not None and first.token == 7
    assert second is None and third is not None


class Only:
    """A grammar that allows some tokens."""

    def __init__(self, *tokens: int) -> None:
        self.tokens, self.accepted = list(tokens), list[int]()

    def mask(self, row: Any) -> Any:
        masked = np.full_like(row, -np.inf)
        masked[self.tokens] = row[self.tokens]
        return masked

    def accept(self, token: int) -> None:
        self.accepted.append(token)


def constrained(grammar: Only, **options: Any) -> SamplerState:
    return SamplerState(Sampling(max_tokens=100, grammar="x", **options), 0, VOCAB, (), (), constraint=grammar)


@pytest.mark.parametrize(
    "options", [{"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.9}, {"logit_bias": ((1, 50.0),)}]
)
def test_only_grammar_tokens_are_drawn(options: dict[str, Any]) -> None:
    """Only tokens that the grammar allows are drawn."""
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(1))
    for seed in range(30):
        (sampled,) = sample(logits, [constrained(Only(2, 7), seed=seed, **options)])
        assert sampled is not None and sampled.token in (2, 7)


def test_logprobs_cover_grammar_tokens_only() -> None:
    """Log probabilities are taken among the tokens that the grammar allows."""
    (sampled,) = sample(torch.zeros(1, VOCAB), [constrained(Only(3, 4), temperature=0.0, logprobs=3)])
    assert sampled is not None and sampled.logprobs is not None
    assert sampled.logprobs.logprob == pytest.approx(math.log(0.5))
    assert [round(value, 3) for _, value in sampled.logprobs.top] == [-0.693, -0.693, -9999.0]


def test_row_without_allowed_tokens_fails_alone() -> None:
    """A row whose grammar allows nothing draws no token, and the other row draws its own."""
    sampled = sample(torch.zeros(2, VOCAB), [constrained(Only()), constrained(Only(1))])
    assert sampled[0] is None and sampled[1] is not None and sampled[1].token == 1


@pytest.mark.parametrize(
    ("grammar", "token"), [(Only(2, 7), 7), (Only(2), 2), (Only(3, 6), 6)], ids=["both", "form wins", "one of two"]
)
def test_limits_apply_within_the_grammar(grammar: Only, token: int) -> None:
    """Output limits choose among the tokens of the grammar, which wins over them."""
    options: dict[str, Any] = {"min_tokens": 5, "stop_token_ids": (2,), "bad_words": ((3,),), "temperature": 0.0}
    logits = torch.zeros(1, VOCAB)
    logits[0, [2, 3]] = 9.0
    state = constrained(grammar, **options)
    (sampled,) = sample(logits, [state])
    assert sampled is not None and sampled.token == token
    assert int((logits[0] + state.forbidden()).argmax()) == token, "as a GPU draws it"


def test_grammar_accepts_drawn_tokens() -> None:
    """A token that is drawn is passed to the grammar."""
    grammar = Only(1)
    constrained(grammar).accept(1)
    assert grammar.accepted == [1]
