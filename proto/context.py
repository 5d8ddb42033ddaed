"""The context of a model, from its configuration: the one rule for workers and gateways."""

from collections.abc import Mapping
from typing import Any, Final

from proto.limits import MAX_CONTEXT_TOKENS

_KEYS: Final = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx")
_BY_LENGTH: Final = ("longrope", "su", "dynamic")
"""Rotary embeddings whose frequencies change with the longest sequence of a forward. Beyond the original context, KV that was
computed before would have other frequencies, and one stream would change another."""


def context_tokens(config: Mapping[str, Any]) -> int | None:
    """Returns the longest context that computes the same for every batch; None if the configuration does not say.

    `config` is that of config.json or of transformers' class. YaRN extends its original context by its factor, as vLLM has it.
    Models with `longrope` and `dynamic` rotary embeddings keep their original context.
    """
    text = {**config, **(config.get("text_config") or {})}
    limit = next((length for key in _KEYS if (length := _length(text.get(key)))), None)
    if limit is None:
        return None
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    extended: list[int] = []
    bounds = [MAX_CONTEXT_TOKENS]
    for one in (rope, *rope.values()):
        kind = one.get("rope_type", one.get("type")) if isinstance(one, Mapping) else None
        if kind in (*_BY_LENGTH, "yarn"):
            name = "original_max_position_embeddings"
            original, factor = _length(one.get(name)) or _length(text.get(name)) or limit, one.get("factor")
            if kind in _BY_LENGTH:
                bounds.append(original)
            elif isinstance(factor, int | float) and factor > 0:
                extended.append(max(1, int(original * factor)))
    return min(*(extended or [limit]), *bounds)


def _length(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
