"""Compiles grammars to matchers with llguidance, within limits that hold for every grammar a client can write.

The limits are counts, not times. So every process decides in the same way, and all workers match the same answers.
"""

import re
from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

import llguidance
import numpy as np
import numpy.typing as npt

Logits = npt.NDArray[np.float32]

LIMITS: Final = llguidance.LLParserLimits(
    initial_lexer_fuel=200_000,
    step_lexer_fuel=50_000,
    step_max_items=5_000,
    max_items_in_row=500,
    max_lexer_states=20_000,
    max_grammar_size=100_000,
    verbose_errors=False,
)
"""Smaller than llguidance's own, so that no mask takes longer than about 20 ms. A grammar that exceeds them fails."""
_ERROR_CHARS_MAX: Final = 4096
_NOT_FOR_USERS: Final = re.compile(r"<|[ \t]*\d+ \| ")
_PLACE: Final = re.compile(r"^at \d+\(\d+\): ")
_START_TOKENS_MAX: Final = 64
_CHOICES_TRIED: Final = 3
_DEAD_END: Final = "NoExtensionBias"  # llguidance's word
_CACHED_MAX: Final = 128
_CACHED_CHARS_MAX: Final = 1 << 20  # of all grammars that are kept compiled


class GrammarError(Exception):
    """The grammar cannot be compiled, or not be followed any further; `str()` is for the user."""


def make_tokenizer(tokenizer_json: str, vocab_size: int, eos_ids: Iterable[int]) -> llguidance.LLTokenizer:
    """`tokenizer_json` as of Hugging Face tokenizers; `vocab_size` is the model's. Raises `GrammarError`."""
    eos = sorted(token for token in eos_ids if token < vocab_size)
    why = ""
    for size in (vocab_size, None):  # None: the tokenizer's own, since it may have more tokens than the model
        try:
            return llguidance.LLTokenizer(tokenizer_json, n_vocab=size, eos_token=eos)
        except (ValueError, RuntimeError, TypeError) as error:
            why = str(error)[:200]
    raise GrammarError(f"the model's tokenizer does not suit grammars: {why}")


def make_matcher(grammar: str, tokenizer: llguidance.LLTokenizer) -> llguidance.LLMatcher:
    """Drops the GIL while it compiles. Raises `GrammarError`."""
    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
    if matcher.is_error():
        raise GrammarError(_short(matcher.get_error()))
    return matcher


class Compiler:
    """The compiler of one model. It belongs to one thread; the matchers it makes may be used on another."""

    def __init__(self, tokenizer: llguidance.LLTokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._compiled: OrderedDict[str, llguidance.LLMatcher] = OrderedDict()
        self._chars = 0

    def compile(self, grammar: str) -> None:
        """Compile a grammar and keep it in the cache. Raises `GrammarError`."""
        if grammar in self._compiled:
            self._compiled.move_to_end(grammar)
            return
        self._compiled[grammar] = make_matcher(grammar, self._tokenizer)
        self._chars += len(grammar)
        while len(self._compiled) > _CACHED_MAX or (self._chars > _CACHED_CHARS_MAX and len(self._compiled) > 1):
            oldest, _ = self._compiled.popitem(last=False)
            self._chars -= len(oldest)

    def matcher(self, grammar: str, output_tokens: Iterable[int]) -> "Matcher":
        """Returns a matcher that has accepted the tokens of an answer so far. Raises `GrammarError`."""
        self.compile(grammar)
        found = Matcher(self._compiled[grammar].deep_copy(), self._tokenizer, self._vocab_size)
        for token in output_tokens:
            found.accept(token)
        return found


class Matcher:
    """Where one choice stands in its grammar: an `engine.sampling.sampler.Constraint`."""

    def __init__(self, matcher: llguidance.LLMatcher, tokenizer: llguidance.LLTokenizer, vocab_size: int) -> None:
        """`vocab_size` is the model's. The tokenizer's is at least as large."""
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._eos_ids: list[int] = list(tokenizer.eos_tokens)
        self._bits = np.zeros((tokenizer.vocab_size + 31) // 32 * 4, dtype=np.uint8)

    def mask(self, row: Logits) -> Logits:
        """A copy of the logits [vocab] with minus infinity where a token does not continue the grammar. All are minus infinity
        once the grammar cannot be followed any more."""
        self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        if self._matcher.is_error():
            return np.full_like(row, -np.inf)
        allowed = np.unpackbits(self._bits, count=self._vocab_size, bitorder="little").view(np.bool_)
        if not self.is_complete:  # a client's grammar can name the token that ends an answer in the middle of one
            allowed[self._eos_ids] = False
        return np.where(allowed, row, np.float32(-np.inf))

    def accept(self, token: int) -> None:
        """`token` is the next of the answer. One that does not fit makes every later mask empty."""
        self._matcher.consume_token(token)

    @property
    def fault(self) -> str:
        """The limit that the grammar exceeds here; empty: none, though it may be that no token continues the answer."""
        error = _short(self._matcher.get_error()) if self._matcher.is_error() else ""
        return "" if error == _DEAD_END else error

    @property
    def is_complete(self) -> bool:
        """Whether the answer may end here."""
        return self._matcher.is_accepting()


def can_begin(matcher: llguidance.LLMatcher, tokenizer: llguidance.LLTokenizer, vocab_size: int) -> bool:
    """Returns whether an answer can begin: from the start, tokens are allowed until there is a choice of tokens. This check is
    needed because a regular expression that matches nothing still compiles. Goes on for a few tokens more, since some
    grammars exceed the limits only there; raises `GrammarError` if so."""
    start = Matcher(matcher.deep_copy(), tokenizer, vocab_size)
    logits = np.zeros(vocab_size, np.float32)
    choices = 0
    for _ in range(_START_TOKENS_MAX):
        allowed = np.flatnonzero(np.isfinite(start.mask(logits)))
        if start.fault:
            raise GrammarError(start.fault)
        choices += len(allowed) != 1 or start.is_complete
        if not len(allowed) or choices > _CHOICES_TRIED:
            break
        start.accept(int(allowed[-1]))
    return len(allowed) > 0 or choices > 1


def _short(error: str) -> str:
    """llguidance's message without the place in our text of the grammar, and without the state that it prints after it."""
    lines = error[:_ERROR_CHARS_MAX].split("\n")
    end = next((at for at, line in enumerate(lines) if at and _NOT_FOR_USERS.match(line)), len(lines))
    return " ".join(_PLACE.sub("", "\n".join(lines[:end])).split())[:300]
