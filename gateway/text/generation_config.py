"""The sampling defaults that a model brings along in its generation_config.json."""

import math
from dataclasses import dataclass, fields
from typing import Any

from proto import limits

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
    for field in fields(SamplingDefaults):
        value = generation_config.get(field.name)
        if value is None:
            continue
        low, high = _RANGES[field.name]
        kinds = (int,) if field.name == "top_k" else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds) or not math.isfinite(value):
            raise ValueError(
                f"generation_config.json: {field.name} is {value!r}, which is not a number as it should be"
            )
        if not low <= value <= high or (value == low and field.name in _ABOVE_MIN):
            raise ValueError(
                f"generation_config.json: {field.name} is {value}, which is not between {low:g} and {high:g}"
            )
        found[field.name] = max(value, 0) if field.name == "top_k" else float(value)
    return SamplingDefaults(**found)
