"""A decode worker's continuous batch, in closed form between joins and ends.

All sequences move on by one token with every step. While none joins or ends, step i of a span takes `a + b * (kv + n * i)`
seconds, where n sequences have kv tokens of KV at its begin; so boundary k lies at

    T(k) = t + k * (a + b * kv) + b * n * k * (k - 1) / 2

and the cost of a run does not depend on how many tokens it has. A sequence joins at the first boundary after its KV is there.
The batch of a mixed worker waits for its prefill steps, which come in between: `wait_for`.
"""

from heapq import heappop, heappush
from math import ceil, inf, sqrt

from lab.play.request import PlayedRequest
from lab.profile import DecodeCost

_SAME_BOUNDARY = 1e-6
"""A time that lies behind a boundary by less than this part of a step counts as the boundary: it was rounded. Times of a day
have 11 digits after the point, so steps may be as short as 0.1 ms."""


class VirtualBatch:
    def __init__(self, number: int, cost: DecodeCost) -> None:
        self.number = number
        self._cost = cost
        self._base: list[float] = []
        self._per_token = cost.kv_token_ms / 1000
        self.steps = 0  # begun before `begin_s`
        self.begin_s = 0.0  # boundary at which the present span began, or will begin
        self.kv_tokens = 0
        self.sequences = 0
        self.share = 1.0  # factor on step times because others use the same cores
        self.stretch = 1.0  # factor on step times because parts of prompts are computed in them
        self.suffixes = 0  # prompts that are computed here
        self.suffixes_end_s = 0.0
        self.is_mixed = False
        self.prefill_s = 0.0  # of the mixed worker's present prefill step alone; 0: none runs
        self.tokens_want = 0.0  # cores that passing on its tokens would fill
        self.version = 0
        self.forwarded = 0  # tokens until a sequence last ended: shows which worker has done least
        self.busy_s = self.token_steps = 0.0
        self._ends: list[tuple[int, int, PlayedRequest]] = []

    # --- time -----------------------------------------------------------------------------------------------------------

    def _a(self) -> float:
        """Returns the seconds of a step with as many sequences as now, without KV."""
        base, count = self._base, self.sequences
        while len(base) <= count:
            base.append(self._cost.curve(len(base)) / 1000)
        return (base[count] + self._per_token * self.kv_tokens) * self.share * self.stretch

    def boundary_s(self, steps: int) -> float:
        return self.begin_s + steps * self._a() + self._b() * steps * (steps - 1) / 2

    def _b(self) -> float:
        return self._per_token * self.sequences * self.share * self.stretch

    def steps_until(self, now: float) -> int:
        """The first boundary that is not before `now`, counted from `begin_s`."""
        passed = now - self.begin_s
        if passed <= 0 or not self.sequences:
            return 0
        b = self._b()
        half = self._a() - b / 2
        # The root of T(k) = now, in the form that loses no digits where b is small.
        return ceil(2 * passed / (half + sqrt(half * half + 2 * b * passed)) - _SAME_BOUNDARY)

    def step_s(self) -> float:
        return self._a()

    def sync(self, now: float) -> None:
        """Begin a new span at the first boundary that is not before `now`."""
        if not self.sequences:
            self.begin_s = max(self.begin_s, now)
            return
        self._advance(self.steps_until(now))

    def _advance(self, steps: int) -> None:
        if steps:
            until_s = self.boundary_s(steps)
            took_s, count = until_s - self.begin_s, self.sequences
            self.busy_s += took_s
            self.token_steps += count * steps
            self.begin_s = until_s
            self.steps += steps
            self.kv_tokens += count * steps

    def stretch_steps(self, now: float, factor: float) -> None:
        self.sync(now)
        self.stretch = factor

    # --- sequences ------------------------------------------------------------------------------------------------------

    def join(self, job: PlayedRequest, now: float) -> None:
        """Adds a request whose KV is here."""
        self.sync(now)
        self.sequences += 1
        self.kv_tokens += job.prompt + 1
        heappush(self._ends, (self.steps + job.output - 1, job.number, job))

    def next_end_s(self) -> float:
        return self.boundary_s(self._ends[0][0] - self.steps) if self._ends else inf

    def ended(self) -> list[PlayedRequest]:
        """Takes out the sequences that end at the next end; the batch is synced to it."""
        found: list[PlayedRequest] = []
        if self._ends:
            self._advance(self._ends[0][0] - self.steps)
            while self._ends and self._ends[0][0] <= self.steps:
                job = heappop(self._ends)[2]
                found.append(job)
                self.sequences -= 1
                self.kv_tokens -= job.prompt + job.output
            self.forwarded = int(self.token_steps)
        return found

    def wait_for(self, now: float, took_s: float) -> float:
        """Inserts a prefill step of this length at the next boundary, and a decode step after it; returns when the prefill
        step has ended."""
        self.sync(now)
        ended_s = self.begin_s + took_s
        count, step_s = self.sequences, self._a() if self.sequences else 0.0
        self.busy_s += took_s + step_s
        self.token_steps += count
        self.begin_s = ended_s + step_s
        self.steps += 1 if count else 0
        self.kv_tokens += count
        return ended_s
