"""A validated request → prompts in token ids and sampling parameters. Runs on a worker thread: tokenizing takes time.

Texts that are certainly too long are refused before tokenizing. The exact lengths are checked after it.
"""

import secrets
from dataclasses import dataclass, replace

from msgspec import structs

from gateway.http.errors import bad_value, too_long
from gateway.openai.evaluation import output_limits, prompt_logprobs_wanted
from gateway.openai.forms import ANY_FORM, Chat, Form, completion_form
from gateway.openai.request_types import (
    CHOICES_MAX,
    PROMPTS_MAX,
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    StreamOptions,
    stop_strings,
)
from gateway.text.token_texts import TokenTexts
from gateway.text.tokenizer import ModelTokenizer, TextTooLong
from proto import limits
from proto.sampling import Sampling

COMPLETION_MAX_TOKENS = 16  # OpenAI's default for completions
SEED_MAX = (1 << 63) - 1


@dataclass(frozen=True)
class Prepared:
    """The parts of a request that are needed to submit it and to write its answer."""

    prompts: tuple[tuple[int, ...], ...]
    echoes: tuple[str, ...]  # Each prompt's text where the answer starts with it, else empty
    sampling: Sampling  # `max_tokens` is that of each choice of each prompt
    choices: int
    stops: tuple[str, ...]
    stream: bool
    include_usage: bool
    continuous_usage: bool  # Every chunk has it
    return_token_ids: bool
    form: Form = ANY_FORM
    answers: int = 1  # Choices of each prompt that are given, the best of those drawn
    echoes_logprobs: bool = False
    hides_logprobs: bool = False  # They were only asked for to find the best answers
    prompt_logprobs: int = -1  # As the request has it; -1: none are to be shown
    no_output: bool = False  # The client wants no output, only the prompt. One token is still drawn, but not shown.
    keeps_special: bool = False  # Special tokens are part of the text
    keeps_stop: bool = False
    cache_salt: str = ""
    continues: bool = False  # The answer's text continues the prompt's. A chat answer is a text of its own.

    def behind(self, number: int, tokenizer: ModelTokenizer) -> list[int]:
        """Returns the tokens behind which the answers of one prompt are decoded. The decoders of some tokenizers drop a space
        at the start of a text, which a grammar may have asked for."""
        found = tokenizer.end_of(self.prompts[number], keeps_special=self.keeps_special) if self.continues else []
        return found or (tokenizer.anchor if self.form.grammar and self.form.param != "tools" else [])

    def token_texts(self, number: int, tokenizer: ModelTokenizer) -> TokenTexts:
        """Returns the texts of tokens of one answer to one prompt."""
        return tokenizer.token_texts(keeps_special=self.keeps_special, behind=self.behind(number, tokenizer))


@dataclass(frozen=True)
class ModelRules:
    """One model's names, and the default length of its answers."""

    model_id: str
    default_max_tokens: int  # Tokens of a chat answer; 0: as many as the context leaves
    aliases: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Names by which clients may ask for the model."""
        return (self.model_id, *self.aliases)


def prepare_completion(request: CompletionRequest, tokenizer: ModelTokenizer, rules: ModelRules) -> Prepared:
    """Raises `ApiError`."""
    _check_common(request, tokenizer)
    n = request.n or 1
    drawn = request.best_of or n
    if drawn < n:
        raise bad_value("best_of", f"'best_of' is {drawn} and must not be less than 'n', which is {n}.")
    if drawn > n and request.stream:
        message = (
            "'best_of' greater than 'n' is not supported with 'stream': which answers are best is known at their end."
        )
        raise bad_value("best_of", message, "unsupported_parameter")
    prompts = _prompts(request.prompt, tokenizer)
    if len(prompts) * drawn > CHOICES_MAX:
        raise bad_value("n", f"At most {CHOICES_MAX} choices over all prompts are allowed.")
    decode = tokenizer.decode_all if request.skip_special_tokens is False else tokenizer.decode
    echoes = [prompt if isinstance(prompt, str) else decode(prompt) for prompt in prompts] if request.echo else []
    form = completion_form(request, tokenizer)
    ids = [encoded(p, tokenizer, "prompt", special=True) if isinstance(p, str) else p for p in prompts]
    logprobs = -1 if request.logprobs is None else request.logprobs
    prepared = _finish(
        request,
        tokenizer,
        ids,
        echoes or [""] * len(ids),
        asked=request.max_tokens,
        default=COMPLETION_MAX_TOKENS,
        logprobs=max(logprobs, 0) if drawn > n else logprobs,
        param="prompt",
    )
    shown = bool(request.echo) and request.logprobs is not None
    prepared = replace(prepared, choices=drawn, echoes_logprobs=shown, hides_logprobs=logprobs < 0, continues=True)
    return in_form(prepared, form)


def prepare_chat(
    request: ChatRequest, tokenizer: ModelTokenizer, rules: ModelRules, *, cuts_at_context: bool = False
) -> Prepared:
    """Prepare a chat request. `cuts_at_context`: the request may ask for more tokens than the context has room for, and the
    answer then ends at the context's end. Raises `ApiError`."""
    _check_common(request, tokenizer)
    asked = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    if request.max_tokens is not None and request.max_tokens != asked:
        raise bad_value("max_tokens", "'max_tokens' and 'max_completion_tokens' differ; send one of them.")
    if request.top_logprobs and not request.logprobs:
        raise bad_value("top_logprobs", "'top_logprobs' needs 'logprobs' to be true.")
    chat = Chat.of(request, tokenizer.template)
    _refuse_if_surely_too_long(chat.text_bytes, tokenizer, "messages")
    text = chat.rendered(tokenizer)
    form = chat.form(text, tokenizer)
    ids = encoded(text, tokenizer, "messages", special=False)
    logprobs = (request.top_logprobs or 0) if request.logprobs else -1
    prepared = _finish(
        request,
        tokenizer,
        [ids],
        [""],
        asked=None if cuts_at_context else asked,
        default=asked if asked is not None and cuts_at_context else rules.default_max_tokens,
        logprobs=logprobs,
        param="messages",
    )
    return in_form(prepared, form)


