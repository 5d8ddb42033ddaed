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


def test_no_stop_token_comes_before_the_fewest_tokens() -> None:
    assert greedy(4, stop_token_ids=(7, 6), min_tokens=3) == [5, 5, 5, 7]
    assert greedy(2, output=(5, 5), stop_token_ids=(7, 6), min_tokens=3) == [5, 7], "resumed tokens count"
    assert greedy(1, stop_token_ids=(7,)) == [7]


def test_only_allowed_tokens_come() -> None:
    assert greedy(2, allowed_token_ids=(1, 4)) == [4, 4]
    assert greedy(1, allowed_token_ids=(VOCAB + 3,)) == [7], "none of them is the model's"


def test_bad_words_do_not_come_whole() -> None:
    assert greedy(4, bad_words=((7, 7), (6,))) == [7, 5, 7, 5]
    assert greedy(1, output=(3, 7), bad_words=((3, 7, 7),)) == [6], "the word began before the stream was resumed"
    assert greedy(1, output=(3, 6), bad_words=((3, 7, 7),)) == [7]


def test_where_nothing_would_be_left_a_token_is_drawn_all_the_same() -> None:
    assert greedy(1, allowed_token_ids=(4,), bad_words=((4,),)) == [7]


def test_log_probabilities_are_of_what_may_come() -> None:
    state = SamplerState(Sampling(max_tokens=5, temperature=0.0, logprobs=2, allowed_token_ids=(3,)), 0, VOCAB, (1,))
    (found,) = sample(LOGITS, [state])
    assert found is not None and found.logprobs is not None and found.logprobs.logprob == 0.0
