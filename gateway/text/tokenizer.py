"""A model's tokenizer and chat template, and the few values of its configuration that the gateway needs.

Importing this module costs little: transformers is imported on loading, and torch not at all for tokenizers of the generic
class, which `AutoTokenizer` would pull in (measured: 1.1 s instead of 5 s until the tokenizer is there).
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gateway.text.detokenize import Assembler, Detokenizer
from gateway.text.generation_config import SamplingDefaults, sampling_defaults
from gateway.text.regions import NO_REGIONS, Regions
from gateway.text.template_facts import template_facts
from gateway.text.token_texts import Pieces, TokenTexts
from proto import limits
from proto.errors import CrossdockError
from proto.limits import context_tokens

_GENERIC_CLASSES = {"TokenizersBackend", "PreTrainedTokenizerFast"}
_DOWNLOAD = ["*.json", "*.jinja", "*.model", "*.txt"]
_OF_TEMPLATES = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""Errors that the expressions of a template may raise."""
_TEMPLATE_CHARS_MAX = 32 << 20
_SLICE_CHARS = 1 << 18
_LONG_TOKENS = 4096
"""Longer lists are decoded without holding the interpreter's lock. Shorter ones are not, since getting the lock again takes a
moment."""


class ModelFilesError(CrossdockError):
    """The model's tokenizer or configuration cannot be used; `str()` says why and which model."""


class TemplateError(Exception):
    """The chat template does not take these messages; `str()` is for the user."""


class TextTooLong(Exception):
    """The text has more tokens than any model's context."""


@dataclass(frozen=True)
class ModelFacts:
    context_tokens: int
    vocab_size: int
    """Token ids below it are the model's, whether or not the tokenizer knows them."""
    eos_ids: frozenset[int]
    sampling: SamplingDefaults = field(default_factory=SamplingDefaults)


