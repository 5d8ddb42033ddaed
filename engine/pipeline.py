"""Decode steps of which the next one starts before the tokens of the last one are on the host."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.sampling.sampler import Sampled, SamplerState

BlockCopies = Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """The work of a step for one sequence."""

    sequence: Hashable
    """The same object in each step of the sequence. One that is not in a step is never in a later one."""
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
        """Enqueues a step; `copies` of KV blocks, (source, target), come first. At most two steps may be under way;
        where a state `forbids` something, the last one has been collected."""

    def collect(self) -> list[Sampled | None]:
        """Waits for the oldest step that is under way: one result for each of its rows, which its state has accepted; None
        where the logits were not finite."""

    def abandon(self) -> None:
        """Waits until nothing is under way, and forgets the steps: one of them failed."""
