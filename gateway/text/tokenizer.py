"""A model's tokenizer and chat template, and the few values of its configuration that the gateway needs. `model_files` loads
them."""

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from gateway.text.detokenize import BROKEN, CONTEXT_TOKENS, Assembler, Detokenizer
from gateway.text.regions import NO_REGIONS, Regions
from gateway.text.template_facts import TemplateError, as_parts, template_facts, with_content_forms
from gateway.text.token_texts import Pieces, TokenTexts
from proto import limits
from proto.parts import Room

_OF_TEMPLATES = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
_TEMPLATE_CHARS_MAX = 32 << 20
_SLICE_CHARS = 1 << 18
_END_TOKENS_MAX = 64
_LONG_TOKENS = 4096  # longer lists are decoded without the interpreter's lock


class TextTooLong(Exception):
    """The text has more tokens than any model's context."""


_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "top_k": (-1, limits.MAX_VOCAB - 1),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.0, 100.0),
}
_ABOVE_MIN = frozenset({"top_p", "repetition_penalty"})  # Fields whose lower bound itself is not allowed


@dataclass(frozen=True)
class SamplingDefaults:
    """The values that apply if a request leaves a field out or sends null. The defaults here are OpenAI's."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    repetition_penalty: float = 1.0


def sampling_defaults(generation_config: dict[str, Any]) -> SamplingDefaults:
    """Read the file as vLLM does: use the values and ignore `do_sample`. Raises ValueError for a value that is out of
    bounds."""
    found: dict[str, Any] = {}
    for one in fields(SamplingDefaults):
        value = generation_config.get(one.name)
        if value is None:
            continue
        low, high = _RANGES[one.name]
        kinds = (int,) if one.name == "top_k" else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds) or not math.isfinite(value):
            raise ValueError(f"generation_config.json: {one.name} is {value!r}, which is not a number as it should be")
        if not low <= value <= high or (value == low and one.name in _ABOVE_MIN):
            raise ValueError(
                f"generation_config.json: {one.name} is {value}, which is not between {low:g} and {high:g}"
            )
        found[one.name] = max(value, 0) if one.name == "top_k" else float(value)
    return SamplingDefaults(**found)


@dataclass(frozen=True)
class ModelFacts:
    context_tokens: int  # prompt and answer; by the configuration until workers of the model are known
    vocab_size: int  # Token ids below it are the model's, whether or not the tokenizer knows them
    eos_ids: frozenset[int]
    sampling: SamplingDefaults = field(default_factory=SamplingDefaults)
    room: Room | None = None  # of the workers, as the coordinator last said

    def within(self, room: Room) -> "ModelFacts":
        """Returns the facts for workers with this room."""
        return replace(self, context_tokens=min(room.context_tokens, room.kv_blocks * room.block_size), room=room)

    @property
    def prompt_tokens_max(self) -> int:
        """The longest prompt that leaves room for one token."""
        longest = self.context_tokens - 1
        return longest if self.room is None else min(longest, self.room.prompt_tokens)

    def answer_tokens_max(self, prompt_tokens: int, choices: int) -> int:
        """Returns the most tokens that each of so many answers to one prompt can have. They share the prompt's full blocks."""
        left = self.context_tokens - prompt_tokens
        if self.room is None:
            return left
        size = self.room.block_size
        shared = prompt_tokens // size
        own = (self.room.kv_blocks - shared) // choices
        return min(left, (shared + own) * size - prompt_tokens)


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
        if self.has_chat_template:
            self.template = with_content_forms(self.template, self.apply_template)
        added = self._backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._marks = {
            token.content: token_id
            for token_id, token in added.items()
            if token_id < facts.vocab_size and (token.special or _is_mark(token.content))
        }
        byte_level = _kind(self._backend.decoder, "ByteLevel")
        self._pieces = Pieces(self._backend, byte_level=byte_level)
        self.suits_grammars = byte_level or _kind(self._backend.decoder, "ByteFallback")
        """Whether each byte certainly has a token. If not, llguidance may refuse the tokenizer."""
        self.ids_end = max(facts.vocab_size, *(token + 1 for token in self._backend.get_vocab().values()))
        """Token ids of the model and of its tokenizer are below it."""
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

        for message in messages:
            if message["content"] and message["role"] in self.template.hidden_roles:
                raise TemplateError(f"the model's chat template does not show messages of the role {message['role']!r}")
        try:
            text = self._hf.apply_chat_template(
                as_parts(messages, self.template.roles_in_parts),
                tools=tools or None,
                tokenize=False,
                add_generation_prompt=True,
                **options,
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

    def token_texts(self, *, keeps_special: bool = False, behind: Sequence[int] = ()) -> TokenTexts:
        """Returns the texts of tokens for the log probabilities of one choice. `keeps_special`: whether the choice's text
        contains special tokens. `behind`: as of `Detokenizer`."""
        if keeps_special:
            return TokenTexts(self._pieces, self.decode_all, frozenset(), behind)
        return TokenTexts(self._pieces, self.decode, self.special_ids, behind)

    def end_of(self, prompt: Sequence[int], *, keeps_special: bool) -> list[int]:
        """Returns the prompt's last tokens, as many as decide how the text behind them is decoded. `keeps_special`: whether the
        text shows special tokens."""
        skipped = frozenset[int]() if keeps_special else self.special_ids
        shown = [token for token in prompt[-_END_TOKENS_MAX:] if token not in skipped]
        for start in range(max(len(shown) - CONTEXT_TOKENS, 0), -1, -1):
            first = self.decode_all(shown[start : start + 1])
            if first and BROKEN not in first:  # a decoder may strip the first token, or show half a character
                return shown[start:]
        return shown[-CONTEXT_TOKENS:]

    @property
    def anchor(self) -> list[int]:
        """Returns a token. Behind it, texts keep a space at their start."""
        return self._pieces.anchor

    def token_text(self, token: int) -> str:
        """Returns the text of a token that is behind other tokens. A special token has its name as text."""
        return self._pieces.text(token, at_start=False)

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
        behind: Sequence[int] = (),
    ) -> Callable[[], Assembler]:
        """Returns a function that makes an assembler for each choice. `keeps_special`: all special tokens are part of the
        text; otherwise only those in `keep` are. `regions`: parts of the text that are not searched for stop strings.
        `behind`: as of `Detokenizer`."""
        skipped = frozenset[int]() if keeps_special else self.special_ids - keep
        decode = self.decode if skipped == self.special_ids else self.decode_all
        return lambda: Assembler(
            Detokenizer(decode, skipped, behind), stops, keeps_stop=keeps_stop, min_tokens=min_tokens, regions=regions
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

    def info(self) -> dict[str, Any]:
        """Returns the special tokens and the chat template, with which a client can make prompts itself."""
        names = ("bos_token", "eos_token", "pad_token", "unk_token", "chat_template")
        return {"tokenizer_class": type(self._hf).__name__} | {name: getattr(self._hf, name, None) for name in names}

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
