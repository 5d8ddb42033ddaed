"""Loads what the gateway needs of a model's files, and says which of them is at fault.

Importing this module costs little: transformers is imported on loading, and torch not at all for tokenizers of the generic
class, which `AutoTokenizer` would pull in (measured: 1.1 s instead of 5 s until the tokenizer is there).
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from gateway.text.tokenizer import ModelFacts, ModelTokenizer, SamplingDefaults, sampling_defaults
from proto.errors import CrossdockError
from proto.limits import context_tokens

_GENERIC_CLASSES: Final = {"TokenizersBackend", "PreTrainedTokenizerFast"}
_DOWNLOAD: Final = ["*.json", "*.jinja", "*.model", "*.txt"]
_POINTER: Final = "version https://git-lfs.github.com/"


class ModelFilesError(CrossdockError):
    """The model's tokenizer or configuration cannot be used; `str()` says why and which model."""


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
        _read(source, "chat_template.jinja")
        tokenizer_config = _read_json(source, "tokenizer_config.json") or {}
        generic = tokenizer_config.get("tokenizer_class") in _GENERIC_CLASSES
        loader = transformers.PreTrainedTokenizerFast if generic else transformers.AutoTokenizer
        tokenizer = loader.from_pretrained(source, trust_remote_code=False)
        generation = _read_json(source, "generation_config.json") or {}
        facts = _facts(source, config, generation, tokenizer)
        if model_sampling:
            facts = replace(facts, sampling=_sampling(model, generation))
        if not getattr(tokenizer, "is_fast", False):
            raise ModelFilesError(f"{model}: its tokenizer has no fast version (tokenizer.json), which crossdock needs")
        return ModelTokenizer(tokenizer, facts)
    except ModelFilesError:
        raise
    except Exception as error:
        raise ModelFilesError(_cause(model, source, error)) from error


def _cause(model: str, source: str, error: Exception) -> str:
    """Returns why the tokenizer could not be loaded."""
    try:
        if _read_json(source, "tokenizer.json") is None:
            how = "AutoTokenizer.from_pretrained(...).save_pretrained(...)"
            return f"{model}: has no tokenizer.json, which crossdock needs; with transformers, {how} writes one"
    except ModelFilesError as fault:
        return str(fault)
    if "trust_remote_code" in str(error):
        return f"{model}: its tokenizer needs code from its repository, which crossdock does not run"
    return f"{model}: its tokenizer or configuration cannot be used: {' '.join(str(error).split())[:300]}"


def _read(source: str, name: str) -> str | None:
    """Returns the text of a file of the model, from its folder or from the hub; None where the model has none. Raises
    `ModelFilesError`."""
    from transformers.utils.hub import cached_file

    path = cached_file(source, name, _raise_exceptions_for_missing_entries=False)
    if path is None:
        return None
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise ModelFilesError(f"{source}: {name} is not UTF-8 text: copy or download it again") from None
    if text.startswith(_POINTER):
        raise ModelFilesError(
            f"{source}: {name} is not there, only a pointer of Git LFS: run git lfs pull in its folder, or download it"
        )
    return text


def _read_json(source: str, name: str) -> dict[str, Any] | None:
    """Returns a JSON file of the model; None where the model has none. Raises `ModelFilesError`."""
    text = _read(source, name)
    if text is None:
        return None
    try:
        content = json.loads(text)
    except ValueError as error:
        raise ModelFilesError(f"{source}: {name} is not JSON, copy or download it again: {error}") from None
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
        length = getattr(full, "max_position_embeddings", None)  # some classes have it by another name
        context, vocab = context_tokens({"max_position_embeddings": length, **full.to_dict()}), int(full.vocab_size)
        if context is None:  # no worker serves it either
            raise ModelFilesError(f"{source}: its configuration does not say how long a context may be")
    eos: set[int] = set()
    for value in (generation.get("eos_token_id"), text.get("eos_token_id"), tokenizer.eos_token_id):
        eos.update(value if isinstance(value, list) else [] if value is None else [value])
    known = frozenset(token for token in eos if token < vocab)  # the tokenizer may have more tokens than the model
    return ModelFacts(context, vocab, known)
