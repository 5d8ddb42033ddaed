"""Grammars are compiled and followed within limits, and a replayed answer is in the state that it was left in."""

import time
from itertools import pairwise

import numpy as np
import pytest

from gateway.structured.lark import Grammar
from runtime.grammar.compiler import Compiler, GrammarError, Matcher, make_tokenizer
from tests import tiny_models

HOSTILE_S = 1.0  # far above what the slowest step takes here, far below what a matcher without limits takes
TOKENIZER = tiny_models.tokenizer()


def compiler() -> Compiler:
    serialized = TOKENIZER.backend_tokenizer.to_str()
    return Compiler(make_tokenizer(serialized, tiny_models.VOCAB, [tiny_models.EOS]), tiny_models.VOCAB)


def ids(text: str) -> list[int]:
    found: list[int] = TOKENIZER.encode(text, add_special_tokens=False)
    return found


def regex(pattern: str) -> str:
    grammar = Grammar(lambda text: [text])
    return grammar.text(grammar.regex(pattern))


def allowed(matcher: Matcher) -> set[int]:
    return set(np.flatnonzero(np.isfinite(matcher.mask(np.zeros(tiny_models.VOCAB, np.float32)))).tolist())


def test_grammar_masks_follow_the_answer() -> None:
    """The allowed tokens follow the grammar, and the end token is allowed once the answer is complete."""
    matcher = compiler().matcher(regex("ab?"), ())
    assert allowed(matcher) == set(ids("a"))
    matcher.accept(ids("a")[0])
    assert allowed(matcher) == {*ids("b"), tiny_models.EOS} and matcher.is_complete
    matcher.accept(ids("b")[0])
    assert allowed(matcher) == {tiny_models.EOS}


def test_allowed_logits_stay_unchanged() -> None:
    """The mask leaves the logits of allowed tokens as they are."""
    row = np.random.default_rng(1).normal(size=tiny_models.VOCAB).astype(np.float32)
    masked = compiler().matcher(regex("[a-z]"), ()).mask(row)
    kept = np.isfinite(masked)
    assert kept.sum() == 26 and (masked[kept] == row[kept]).all()


def test_replayed_answer_continues_alike() -> None:
    """A matcher that replays an answer allows the same tokens as the first one."""
    made, text = compiler(), "ab-12 cd-3 "
    grammar = regex("([a-d]{2}-[0-9]{1,3} ){2,4}!")
    first = made.matcher(grammar, ())
    for at, token in enumerate(ids(text)):
        assert (
            allowed(first)
            == allowed(made.matcher(grammar, ids(text)[:at]))
            == allowed(compiler().matcher(grammar, ids(text)[:at]))
        )
        first.accept(token)
    assert set(ids("!")) <= allowed(made.matcher(grammar, ids(text)))
    assert not set(ids("!")) & allowed(made.matcher(grammar, ids("ab-12 ")))


def test_unfitting_token_allows_nothing() -> None:
    """A token that does not fit the grammar leaves no token allowed."""
    matcher = compiler().matcher(regex("ab"), ids("x"))
    assert allowed(matcher) == set()


@pytest.mark.parametrize("grammar", [regex("(a"), regex("(?=a)b"), "start: nothing", "nonsense"])
def test_uncompilable_grammar_is_refused(grammar: str) -> None:
    """A grammar that cannot be compiled is refused with a short reason."""
    with pytest.raises(GrammarError) as caught:
        compiler().matcher(grammar, ())
    assert 5 < len(str(caught.value)) <= 300


@pytest.mark.parametrize(
    "grammar",
    [
        regex("(a+)+b"),
        regex("(a*)*(a*)*b"),
        regex("(((a{1,20}){1,20}){1,20}){1,20}b"),
        'start: start start | "a"',
        'start: s "b"\ns: s s s | s s | "a" | ""',
        'start: x x x\nx: y y | ""\ny: z* z* z*\nz: "a"* | "aa"* | x',
    ],
)
def test_hostile_grammar_costs_little(grammar: str) -> None:
    """It may fail at some token, in which case the stream does. It never takes long."""
    matcher = compiler().matcher(grammar, ())
    times = [time.thread_time()]
    for _ in range(300):
        if not allowed(matcher):
            break
        matcher.accept(ids("a")[0])
        times.append(time.thread_time())
    assert max((after - before for before, after in pairwise(times)), default=0.0) < HOSTILE_S


def test_compiled_grammar_cache_is_bounded() -> None:
    """Compiled grammars are kept up to a fixed number."""
    made = compiler()
    for number in range(300):
        made.compile(regex(f"a{{{number + 1}}}"))
    assert len(made._compiled) == 128
    assert allowed(made.matcher(regex("a{300}"), ())) == set(ids("a"))


@pytest.mark.parametrize("beyond", [-58, 1, 40])
def test_any_vocabulary_has_grammars(beyond: int) -> None:
    """A model may have more or fewer tokens than its tokenizer: masks are as long as its logits."""
    tokens = TOKENIZER.backend_tokenizer.get_vocab_size()
    vocab = tokens - beyond
    made = Compiler(make_tokenizer(TOKENIZER.backend_tokenizer.to_str(), vocab, [tiny_models.EOS, tokens - 1]), vocab)
    matcher = made.matcher(regex("[a-c]"), ())
    kept = np.isfinite(matcher.mask(np.zeros(vocab, np.float32)))
    assert set(np.flatnonzero(kept).tolist()) == {token for letter in "abc" for token in ids(letter)}
    matcher.accept(ids("a")[0])
    assert np.isfinite(matcher.mask(np.zeros(vocab, np.float32)))[tiny_models.EOS]
