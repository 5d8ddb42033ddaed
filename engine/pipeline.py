"""Pipelined decode steps: a step starts before the tokens of the step before it are on the host."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.sampling.sampler import Sampled, SamplerState

BlockCopies = Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class DecodeRow:
    sequence: Hashable  # the same object in each step; once missing from a step, it never returns
    token: int  # to forward in the sequence's first step; later ones forward what was drawn
    position: int  # of the token that is forwarded
    table: Sequence[int]
    state: SamplerState
    index: int  # in the answer, of the token that is drawn


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
