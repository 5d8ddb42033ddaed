"""The text of each token, for log probabilities: its characters, and its bytes.

A token's text depends on what comes before it: decoders of the SentencePiece kind drop the space at the start of a text,
and a character may take several tokens. The last token of such a character has its text, and each token has its own bytes.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

from gateway.text.detokenize import Decode, Detokenizer

_CACHE_TOKENS: Final = 1 << 16


class Pieces:
    """Texts and bytes of single tokens, behind other text or at the start of one. Thread-safe."""

    def __init__(self, backend: Any, *, byte_level: bool) -> None:
        """`backend`: a `tokenizers.Tokenizer`."""
        self._backend = backend
        self._byte_level = byte_level
        self.anchor: list[int] = backend.encode("a", add_special_tokens=False).ids[-1:]
        """A token in front of others: they are decoded as behind text."""
        self._anchor_text = self._decode(self.anchor)
        self.text = lru_cache(_CACHE_TOKENS)(self._text)
        self.bytes = lru_cache(_CACHE_TOKENS)(self._bytes)

    def _decode(self, ids: list[int]) -> str:
        text: str = self._backend.decode(ids, skip_special_tokens=False)
        return text

    def _text(self, token: int, at_start: bool) -> str:
        """Returns the token's text. A special token has its name as text, and a token that is only a part of a character has a
        broken character."""
        behind = self._decode([*self.anchor, token])
        if at_start or not behind.startswith(self._anchor_text):
            return self._decode([token])
        return behind.removeprefix(self._anchor_text)

    def _bytes(self, token: int, at_start: bool) -> bytes:
        """Its UTF-8 bytes, which need not be whole characters."""
        piece: str | None = self._backend.id_to_token(token)
        text = self._text(token, at_start)
        if piece is not None and len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes([int(piece[3:5], 16)]) if text else b""
        if piece is not None and self._byte_level and all(char in _BYTE_OF for char in piece):
            return bytes(_BYTE_OF[char] for char in piece)
        return text.encode()


class TokenTexts:
    """Gives each token of one text its own text, in order. These texts, joined, are the decoding of the whole."""

    def __init__(self, pieces: Pieces, decode: Decode, special_ids: frozenset[int], behind: Sequence[int] = ()) -> None:
        """`behind`: as of `Detokenizer`."""
        self._pieces = pieces
        self._detokenizer = Detokenizer(decode, special_ids, behind)
        self._special_ids = special_ids
        self.at_start = not behind
        self.chars = 0

    def push(self, token: int, *, is_last: bool = False, is_text: bool = True) -> tuple[str, bytes]:
        """Returns the text that this token makes certain, and the token's bytes. Both are empty for a special token and for a
        token that ends the text but is not part of it (`is_text` false). The last token also returns the rest of the text."""
        text, own = "", b""
        if is_text and token not in self._special_ids:
            own = self._pieces.bytes(token, self.at_start)
            text = self._detokenizer.push(token)
            self.at_start = False
        if is_last:
            text += self._detokenizer.finish()
        self.chars += len(text)
        return text, own

    def name(self, token: int, text: str, *, is_text: bool = True) -> str:
        """Returns what lists of tokens show for a token for which `push` returned this text. As in vLLM, a token that is no
        part of the text has its name."""
        if text or (is_text and token not in self._special_ids):
            return text
        return self._pieces.text(token, at_start=False)

    def candidate(self, token: int) -> tuple[str, bytes]:
        """Returns the text and bytes that `token` would have if it came next."""
        return self._pieces.text(token, self.at_start), self._pieces.bytes(token, self.at_start)


def _bytes_to_chars() -> dict[str, int]:
    """The byte-level alphabet of GPT-2: printable bytes stand for themselves, the others are moved up by 256."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    chars = {chr(byte): byte for byte in printable}
    return chars | {chr(256 + number): byte for number, byte in enumerate(others)}


_BYTE_OF = _bytes_to_chars()
