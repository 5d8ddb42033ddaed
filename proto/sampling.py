"""How tokens are drawn from logits; travels unchanged from the gateway to whichever worker samples."""

from typing import Annotated

import msgspec
from msgspec import Meta

from proto import limits

TokenId = Annotated[int, Meta(ge=0, lt=limits.MAX_VOCAB)]


class Sampling(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Sampling parameters of one request. Ranges are those of the OpenAI API and vLLM.

    Random numbers are a function of (`seed`, choice, token index), so that a resumed stream draws what it would have drawn.
    """

    max_tokens: Annotated[int, Meta(ge=1, le=limits.MAX_CONTEXT_TOKENS)]
    """Most tokens to emit for each choice, counted from the first token of the answer, resumed ones included."""
    seed: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] = 0
    temperature: Annotated[float, Meta(ge=0.0, le=100.0)] = 1.0  # 0 is greedy
    top_k: Annotated[int, Meta(ge=0, lt=limits.MAX_VOCAB)] = 0  # 0 is off
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0.0, le=100.0)] = 1.0
    """The penalty over prompt and output (Keskar et al. 2019, CTRL); 1 is off."""
    presence_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] = 0.0  # over output only, as OpenAI defines it
    frequency_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] = 0.0
    logit_bias: Annotated[
        tuple[tuple[TokenId, Annotated[float, Meta(ge=-100.0, le=100.0)]], ...], Meta(max_length=limits.MAX_LOGIT_BIAS)
    ] = ()
    logprobs: Annotated[int, Meta(ge=-1, le=limits.MAX_TOP_LOGPROBS)] = -1
    """-1: none; 0: of the drawn token; k: of the k likeliest as well. Taken before temperature and truncation,
    after penalties and bias."""
    stop_token_ids: Annotated[tuple[TokenId, ...], Meta(max_length=limits.MAX_STOP_TOKEN_IDS)] = ()
    """The model's end-of-sequence ids are among them unless the user asked to ignore them."""
    prompt_logprobs: Annotated[int, Meta(ge=-1, le=limits.MAX_TOP_LOGPROBS)] = -1
    """As `logprobs`, of the prompt's tokens, as the model gives them: no penalty or bias counts. They travel as
    `PromptLogprobs`, before the first token."""
    min_tokens: Annotated[int, Meta(ge=0, le=limits.MAX_CONTEXT_TOKENS)] = 0
    """No stop token is drawn until the answer has so many tokens; resumed ones are included."""
    allowed_token_ids: Annotated[tuple[TokenId, ...], Meta(max_length=limits.MAX_ALLOWED_TOKEN_IDS)] = ()  # empty: all
    bad_words: Annotated[
        tuple[Annotated[tuple[TokenId, ...], Meta(min_length=1, max_length=limits.MAX_BAD_WORD_TOKENS)], ...],
        Meta(max_length=limits.MAX_BAD_WORDS),
    ] = ()
    """Token sequences that the answer must not have: the last token of one is not drawn behind the others."""
    grammar: Annotated[str, Meta(max_length=limits.MAX_GRAMMAR_CHARS)] = ""  # in llguidance's language; empty: none


class TokenLogprobs(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Natural-log probabilities at one position: of the drawn token, and of the likeliest, best first."""

    logprob: float
    top: Annotated[tuple[tuple[TokenId, float], ...], Meta(max_length=limits.MAX_TOP_LOGPROBS)] = ()
