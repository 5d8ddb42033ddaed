"""The host's input to the device for one decode step, in one buffer that is copied at once.

The buffer is a matrix of int64, a field in each line and a row of the batch in each column. Behind it are the block tables of
the sequences that join. Numbers with a fraction are float64 in the same 8 bytes. Values that do not change while a sequence
runs are kept here by the sequence's slot, so that the work for a step does not grow with the context.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from enum import IntEnum, auto
from typing import Final

import numpy as np
import torch

from engine.attention.forward_batch import Ints
from engine.pipeline import DecodeRow
from engine.sampling.philox import uniforms
from engine.sampling.sampler import SamplerState


class Field(IntEnum):
    SLOT = 0  # of the sequence; the number of slots: a row that only fills the batch up
    POSITION = auto()
    BLOCK = auto()  # where this position's K and V go
    TOP_K = auto()
    TEMPERATURE = auto()
    TOP_P = auto()
    MIN_P = auto()
    UNIFORM = auto()
    ADJUSTED_ROW = auto()  # rows with penalties or a bias; only the first `StepShape.adjusted` entries are valid
    ADJUSTED_SLOT = auto()


_FRACTIONS: Final = (Field.TEMPERATURE, Field.TOP_P, Field.MIN_P)
_BUFFERS: Final = 2  # steps in flight at once; one is filled again after its step has ended


@dataclass(frozen=True)
class Join:
    """A sequence's first step."""

    slot: int
    token: int  # to forward first
    first: int  # where its table begins in the buffer
    blocks: int
    state: SamplerState


@dataclass(frozen=True)
class StepShape:
    """The properties of a step that the host needs to launch it."""

    rows: int
    joins: tuple[Join, ...]
    samples: bool
    filters: bool
    adjusted: int
    logprobs: int  # most that a row asks for; negative: none


class StepInput:
    def __init__(self, slots: int, context_tokens: int, block_size: int, device: torch.device) -> None:
        """`slots`: the most sequences at once; `context_tokens`: of the longest."""
        self.slots = slots
        self._block_size = block_size
        self._fields_size = len(Field) * slots
        self._context_tokens = context_tokens
        size = self._fields_size + slots * -(-context_tokens // block_size)
        self.buffer = torch.zeros(size, dtype=torch.int64, device=device)  # in a fixed place, which CUDA graphs read
        self._host = [torch.zeros(size, dtype=torch.int64, pin_memory=device.type == "cuda") for _ in range(_BUFFERS)]
        self._turn = 0
        self._slot_of: dict[Hashable, int] = {}
        self._free = list(range(slots - 1, -1, -1))
        self._fractions = np.zeros((len(_FRACTIONS), slots))
        self._top_k, self._logprobs = np.zeros((2, slots), np.int64)
        self._seeds, self._choices = np.zeros((2, slots), np.uint64)
        self._adjusts = np.zeros(slots, bool)

    def integers(self, field: Field, rows: int) -> torch.Tensor:
        """Returns [rows] on the device: the values of the last `fill`. The same holds for `fractions`."""
        return self.buffer[field * self.slots : field * self.slots + rows]

    def fractions(self, field: Field, rows: int) -> torch.Tensor:
        return self.integers(field, rows).view(torch.float64)

    def fill(self, rows: Sequence[DecodeRow]) -> StepShape:
        """Copies to the device what it needs for these rows. Raises ValueError for rows that its buffers are too small for."""
        self._check(rows)
        self._release(rows)
        host = self._host[self._turn]
        self._turn = (self._turn + 1) % _BUFFERS
        flat = host.numpy()
        fields, count = flat[: self._fields_size].reshape(len(Field), self.slots), len(rows)
        joins = self._join(rows, flat)
        slots = np.fromiter((self._slot_of[row.sequence] for row in rows), np.int64, count)
        fields[: Field.BLOCK + 1, count:] = 0
        fields[Field.SLOT, count:] = self.slots
        fields[Field.SLOT, :count] = slots
        fields[Field.POSITION, :count] = [row.position for row in rows]
        fields[Field.BLOCK, :count] = [row.table[row.position // self._block_size] for row in rows]
        adjusted = np.flatnonzero(self._adjusts[slots])
        fields[Field.ADJUSTED_ROW, : len(adjusted)] = adjusted
        fields[Field.ADJUSTED_SLOT, : len(adjusted)] = slots[adjusted]
        samples, filters = self._fill_sampling(fields, rows, slots)
        used = joins[-1].first + joins[-1].blocks if joins else self._fields_size
        self.buffer[:used].copy_(host[:used], non_blocking=True)
        return StepShape(count, joins, samples, filters, len(adjusted), int(self._logprobs[slots].max()))

    def forget(self) -> None:
        self._release(())

    def _check(self, rows: Sequence[DecodeRow]) -> None:
        size = self._block_size
        if not 0 < len(rows) <= self.slots:
            raise ValueError(f"{len(rows)} sequences in a step of at most {self.slots}")
        if any(not row.position < self._context_tokens or len(row.table) * size <= row.position for row in rows):
            raise ValueError("a token is outside of the context, or of its sequence's block table")
        if any((len(row.table) - 1) * size >= self._context_tokens for row in rows):
            raise ValueError("a block table is longer than the context")

    def _release(self, rows: Sequence[DecodeRow]) -> None:
        """Slots of sequences that are not in this step are free: the device does this step after the last one."""
        if len(rows) == len(self._slot_of) and all(row.sequence in self._slot_of for row in rows):
            return
        going_on = {row.sequence for row in rows}
        for sequence in [sequence for sequence in self._slot_of if sequence not in going_on]:
            self._free.append(self._slot_of.pop(sequence))

    def _join(self, rows: Sequence[DecodeRow], flat: Ints) -> tuple[Join, ...]:
        joins: list[Join] = []
        first = self._fields_size
        for row in rows:
            if row.sequence in self._slot_of:
                continue
            slot = self._slot_of[row.sequence] = self._free.pop()
            sampling = row.state.sampling
            self._fractions[:, slot] = sampling.temperature, sampling.top_p, sampling.min_p
            self._top_k[slot], self._logprobs[slot] = sampling.top_k, sampling.logprobs
            self._seeds[slot], self._choices[slot] = sampling.seed, row.state.choice
            self._adjusts[slot] = row.state.has_penalties
            flat[first : first + len(row.table)] = row.table
            joins.append(Join(slot, row.token, first, len(row.table), row.state))
            first += len(row.table)
        return tuple(joins)

    def _fill_sampling(self, fields: Ints, rows: Sequence[DecodeRow], slots: Ints) -> tuple[bool, bool]:
        """(whether any row has a temperature, whether any filters)."""
        fractions, top_k, count = self._fractions[:, slots], self._top_k[slots], len(rows)
        if not fractions[0].any():
            return False, False
        fields[Field.TOP_K, :count] = top_k
        as_fractions = fields.view(np.float64)
        for number, field in enumerate(_FRACTIONS):
            as_fractions[field, :count] = fractions[number]
        indices = np.fromiter((row.index for row in rows), np.uint64, count)
        as_fractions[Field.UNIFORM, :count] = uniforms(self._seeds[slots], self._choices[slots], indices)
        return True, bool((top_k > 0).any() or (fractions[1] < 1.0).any() or (fractions[2] > 0.0).any())
