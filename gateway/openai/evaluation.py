"""Fields that evaluation harnesses use: limits on the output tokens, and log-probabilities of the prompt."""

from collections.abc import Iterable
from typing import Any

import msgspec

from gateway.http.errors import bad_value
from gateway.openai.request_types import CompletionRequest, GenerationRequest
from gateway.streams.prompt_scores import PromptScore, PromptScores
from gateway.text.tokenizer import ModelTokenizer
from proto import limits

LOGPROB_MIN = -9999.0  # JSON has no minus infinity


def output_limits(request: GenerationRequest, tokenizer: ModelTokenizer, max_tokens: int) -> dict[str, Any]:
    """The fields of `Sampling` that say which tokens may come. Raises `ApiError`."""
    vocab_size = tokenizer.facts.vocab_size
    min_tokens, allowed = request.min_tokens or 0, sorted(set(request.allowed_token_ids or ()))
    if min_tokens > max_tokens:
        raise bad_value("min_tokens", f"'min_tokens' is {min_tokens}, and at most {max_tokens} tokens can come.")
    if request.allowed_token_ids is not None and not allowed:
        raise bad_value("allowed_token_ids", "'allowed_token_ids' must not be empty: leave it out to allow all.")
    if allowed and allowed[-1] >= vocab_size:
        message = f"A token id is out of range: ids go from 0 to {vocab_size - 1}."
        raise bad_value("allowed_token_ids", message)
    words = [ids for word in request.bad_words or () for ids in _spellings(word, tokenizer)]
    if len(words) > limits.MAX_BAD_WORDS:
        raise bad_value("bad_words", f"'bad_words' may come to at most {limits.MAX_BAD_WORDS} token sequences.")
    return {"min_tokens": min_tokens, "allowed_token_ids": tuple(allowed), "bad_words": tuple(words)}


def _spellings(word: str, tokenizer: ModelTokenizer) -> Iterable[tuple[int, ...]]:
    """A word's tokens at the start of a text and behind a space, as in vLLM."""
    bare = word.lstrip()
    if not bare:
        raise bad_value("bad_words", "'bad_words' must not have an empty word.")
    found = {tuple(tokenizer.encode(text, add_special_tokens=False)): None for text in (bare, f" {bare}")}
    for ids in found:
        if not 1 <= len(ids) <= limits.MAX_BAD_WORD_TOKENS:
            message = f"A word of 'bad_words' may have at most {limits.MAX_BAD_WORD_TOKENS} tokens."
            raise bad_value("bad_words", message)
    return found


def prompt_logprobs_wanted(request: GenerationRequest) -> int:
    """As `Sampling.prompt_logprobs`. Raises `ApiError`."""
    if request.prompt_logprobs is not None and request.stream:
        message = "'prompt_logprobs' is not supported with 'stream': send 'stream' false."
        raise bad_value("prompt_logprobs", message, "unsupported_parameter")
    echoed = -1
    if isinstance(request, CompletionRequest) and request.echo and request.logprobs is not None:
        echoed = request.logprobs
    return max(-1 if request.prompt_logprobs is None else request.prompt_logprobs, echoed)


# --- answers ----------------------------------------------------------------------------------------------------------


def finite(logprob: float) -> float:
    return max(LOGPROB_MIN, logprob)


def prompt_logprobs(
    prompt: tuple[int, ...], scores: PromptScores, top: int, tokenizer: ModelTokenizer
) -> list[msgspec.Raw | None]:
    """vLLM's form: for each token, by token id, the token's own log-probability and those of the `top` likeliest. Each entry
    is already JSON text: as objects, the entries of a long prompt would take gigabytes, and would be encoded in one step."""
    found: list[msgspec.Raw | None] = [None]
    for token, score in zip(prompt[1:], scores, strict=True):
        entry = {token: (score.logprob, score.rank)}
        for rank, (other, logprob) in enumerate(score.top[:top], 1):
            entry.setdefault(other, (logprob, rank))
        shown = {
            str(other): {"logprob": finite(logprob), "rank": rank, "decoded_token": tokenizer.token_text(other)}
            for other, (logprob, rank) in entry.items()
        }
        found.append(msgspec.Raw(msgspec.json.encode(shown)))
    return found


def echoed_logprobs(
    prompt: tuple[int, ...], scores: Iterable[PromptScore], top: int, tokenizer: ModelTokenizer, *, keeps_special: bool
) -> dict[str, list[Any]]:
    """The `logprobs` of a completion's echo: OpenAI's lists, the first token without a probability."""
    texts, names = tokenizer.token_texts(keeps_special=keeps_special), []
    own: list[float | None] = [None]
    tops: list[dict[str, float] | None] = [None]
    offsets = []
    rows = iter(scores)
    for number, token in enumerate(prompt, 1):
        if number > 1:
            score, likeliest = next(rows), dict[str, float]()
            for other, logprob in score.top[:top]:
                likeliest.setdefault(texts.candidate(other)[0], finite(logprob))
            likeliest.setdefault(texts.candidate(token)[0], finite(score.logprob))
            own.append(finite(score.logprob))
            tops.append(likeliest)
        offsets.append(texts.chars)
        names.append(texts.name(token, texts.push(token, is_last=number == len(prompt))[0]))
    return {"tokens": names, "token_logprobs": own, "top_logprobs": tops, "text_offset": offsets}
