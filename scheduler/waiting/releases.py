"""How soon the room of placed work comes free, by how long it has been held. Pure.

Answers of about equal length that began together also end together: nothing comes free for seconds, and then much at once. A
mean rate would promise a place in time to requests that come just before the gap. So held work is grouped by when it was
placed. For each age it is learnt which part of the work of that age comes free within the next interval: a life table, in
which work that still runs counts as well (Kaplan and Meier, 1958). Work older than any before may need as long again.
"""

import numpy as np

AGES = 128  # Intervals by which ages are told apart. The mean time is 12 to 32 of them.
SHORTEST_S = 1 / 16
REMEMBERED = 256  # about so many intervals are remembered: eight mean times or more
GENERATIONS = 1.5  # work is taken to come free evenly after so many mean times


class Releases:
    """One model's placed work."""

    def __init__(self) -> None:
        self.held = 0
        self.width_s = SHORTEST_S  # the length of an interval; a power of two
        self._cohorts: dict[float, int] = {}  # work that is held, by the begin of the interval in which it was placed
        self._interval_at = 0.0  # when the present interval began
        self._reached = [0.0] * AGES  # Work that was held at each age, in intervals. Later intervals weigh more.
        self._freed = [0.0] * AGES  # the part of it that came free at that age
        self._weight = 1.0
        self._freed_at = self._mean_s = self._seen = 0.0
        self._curve: list[float] = []  # work that comes free until the end of each following interval
        self._curve_at = -1.0
        self._ahead = np.zeros(AGES)  # the work that is then held, by its age
        self._hazards = np.zeros(AGES)  # which part of it comes free in the next interval

    @property
    def mean_s(self) -> float:
        """How long work is held, in seconds; 0 before the first has come free."""
        return self._mean_s

    def take(self, work: int, now: float) -> float:
        """Count work that is held from now on. Returns its cohort, for `give_back`."""
        self._advance(now)
        if not self.held:
            self._freed_at = now
        self.held += work
        self._cohorts[self._interval_at] = self._cohorts.get(self._interval_at, 0) + work
        return self._interval_at

    def undo(self, work: int, cohort: float, now: float) -> None:
        """Count that it is held no longer, though it was not done. Nothing is learnt."""
        self._advance(now)
        self.held -= work
        self._cohorts[cohort] -= work
        if not self._cohorts[cohort]:
            del self._cohorts[cohort]

    def give_back(self, work: int, cohort: float, held_s: float, now: float) -> None:
        self.undo(work, cohort, now)
        self._freed_at = now
        age = self._age(cohort)
        self._freed[age] += self._weight * work
        self._reached[age] += self._weight * work
        self._seen = self._seen * (1 - 1 / 32) + work
        self._mean_s += (held_s - self._mean_s) * work / self._seen
        while self._mean_s > AGES / 4 * self.width_s:
            self._widen()
        if self._mean_s < AGES / 12 * self.width_s and self.width_s > SHORTEST_S:
            self._narrow()

    def wait_s(self, work: float, now: float) -> float:
        """Returns seconds until `work` more has come free, if freed room is taken again at once."""
        if not self.held or work <= 0:
            return 0.0
        if not self._seen:
            quiet_s = now - self._freed_at
            return max(work * quiet_s / self.held, quiet_s)
        self._advance(now)
        if not self._curve_at <= now < self._curve_at + self.width_s / 4:
            self._begin_curve(now)
        curve, most = self._curve, int(GENERATIONS * self._mean_s / self.width_s) + 1
        while (not curve or curve[-1] < work) and len(curve) < most:
            curve.append((curve[-1] if curve else 0.0) + self._next_interval())
        before = 0.0
        for number, freed in enumerate(curve):
            if freed >= work:
                passed = number + (work - before) / (freed - before)
                return max(passed * self.width_s - (now - self._curve_at), 0.0)
            before = freed
        return most * self.width_s + (work - before) * self._mean_s / self.held

    def _begin_curve(self, now: float) -> None:
        self._curve_at, self._curve = now, []
        self._ahead[:] = 0.0
        for cohort, held in self._cohorts.items():
            self._ahead[self._age(cohort)] += held
        reached = np.array(self._reached)
        self._hazards = 1 / np.arange(1.0, AGES + 1)
        np.divide(self._freed, reached, out=self._hazards, where=reached > 0)

    def _next_interval(self) -> float:
        """Returns the work that comes free in one more interval after those of the curve."""
        ahead = self._ahead
        going = self._hazards * ahead
        freed = float(going.sum())
        ahead -= going
        ahead[-1] += ahead[-2]
        ahead[1:-1] = ahead[:-2]
        ahead[0] = freed  # taken again
        return freed

    def _age(self, cohort: float) -> int:
        return min(int((self._interval_at - cohort) / self.width_s), AGES - 1)

    def _advance(self, now: float) -> None:
        """Count the intervals that have passed since the last call, `AGES` at most."""
        present_at = now // self.width_s * self.width_s
        if not self._cohorts:
            self._interval_at = present_at
        self._interval_at = max(self._interval_at, present_at - AGES * self.width_s)
        while self._interval_at < present_at:
            for cohort, held in self._cohorts.items():
                self._reached[self._age(cohort)] += self._weight * held
            self._interval_at += self.width_s
            self._weight *= 1 + 1 / REMEMBERED
            if self._weight > 1e12:
                self._reached = [one / self._weight for one in self._reached]
                self._freed = [one / self._weight for one in self._freed]
                self._weight = 1.0

    def _widen(self) -> None:
        """Double the length of intervals."""
        self.width_s *= 2
        self._interval_at, self._curve_at = self._interval_at // self.width_s * self.width_s, -1.0
        none = [0.0] * (AGES // 2)
        self._reached = self._reached[::2] + none
        self._freed = [one + other for one, other in zip(self._freed[::2], self._freed[1::2], strict=True)] + none

    def _narrow(self) -> None:
        """Halve the length of intervals."""
        self.width_s, self._curve_at = self.width_s / 2, -1.0
        halves = list(zip(self._reached, self._freed, strict=True))[: AGES // 2]
        self._reached = [part for reached, freed in halves for part in (reached, reached - freed / 2)]
        self._freed = [freed / 2 for _, freed in halves for _ in range(2)]
