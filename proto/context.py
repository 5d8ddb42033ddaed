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
    limit = next((text[key] for key in _KEYS if _is_length(text.get(key))), None)
    if limit is None:
        return None
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    extended, limits = [], [limit]
    for one in (rope, *rope.values()):
        kind = one.get("rope_type", one.get("type")) if isinstance(one, Mapping) else None
        if kind not in (*_BY_LENGTH, "yarn"):
            continue
        original = one.get("original_max_position_embeddings") or text.get("original_max_position_embeddings")
        original = original if _is_length(original) else limit
        factor = one.get("factor")
        if kind in _BY_LENGTH:
            limits.append(original)
        elif isinstance(factor, int | float) and factor > 0:
            extended.append(max(1, int(original * factor)))
    return min([*(extended or limits), *limits[1:], MAX_CONTEXT_TOKENS])


def _is_length(value: object) -> bool:
    return type(value) is int and value > 0
