"""How much of a prompt a decode worker computes with its next step, so that running streams hardly notice. Pure.

What a prompt adds to KV that is here already is computed in slices, each in one forward pass with the streams' tokens. A slice
may make the step longer by `share` of what it takes without one; where streams have targets for their time per token, by what
the strictest target leaves. Both are measured: steps without a slice by the size of their batch, and what a token of a slice
adds.
"""

from typing import Final

TARGET_SHARE: Final = 0.9
"""A step with a slice may take this part of a target."""
IDLE_TOKENS: Final = 32
"""A slice has so many while no stream runs, and one may join any moment."""
_GAIN: Final = 0.2
_FIRST_SHARE: Final = 0.25
"""A token of a slice is taken to add this part of a step, while that was never measured."""
_OUTLIER: Final = 3.0
"""A step that takes so many times as long as usual counts as if it took this much."""


class SliceSizes:
    def __init__(self, share: float) -> None:
        """`share`: part of a step's time by which a slice may lengthen it."""
        self._share = share
        self._step_ms: dict[int, float] = {}
        """Without a slice, by the number of sequences: as many as fit a batch."""
        self._token_ms = 0.0
        """That a token of a slice adds; 0: not measured yet."""

    def tokens(self, sequences: int, tpot_ms: float = 0.0) -> int:
        """The size of the next slice beside so many sequences: one at least, or a prompt might wait for the end of all streams.
        `tpot_ms`: the strictest of their targets; 0: none has one."""
        step_ms = self.step_ms(sequences)
        if not step_ms:
            return 1  # nothing is known yet
        spare_ms = TARGET_SHARE * tpot_ms - step_ms if tpot_ms else self._share * step_ms
        return max(int(spare_ms / (self._token_ms or _FIRST_SHARE * step_ms)), 1)

    def step_ms(self, sequences: int) -> float:
        """What a step of so many sequences, or about as many, takes without a slice; 0: none was measured."""
        if sequences in self._step_ms or not self._step_ms:
            return self._step_ms.get(sequences, 0.0)
        return self._step_ms[min(self._step_ms, key=lambda other: (abs(other - sequences), other))]

    def measured(self, sequences: int, slice_tokens: int, ms: float) -> None:
        """A step has taken so long, streams and slice together."""
        if not sequences:
            return
        usual_ms = self.step_ms(sequences)
        if not slice_tokens:
            before = self._step_ms.get(sequences)
            self._step_ms[sequences] = ms if before is None else before + _GAIN * (min(ms, _OUTLIER * before) - before)
        elif usual_ms:
            added_ms = max(ms - usual_ms, 0.01 * usual_ms) / slice_tokens
            if self._token_ms:
                added_ms = min(added_ms, _OUTLIER * self._token_ms)
                self._token_ms += _GAIN * (added_ms - self._token_ms)
            else:
                self._token_ms = added_ms
