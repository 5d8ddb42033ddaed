"""The options of a simulation, beside profile, workers and traffic."""

from dataclasses import dataclass, field
from typing import Final

from coordinator.events import Limits

CACHE_BLOCK_TOKENS: Final = 512


@dataclass(frozen=True)
class RunOptions:
    limits: Limits = field(default_factory=Limits)
    step_tokens: int = 0  # 0: the profile's
    seqs_max: int = 0  # 0: the profile's
    hit_rate: float = 0.0  # of each prompt, on prefill workers, unless the trace has block ids
    block_tokens: int = CACHE_BLOCK_TOKENS  # of each of `Sent.blocks`
    slices: bool = True
    """The streams of a mixed worker bound the prefill steps between theirs; False: they do not, as in other servers."""
    stall_share: float = 0.0
    """Decode workers compute the part of a session's turn that they lack, and spend this share of a step on it; 0: they do
    not, as on GPUs."""
