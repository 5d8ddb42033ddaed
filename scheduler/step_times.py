"""How long prefill and decode steps take, and how much work a prefill worker gets in advance. Pure."""

from math import inf, log2
from typing import Final, NamedTuple

import msgspec

STEP_TOKENS_MIN: Final = 64  # steps are not cut shorter, or the fixed cost of a step would dominate


class StepLimits(NamedTuple):
    tokens: int = 0  # 0: as each worker says. A `StepPace` needs the number itself.
    ms: float = 0.0  # 0: no matter how long
    in_flight: int = 2


_GAIN = 0.1  # the weight of a new report in an average of many
_OUTLIER = 1.5
"""A step that takes more than this many times as long as others of its size, or less than the inverse, counts at this
bound."""
_OUTLIERS_MAX = 3
"""After so many outliers in a row the worker has changed its speed, and what was learnt before is dropped."""
_RIDGE = 1e-3  # the weight of the assumption that steps take time only for their sequences


class _Mean(msgspec.Struct, gc=False):
    reports: int
    sequences: float
    ms: float


class StepFit:
    """How long a step of one worker takes, learnt from its reports: a decode step by its sequences, a prefill step by its
    tokens, called sequences here, too.

        step_ms = base + per_sequence * sequences

    Reports are averaged by size of batch, in half octaves, so what large batches took is known while small ones run. The line
    is least squares over these averages, with no negative part. While all batches had one size, the base and the cost per
    sequence cannot be told apart. The base is then assumed small, so larger batches are expected to take longer than they
    do, and batches grow step by step.
    """

    def __init__(self) -> None:
        self._means: dict[int, _Mean] = {}  # means by half octave of sequences
        self._line: tuple[float, float] | None = None
        self._outliers = 0
        self.largest = 0.0  # the largest batch that was reported since the worker changed its speed

    def add(self, sequences: float, ms: float) -> None:
        """The mean of some steps that followed each other. `sequences` is 1 at least."""
        size = int(2 * log2(sequences))
        mean = self._means.setdefault(size, _Mean(0, 0.0, 0.0))
        if mean.reports:
            clipped = min(max(ms, mean.ms / _OUTLIER), mean.ms * _OUTLIER)
            self._outliers = self._outliers + 1 if clipped != ms else 0
            if self._outliers < _OUTLIERS_MAX:
                ms = clipped
            else:
                mean = _Mean(0, 0.0, 0.0)
                self._means, self._outliers, self.largest = {size: mean}, 0, 0.0
        mean.reports += 1
        gain = max(1 / mean.reports, _GAIN)
        mean.sequences += gain * (sequences - mean.sequences)
        mean.ms += gain * (ms - mean.ms)
        self.largest = max(self.largest, sequences)
        self._line = None

    @property
    def base_ms(self) -> float:
        return self._fitted()[0]

    def step_ms(self, sequences: float) -> float:
        base, per_sequence = self._fitted()
        return base + per_sequence * sequences

    def sequences(self, step_ms: float) -> float:
        """The largest batch whose steps take no longer; may be less than 1, and infinite."""
        base, per_sequence = self._fitted()
        if base > step_ms:
            return 0.0
        return (step_ms - base) / per_sequence if per_sequence > 0 else inf

    def _fitted(self) -> tuple[float, float]:
        if self._line is None and self._means:
            weighed = [(min(mean.reports, 1 / _GAIN), mean) for mean in self._means.values()]
            weight = sum(part for part, _ in weighed)
            sequences = sum(part * mean.sequences for part, mean in weighed) / weight
            ms = sum(part * mean.ms for part, mean in weighed) / weight
            variance = sum(part * (mean.sequences - sequences) ** 2 for part, mean in weighed) / weight
            covariance = sum(part * (mean.sequences - sequences) * (mean.ms - ms) for part, mean in weighed) / weight
            slope = (covariance + _RIDGE * sequences * ms) / (variance + _RIDGE * sequences**2)
            slope = min(max(slope, 0.0), ms / sequences)
            self._line = ms - slope * sequences, slope
        return self._line or (0.0, 0.0)


class StepPace:
    """How many tokens a step of one prefill worker may have. A step of 256 tokens takes milliseconds on a GPU, but seconds on a
    CPU behind a long context, and it cannot be interrupted. So steps are also bounded by the time that they take, judged by
    the last steps. Beside streams, a step takes at least twice what it would take without tokens: else most of the worker's
    time would go to steps themselves."""

    def __init__(self, limits: StepLimits) -> None:
        self._limits = limits
        self.token_ms = 0.0
        """Milliseconds a token took in the last steps of useful length, smoothed; 0 until there was one."""
        self._fit = StepFit()
        self.slice_ms = 0.0  # milliseconds that a mixed worker's streams leave between two of their steps; 0: no bound

    @property
    def _longest_ms(self) -> float:
        return min(self._limits.ms or inf, max(self.slice_ms, 2 * self._fit.base_ms) if self.slice_ms else inf)

    @property
    def budget(self) -> int:
        """Tokens of its next step."""
        most, longest_ms = self._limits.tokens, self._longest_ms
        if self.token_ms * most <= longest_ms:
            return most
        return min(most, max(1 if self.slice_ms else STEP_TOKENS_MIN, int(longest_ms / self.token_ms)))

    def is_full(self, tokens: int) -> bool:
        """Whether a step was long enough to measure the worker's rate. A short step is mostly overhead, and makes its worker
        look slower than it is."""
        return 2 * tokens >= self.budget

    def measure(self, tokens: int, step_ms: float) -> None:
        self._fit.add(tokens, step_ms)
        if self.is_full(tokens):
            now_ms = step_ms / tokens
            self.token_ms += (now_ms - self.token_ms) * (0.5 if self.token_ms else 1.0)

    def may_have_more(self, steps: int, tokens: int) -> bool:
        """Whether the worker gets another step while `steps` steps of `tokens` tokens in all are in flight."""
        if not steps:
            return True
        return steps < self._limits.in_flight and self._longest_ms > 2 * self.token_ms * tokens
