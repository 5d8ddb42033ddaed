"""Text in pieces is the text as a whole, and stop strings are found wherever the pieces end."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gateway.text.detokenize import Assembler, Detokenizer, StopMatcher
from tests.gateway.fakes import tokenizer
from tests.gateway.tokenizers import sentencepiece_like
from tests.tiny_models import SPECIAL

BYTE_LEVEL = tokenizer()


SENTENCEPIECE = sentencepiece_like()
texts = st.text(alphabet=st.sampled_from("ab hé日本語🌍👩‍🚀.\n") | st.characters(codec="utf-8"), max_size=60)
byte_level_ids = st.lists(st.integers(0, len(SPECIAL) + 255), max_size=150)


def in_pieces(detokenizer: Detokenizer, ids: list[int]) -> list[str]:
    return [*(detokenizer.push(token) for token in ids), detokenizer.finish()]


@settings(deadline=None)
@given(byte_level_ids)
@example([len(SPECIAL) + 200] * 120)
@example([2] * 40)
def test_pieces_add_up_to_decoded_text(ids: list[int]) -> None:
    """The pieces of any tokens add up to their text decoded as a whole."""
    pieces = in_pieces(Detokenizer(BYTE_LEVEL.decode, BYTE_LEVEL.special_ids), ids)
    assert "".join(pieces) == BYTE_LEVEL.decode(ids)


@settings(deadline=None)
@given(texts, st.integers(0, 100), st.booleans())
def test_text_comes_when_characters_complete(text: str, at: int, special: bool) -> None:
    """Text is given out as soon as its characters are complete, and never broken."""
    ids = BYTE_LEVEL.encode(text, add_special_tokens=False)
    if special:
        ids.insert(min(at, len(ids)), 2)
    detokenizer = Detokenizer(BYTE_LEVEL.decode, BYTE_LEVEL.special_ids)
    pieces = in_pieces(detokenizer, ids)
    assert "".join(pieces) == text
    if "�" not in text:
        assert not any("�" in piece for piece in pieces)
        assert pieces[-1] == ""


@settings(deadline=None)
@given(texts.filter(lambda text: "�" not in text))  # which looks like a broken character, and may come out as one
@example("日本語🌍🚀" * 12)
@example("hello world " * 12)
def test_sentencepiece_byte_fallback_is_decoded(text: str) -> None:
    """The pieces of a SentencePiece tokenizer with byte fallback add up to the whole text."""
    ids = SENTENCEPIECE.encode(text).ids
    pieces = in_pieces(Detokenizer(lambda window: SENTENCEPIECE.decode(list(window)), frozenset()), ids)
    assert "".join(pieces) == SENTENCEPIECE.decode(ids)


def test_decoding_window_stays_small() -> None:
    """The number of tokens decoded at once stays small, even for bytes that never make a character."""
    longest = 0

    def decode(ids: object) -> str:
        nonlocal longest
        assert isinstance(ids, list)
        longest = max(longest, len(ids))
        return BYTE_LEVEL.decode(ids)

    detokenizer = Detokenizer(decode, BYTE_LEVEL.special_ids)
    ids = [len(SPECIAL) + 150] * 500 + BYTE_LEVEL.encode("plain text, 日本語 " * 40, add_special_tokens=False)
    assert "".join(in_pieces(detokenizer, ids)) == BYTE_LEVEL.decode(ids)
    assert longest <= 32


def naive_cut(text: str, stops: list[str]) -> tuple[str, bool]:
    """Grow the text by characters until it ends in a stop string."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(len(stop) for stop in ending)], True
    return text, False


@given(
    st.lists(st.text(alphabet="ab🌍", max_size=4), max_size=12),
    st.lists(st.text(alphabet="ab🌍", min_size=1, max_size=4), max_size=4),
)
@example(["a", "a", "b"], ["aab"])
@example(["aab", "b"], ["abb", "b"])
def test_stop_matcher_equals_naive_search(pieces: list[str], stops: list[str]) -> None:
    """The stop matcher cuts any pieces where a naive search of the whole text does."""
    matcher = StopMatcher(stops)
    given_out = ""
    for piece in pieces:
        given_out += matcher.push(piece)
        if matcher.found:
            break
    expected, stopped = naive_cut("".join(pieces), stops)
    if not matcher.found:
        given_out += matcher.finish()
    assert (given_out, bool(matcher.found)) == (expected, stopped)


def test_only_possible_stop_is_held_back() -> None:
    """Text is held back only while it may be the start of a stop string."""
    matcher = StopMatcher(["END"])
    assert matcher.push("text E") == "text "
    assert matcher.push("x") == "Ex"
    assert matcher.push("EN") == ""
    assert matcher.finish() == "EN"


@pytest.mark.parametrize(("stop", "text"), [("END", "a b "), ("🌍", "a b END"), ("a", ""), ("none", "a b END🌍 c")])
def test_assembler_cuts_before_stop_string(stop: str, text: str) -> None:
    """The assembler gives out the text up to the stop string and names the string."""
    assembler = Assembler(Detokenizer(BYTE_LEVEL.decode, BYTE_LEVEL.special_ids), [stop])
    got = ""
    for token in BYTE_LEVEL.encode("a b END🌍 c", add_special_tokens=False):
        piece = assembler.push(token)
        got += piece.text
        if piece.stop:
            assert piece.stop == stop
            break
    else:
        got += assembler.finish().text
    assert got == text