def encoded(text: str, tokenizer: ModelTokenizer, param: str, *, special: bool) -> list[int]:
    """A text's tokens. `special`: with those that the model wants around a text. Raises `ApiError`."""
    try:
        return tokenizer.encode(text, add_special_tokens=special)
    except TextTooLong:
        tokens = limits.MAX_CONTEXT_TOKENS + 1
        raise too_long(param, tokenizer.facts.context_tokens, tokens, at_least=True) from None


def in_form(prepared: Prepared, form: Form) -> Prepared:
    sampling = structs.replace(prepared.sampling, grammar=form.grammar)
    return replace(prepared, sampling=sampling, form=form)


def _check_common(request: GenerationRequest, tokenizer: ModelTokenizer) -> None:
    if request.stream_options is not None and not request.stream:
        raise bad_value("stream_options", "'stream_options' is allowed only with 'stream' true.")
    _logit_bias(request, tokenizer)
    _stop_ids(request, tokenizer)


def _prompts(prompt: object, tokenizer: ModelTokenizer) -> list[str | list[int]]:
    """Returns the four forms of `prompt` as one list. Refuses empty prompts, and prompts that certainly exceed the context."""
    items: list[object]
    if isinstance(prompt, str) or (isinstance(prompt, list) and prompt and _is_ids(prompt)):
        items = [prompt]
    elif isinstance(prompt, list):
        items = prompt
    else:
        raise bad_value("prompt", "'prompt' must be a string, a list of token ids, or a list of those.", "invalid_type")
    if not 1 <= len(items) <= PROMPTS_MAX:
        raise bad_value("prompt", f"'prompt' must hold 1 to {PROMPTS_MAX} prompts.")
    checked: list[str | list[int]] = []
    for item in items:
        if isinstance(item, str):
            _refuse_if_surely_too_long(len(item.encode()), tokenizer, "prompt")
            checked.append(item)
        elif isinstance(item, list) and item and _is_ids(item):
            if len(item) > tokenizer.facts.context_tokens:
                raise too_long("prompt", tokenizer.facts.context_tokens, len(item), 1)
            if min(item) < 0 or max(item) >= tokenizer.facts.vocab_size:
                raise bad_value(
                    "prompt", f"A token id is out of range: ids go from 0 to {tokenizer.facts.vocab_size - 1}."
                )
            checked.append(item)
        else:
            message = "Each prompt must be a string or a list of token ids, and not empty."
            raise bad_value("prompt", message, "invalid_type")
    if len({type(item) for item in checked}) > 1:
        raise bad_value("prompt", "'prompt' must not mix strings and token ids.", "invalid_type")
    return checked


def _is_ids(value: list[object]) -> bool:
    return all(type(item) is int for item in value)


