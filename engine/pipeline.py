"""Pipelined decode steps: a step starts before the tokens of the step before it are on the host."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.sampling.sampler import Sampled, SamplerState

BlockCopies = Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """The work of a step for one sequence."""

    sequence: Hashable
    """The same object in each step of the sequence. A sequence that is missing from one step never returns."""
    token: int
    """The token to forward, if this is the sequence's first step here; later ones forward what the step before has drawn."""
    position: int
    """Position of the token that is forwarded."""
    table: Sequence[int]
    state: SamplerState
    index: int
    """Index in the answer of the token that is drawn."""


class DecodePipeline(Protocol):
    """An engine has one if its device computes on while the host does something else."""

    @property
    def padding_rows(self) -> int:
        """Rows that only filled steps up to the size of a CUDA graph, so far."""

    def launch(self, rows: Sequence[DecodeRow], copies: BlockCopies) -> None:
        """Enqueues a step; `copies` of KV blocks, (source, target), come first. No more than two steps may be in flight. If a
        state `forbids` tokens, the caller must collect the previous step first."""

    def collect(self) -> list[Sampled | None]:
        """Waits for the oldest step that is under way: one result for each of its rows, which its state has accepted; None
        where the logits were not finite."""

    def abandon(self) -> None:
        """Waits until nothing is under way, and forgets the steps: one of them failed."""
