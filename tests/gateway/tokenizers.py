"""Tokenizers of the kinds that models have, small and made on the fly."""

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from gateway.text.tokenizer import ModelFacts, ModelTokenizer
from tests import tiny_models

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def sentencepiece_like() -> Tokenizer:
    """Metaspace pieces with byte fallback, and the decoder that strips the first space: Llama 2's kind."""
    pieces = ["<unk>", *BYTES, *"▁abcdehlorw.!H", "▁h", "▁w", "lo"]
    merges = [("▁", "h"), ("▁", "w"), ("l", "o")]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    raw = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True))
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    raw.decoder = decoders.Sequence(steps)
    return raw


def unigram() -> Tokenizer:
    """Metaspace as pre-tokenizer and decoder, with byte fallback: T5's and XLM's kind."""
    pieces = ["<unk>", *BYTES, "▁", *"abcdehlorw.!H", "▁h", "▁w", "lo", "▁Hello", "▁world", "▁▁"]
    vocab = [(piece, -10.0 if len(piece) == 1 else -2.0 * len(piece)) for piece in pieces]
    raw = Tokenizer(models.Unigram(vocab, unk_id=0, byte_fallback=True))
    raw.pre_tokenizer = pre_tokenizers.Metaspace()
    raw.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return raw


def word_piece() -> Tokenizer:
    """BERT's kind: no byte of its own has a token."""
    pieces = ["[UNK]", *"abcdehlorw.!", *(f"##{char}" for char in "abcdehlorw"), "hello", "world"]
    raw = Tokenizer(models.WordPiece({piece: index for index, piece in enumerate(pieces)}, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    raw.decoder = decoders.WordPiece()
    return raw


def wrapped(raw: Tokenizer) -> ModelTokenizer:
    """As a model's, with the special token `<end>`, which is the last id."""
    raw.add_special_tokens([AddedToken("<end>", special=True)])
    end = raw.token_to_id("<end>")
    template = "{{ messages[0]['content'] }}"
    fast = PreTrainedTokenizerFast(tokenizer_object=raw, chat_template=template)
    return ModelTokenizer(fast, ModelFacts(512, end + 1, frozenset({end})))  # type: ignore[arg-type, operator]


def byte_level() -> ModelTokenizer:
    return ModelTokenizer(tiny_models.tokenizer(), ModelFacts(512, tiny_models.VOCAB, frozenset({tiny_models.EOS})))