def _refuse_if_surely_too_long(text_bytes: int, tokenizer: ModelTokenizer, param: str) -> None:
    if tokenizer.surely_too_long(text_bytes, tokenizer.facts.context_tokens):
        tokens = -(-text_bytes // (tokenizer.bytes_per_token_max or 1))
        raise too_long(param, tokenizer.facts.context_tokens, tokens, at_least=True)


def _logit_bias(request: GenerationRequest, tokenizer: ModelTokenizer) -> tuple[tuple[int, float], ...]:
    biases = request.logit_bias or {}
    if len(biases) > limits.MAX_LOGIT_BIAS:
        raise bad_value("logit_bias", f"'logit_bias' may name at most {limits.MAX_LOGIT_BIAS} tokens.")
    for key in biases:
        if not (key.isascii() and key.isdigit() and len(key) <= 9 and int(key) < tokenizer.facts.vocab_size):
            raise bad_value("logit_bias", f"'logit_bias' has a key that is not a token id of the model: {key[:40]!r}.")
    return tuple(sorted({int(key): bias for key, bias in biases.items()}.items()))


def _stop_ids(request: GenerationRequest, tokenizer: ModelTokenizer) -> tuple[int, ...]:
    ids = set(request.stop_token_ids or ())
    if ids and max(ids) >= tokenizer.facts.vocab_size:
        message = f"A token id is out of range: ids go from 0 to {tokenizer.facts.vocab_size - 1}."
        raise bad_value("stop_token_ids", message)
    if not request.ignore_eos:
        ids |= tokenizer.facts.eos_ids
    if len(ids) > limits.MAX_STOP_TOKEN_IDS:
        message = f"At most {limits.MAX_STOP_TOKEN_IDS} ids, the model's own end-of-text ids included, are allowed."
        raise bad_value("stop_token_ids", message)
    return tuple(sorted(ids))


def _or(value: float | None, default: float) -> float:
    return default if value is None else float(value)


def _finish(
    request: GenerationRequest,
    tokenizer: ModelTokenizer,
    prompts: list[list[int]],
    echoes: list[str],
    *,
    asked: int | None,
    default: int,
    logprobs: int,
    param: str,
) -> Prepared:
    """Check lengths and put all together. `asked` and `default` are of `max_tokens`; 0: as many as the context leaves."""
    if not all(prompts):
        raise bad_value(param, f"'{param}' has no tokens.")
    if max(map(max, prompts)) >= tokenizer.facts.vocab_size:
        # Token ids from the client were checked earlier. These come from a tokenizer that has more special tokens than its
        # model.
        raise bad_value(param, f"'{param}' has a special token that the tokenizer knows and the model does not.")
    longest = max(len(prompt) for prompt in prompts)
    max_tokens = max(_answer_tokens(tokenizer, longest, asked, default, request.n or 1, param), 1)
    defaults, options = tokenizer.facts.sampling, request.stream_options or StreamOptions()
    sampling = Sampling(
        max_tokens=max_tokens,
        seed=secrets.randbelow(SEED_MAX) if request.seed is None else request.seed & SEED_MAX,
        temperature=_or(request.temperature, defaults.temperature),
        top_k=max(defaults.top_k if request.top_k is None else request.top_k, 0),
        top_p=_or(request.top_p, defaults.top_p),
        min_p=_or(request.min_p, defaults.min_p),
        repetition_penalty=_or(request.repetition_penalty, defaults.repetition_penalty),
        presence_penalty=_or(request.presence_penalty, 0.0),
        frequency_penalty=_or(request.frequency_penalty, 0.0),
        logit_bias=_logit_bias(request, tokenizer),
        logprobs=logprobs,
        stop_token_ids=_stop_ids(request, tokenizer),
        prompt_logprobs=prompt_logprobs_wanted(request),
        **output_limits(request, tokenizer, max_tokens),
    )
    return Prepared(
        prompts=tuple(tuple(prompt) for prompt in prompts),
        echoes=tuple(echoes),
        sampling=sampling,
        choices=request.n or 1,
        stops=tuple(stop_strings(request.stop)),
        stream=bool(request.stream),
        include_usage=bool(options.include_usage),
        continuous_usage=bool(options.include_usage and options.continuous_usage_stats),
        return_token_ids=bool(request.return_token_ids),
        answers=request.n or 1,
        prompt_logprobs=-1 if request.prompt_logprobs is None else request.prompt_logprobs,
        no_output=asked == 0,
        keeps_special=request.skip_special_tokens is False,
        keeps_stop=bool(request.include_stop_str_in_output),
        cache_salt=request.cache_salt or "",
    )


def _answer_tokens(
    tokenizer: ModelTokenizer, prompt_tokens: int, asked: int | None, default: int, choices: int, param: str
) -> int:
    """Returns the most tokens of each answer: those asked for, or as many of `default` as there is room for. Raises
    `ApiError`."""
    facts = tokenizer.facts
    left = facts.answer_tokens_max(prompt_tokens, choices)
    wanted = max(min(default or left, left), 1) if asked is None else asked
    if wanted > facts.context_tokens - prompt_tokens:
        raise too_long(param, facts.context_tokens, prompt_tokens, wanted)
    if facts.room is not None and prompt_tokens > facts.room.prompt_tokens:
        raise too_long(param, facts.room.prompt_tokens, prompt_tokens)
    return wanted