class ModelTokenizer:
    """Thread-safe: `encode`, `apply_template` and `decode` may run on several threads at once."""

    def __init__(self, hf_tokenizer: Any, facts: ModelFacts) -> None:
        self._hf = hf_tokenizer
        self._backend = hf_tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self.facts = facts
        self.has_chat_template = bool(hf_tokenizer.chat_template)
        self.template = template_facts(hf_tokenizer)
        added = self._backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._marks = {
            token.content: token_id for token_id, token in added.items() if token.special or _is_mark(token.content)
        }
        self._pieces = Pieces(self._backend, byte_level=_kind(self._backend.decoder, "ByteLevel"))
        self.bytes_per_token_max = _bytes_per_token_max(self._backend)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Raises `TextTooLong`."""
        if len(text) > limits.MAX_CONTEXT_TOKENS:
            # Tokenizing takes 150 bytes per token, so count the tokens in slices first. Tokens may differ where a slice ends,
            # but only a few.
            tokens = 0
            for at in range(0, len(text), _SLICE_CHARS):
                tokens += len(self._encoding(text[at : at + _SLICE_CHARS], add_special_tokens=False))
                if tokens > 2 * limits.MAX_CONTEXT_TOKENS:
                    raise TextTooLong
        encoding = self._encoding(text, add_special_tokens=add_special_tokens)
        if len(encoding) > limits.MAX_CONTEXT_TOKENS:
            raise TextTooLong
        ids: list[int] = encoding.ids
        return ids

    def _encoding(self, text: str, *, add_special_tokens: bool) -> Any:
        # Encode as a batch: plain `encode` would hold the interpreter's lock, and so block the event loop, until it is done.
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoding

    def apply_template(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None, **options: Any
    ) -> str:
        """Raises `TemplateError`. The template is the model's, and runs in transformers' sandbox."""
        from jinja2 import TemplateError as JinjaError

        try:
            text = self._hf.apply_chat_template(
                messages, tools=tools or None, tokenize=False, add_generation_prompt=True, **options
            )
        except (JinjaError, *_OF_TEMPLATES) as error:
            raise TemplateError(f"the model's chat template does not take these messages: {str(error)[:300]}") from None
        assert isinstance(text, str)
        if len(text) > _TEMPLATE_CHARS_MAX:
            raise TemplateError(
                f"the model's chat template makes more than {_TEMPLATE_CHARS_MAX} characters of these messages"
            )
        return text

    def decode(self, ids: Sequence[int]) -> str:
        """As text, without special tokens."""
        return self._decode(ids, skip_special_tokens=True)

    def decode_all(self, ids: Sequence[int]) -> str:
        """As text, special tokens included."""
        return self._decode(ids, skip_special_tokens=False)

    def _decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        if len(ids) > _LONG_TOKENS:
            (text,) = self._backend.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)
        else:
            text = self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        assert isinstance(text, str)
        return text

    def token_texts(self, *, keeps_special: bool = False) -> TokenTexts:
        """Returns the texts of tokens for the log probabilities of one choice. `keeps_special`: whether the choice's text
        contains special tokens."""
        if keeps_special:
            return TokenTexts(self._pieces, self.decode_all, frozenset())
        return TokenTexts(self._pieces, self.decode, self.special_ids)

    def token_name(self, token: int) -> str:
        """Returns the token as the vocabulary writes it, or an empty string if the tokenizer does not know the id."""
        name: str | None = self._backend.id_to_token(token)
        return name or ""

    def text_sink(
        self,
        stops: Sequence[str],
        *,
        keeps_stop: bool = False,
        min_tokens: int = 0,
        keeps_special: bool = False,
        keep: frozenset[int] = frozenset(),
        regions: Regions = NO_REGIONS,
    ) -> Callable[[], Assembler]:
        """Returns a function that makes an assembler for each choice. `keeps_special`: all special tokens are part of the
        text; otherwise only those in `keep` are. `regions`: parts of the text that are not searched for stop strings."""
        skipped = frozenset[int]() if keeps_special else self.special_ids - keep
        decode = self.decode if skipped == self.special_ids else self.decode_all
        return lambda: Assembler(
            Detokenizer(decode, skipped), stops, keeps_stop=keeps_stop, min_tokens=min_tokens, regions=regions
        )

    def split_special(self, text: str, *, shown: bool = False) -> list[str | int]:
        """Split a text at its special tokens, and put their ids in their places. As in llguidance, an added token `<…>` counts
        as special. `shown`: tokens that the tokenizer itself marks as special stay text, since answers do not show them."""
        longest_first = sorted(self._marks, key=len, reverse=True)
        found: list[str] = re.split(f"({'|'.join(map(re.escape, longest_first))})", text) if self._marks else [text]
        ids = [(part, self._marks.get(part)) for part in found if part]
        return [part if id is None or (shown and id in self.special_ids) else id for part, id in ids]

    def mark_id(self, text: str) -> int | None:
        """Returns the id of the special token that is written like this text, or None."""
        return self._marks.get(text)

    def serialized(self) -> str:
        """As tokenizer.json."""
        text: str = self._backend.to_str()
        return text

    def surely_too_long(self, text_bytes: int, context_tokens: int) -> bool:
        """Returns whether a text of `text_bytes` bytes certainly has more than `context_tokens` tokens. The text is not
        tokenized."""
        return self.bytes_per_token_max is not None and text_bytes > context_tokens * self.bytes_per_token_max


def _is_mark(text: str) -> bool:
    return len(text) > 2 and text.startswith("<") and text.endswith(">")


def _parts(component: Any) -> list[dict[str, Any]]:
    """Returns the settings of a tokenizer component as a list. A sequence of components gives one entry for each."""
    if component is None:
        return []
    settings = json.loads(component.__getstate__())
    for key in ("pretokenizers", "normalizers", "decoders"):
        if key in settings:
            return list(settings[key])
    return [settings]


def _kind(component: Any, name: str) -> bool:
    return any(part["type"] == name for part in _parts(component))


def _bytes_per_token_max(backend: Any) -> int | None:
    """Returns the most UTF-8 bytes of a text that one token can cover, or None if no such bound can be proved.

    Every byte of the text must end up in some token. Byte-level pre-tokenization ensures this, unless a normalizer, a splitter
    or an added token that strips white space removes some bytes. NFC shortens a text to a quarter at the most.
    """
    splitters, normalizers = _parts(backend.pre_tokenizer), _parts(backend.normalizer)
    if not any(part["type"] == "ByteLevel" for part in splitters):
        return None
    if any(part.get("behavior") == "Removed" or part["type"].startswith("Whitespace") for part in splitters):
        return None
    if any(part["type"] != "NFC" for part in normalizers):
        return None
    if any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values()):
        return None
    # In the byte-level alphabet a character is a byte; an added token is written as it is.
    longest = max(len(piece.encode()) for piece in backend.get_vocab())
    return longest * (4 if normalizers else 1)


# --- loading ----------------------------------------------------------------------------------------------------------


def load(model: str, *, model_sampling: bool = True) -> ModelTokenizer:
    """Load tokenizer and facts of a folder, ORG/NAME or ORG/NAME@REVISION; `model_sampling`: with the sampling defaults of its
    generation_config.json. Raises `ModelFilesError`."""
    import transformers

    path = Path(model).expanduser()
    source = str(path) if path.is_dir() else model
    name, _, revision = model.partition("@")
    if not path.is_dir() and (model.startswith(("/", ".", "~")) or name.count("/") > 1):
        raise ModelFilesError(f"{model}: there is no such folder")
    try:
        if not path.is_dir() and revision:
            from huggingface_hub import snapshot_download

            source = snapshot_download(name, revision=revision, allow_patterns=_DOWNLOAD)
        config = _read_json(source, "config.json")
        if config is None:
            raise ModelFilesError(f"{model}: has no config.json")
        tokenizer_config = _read_json(source, "tokenizer_config.json") or {}
        generic = tokenizer_config.get("tokenizer_class") in _GENERIC_CLASSES
        loader = transformers.PreTrainedTokenizerFast if generic else transformers.AutoTokenizer
        tokenizer = loader.from_pretrained(source, trust_remote_code=False)
        generation = _read_json(source, "generation_config.json") or {}
        facts = _facts(source, config, generation, tokenizer)
        if model_sampling:
            facts = replace(facts, sampling=_sampling(model, generation))
    except (OSError, ValueError, KeyError, ImportError, AttributeError, TypeError) as error:  # of odd files, too
        raise ModelFilesError(f"{model}: its tokenizer cannot be loaded: {str(error)[:500]}") from error
    if not getattr(tokenizer, "is_fast", False):
        raise ModelFilesError(f"{model}: its tokenizer has no fast version (tokenizer.json), which crossdock needs")
    return ModelTokenizer(tokenizer, facts)


def _read_json(source: str, name: str) -> dict[str, Any] | None:
    """A JSON file of the model, from its folder or from the hub; None where the model has none."""
    from transformers.utils.hub import cached_file

    path = cached_file(source, name, _raise_exceptions_for_missing_entries=False)
    if path is None:
        return None
    content = json.loads(Path(path).read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ModelFilesError(f"{source}: {name} is not a JSON object")
    return content


def _sampling(model: str, generation: dict[str, Any]) -> SamplingDefaults:
    try:
        return sampling_defaults(generation)
    except ValueError as error:
        raise ModelFilesError(f"{model}: {error}; mend it, or pass --generation-config none") from None


def _facts(source: str, config: dict[str, Any], generation: dict[str, Any], tokenizer: Any) -> ModelFacts:
    text = {**config, **config.get("text_config", {})}
    context = context_tokens(config)
    vocab = text.get("vocab_size")
    if context is None or not isinstance(vocab, int):
        # Left at the default of the model's class, which only the class knows.
        from transformers import AutoConfig

        full = AutoConfig.from_pretrained(source, trust_remote_code=False).get_text_config()
        context, vocab = context_tokens(full.to_dict()) or limits.MAX_CONTEXT_TOKENS, int(full.vocab_size)
    eos: set[int] = set()
    for value in (generation.get("eos_token_id"), text.get("eos_token_id"), tokenizer.eos_token_id):
        eos.update(value if isinstance(value, list) else [] if value is None else [value])
    return ModelFacts(context, vocab, frozenset(eos))
