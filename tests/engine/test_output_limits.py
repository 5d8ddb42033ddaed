"""Tokens that may not come next, alone and in a resumed stream."""

import torch

from engine.sampling.sampler import SamplerState, sample
from proto.sampling import Sampling

VOCAB = 8
LOGITS = torch.tensor([[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]])


def greedy(count: int, output: tuple[int, ...] = (), **options: object) -> list[int]:
    """Tokens drawn where each time the highest id is the likeliest."""
    sampling = Sampling(max_tokens=50, temperature=0.0, **options)  # type: ignore[arg-type]
    state, drawn = SamplerState(sampling, 0, VOCAB, (1, 2), output), []
    for _ in range(count):
        (found,) = sample(LOGITS, [state])
        assert found is not None
        drawn.append(found.token)
        state.accept(found.token)
    return drawn


def test_min_tokens_delays_stop_tokens() -> None:
    """Stop tokens are not drawn before min_tokens are reached; resumed tokens count."""
    assert greedy(4, stop_token_ids=(7, 6), min_tokens=3) == [5, 5, 5, 7]
    assert greedy(2, output=(5, 5), stop_token_ids=(7, 6), min_tokens=3) == [5, 7], "resumed tokens count"
    assert greedy(1, stop_token_ids=(7,)) == [7]


def test_only_allowed_tokens_are_drawn() -> None:
    """Only allowed tokens are drawn, unless the model has none of them."""
    assert greedy(2, allowed_token_ids=(1, 4)) == [4, 4]
    assert greedy(1, allowed_token_ids=(VOCAB + 3,)) == [7], "none of them is the model's"


def test_bad_words_are_never_completed() -> None:
    """The last token of a bad word is not drawn, also if the word began before the stream was resumed."""
    assert greedy(4, bad_words=((7, 7), (6,))) == [7, 5, 7, 5]
    assert greedy(1, output=(3, 7), bad_words=((3, 7, 7),)) == [6], "the word began before the stream was resumed"
    assert greedy(1, output=(3, 6), bad_words=((3, 7, 7),)) == [7]


def test_conflicting_limits_still_draw_a_token() -> None:
    """A token is drawn even if the limits together would forbid all tokens."""
    assert greedy(1, allowed_token_ids=(4,), bad_words=((4,),)) == [7]


def test_logprobs_cover_allowed_tokens_only() -> None:
    """Log probabilities are taken among the allowed tokens only."""
    state = SamplerState(Sampling(max_tokens=5, temperature=0.0, logprobs=2, allowed_token_ids=(3,)), 0, VOCAB, (1,))
    (found,) = sample(LOGITS, [state])
    assert found is not None and found.logprobs is not None and found.logprobs.logprob == 0.0
