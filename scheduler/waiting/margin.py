"""How much earlier than wanted a first token must be expected, so that few admitted requests are late. Pure.

The margin is a quantile of the error of the projection, as a part of the time that a request has. It follows from the requests
that were admitted in time with most of that time already projected; the others say nothing about errors near the limit. It
rises at once with late ones, and falls slowly.
"""

from scheduler.request import Request

LEAST, MOST = 0.2, 0.7  # prompts share workers in the grain of chunks, so some margin is always needed
LATE = 0.03  # the part of those requests whose error may exceed the margin
STEP = 0.01


class Margins:
    """Each priority class has its own margin, since lower classes give way to higher ones."""

    def __init__(self) -> None:
        self._of: dict[str, float] = {}

    def allowed_ms(self, request: Request, *, obeys: bool) -> float:
        """The most that a request's first token may be expected to take. `obeys`: it was told to come now, and
        may use half of the margin."""
        margin = self._of.get(request.path[0], LEAST)
        return (1 - margin / (2 if obeys else 1)) * request.first_token_ms

    def came(self, request: Request, now: float) -> None:
        """Learn from a first token."""
        wanted_s = request.promised_ms / 1000
        if not wanted_s or request.expected_s < wanted_s * (1 - MOST) / 2:
            return
        name = request.path[0]
        margin, error = self._of.get(name, LEAST), (now - request.arrived - request.expected_s) / wanted_s
        margin += STEP * (1 - LATE) if error > margin else -STEP * LATE
        self._of[name] = min(max(margin, LEAST), MOST)
