"""The limit of each ratio, and how the recommended one serves other loads. Pure."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from tuning.advise import Workers
from tuning.goals import Goals
from tuning.limits import limit_of
from tuning.profile import Profile
from tuning.search import Found, Space, Tell, options_for
from tuning.simulator.cluster import Simulator
from tuning.simulator.job import Sent
from tuning.simulator.options import RunOptions
from tuning.traffic import Change, excerpt

MAP_REQUESTS: Final = 1600  # in the excerpt for the map; each ratio runs it up to ten times
MAP_SIDE_MAX: Final = 10
LOADS: Final = (0.5, 0.8, 1.0, 1.2, 1.5, 2.0)
HEADROOM_MAX: Final = 4.0
HEADROOM_STEPS: Final = 4


class Cell(NamedTuple):
    prefill: int
    decode: int
    attainment: float
    binds: str


class WhatIf(NamedTuple):
    load: float  # multiple of the traffic's
    workers: str
    attainment: float
    goodput_requests_per_s: float


def map_of(
    profile: Profile, sent: Sequence[Sent], goals: Goals, found: Found, options: RunOptions, tell: Tell
) -> list[Cell]:
    """Returns the attainment and the limit of each ratio, with up to one worker less than the budget in each role."""
    best = found.best.candidate
    ratios = [
        (prefill, decode)
        for prefill in _side(found.budget - 1, best.workers.prefill)
        for decode in _side(found.budget - 1, best.workers.decode)
    ]
    part = excerpt(sent, MAP_REQUESTS)
    chosen = options_for(options, best)
    cells = []
    for done, (prefill, decode) in enumerate(ratios):
        tell("what binds", done, len(ratios))
        workers = Workers(prefill, decode)
        kept = Simulator(profile, workers, part, chosen).run().attainment(goals)
        binds = "" if kept >= goals.percentile else limit_of(profile, workers, part, goals, chosen).name
        cells.append(Cell(prefill, decode, kept, binds))
    return cells


def what_if(
    profile: Profile, sent: Sequence[Sent], goals: Goals, space: Space, found: Found, options: RunOptions, tell: Tell
) -> tuple[list[WhatIf], float]:
    """Returns the results of the recommendation with other loads, and with one worker more or less; and the multiple of the
    load at which it just keeps the SLO (`HEADROOM_MAX` at most)."""
    best = found.best.candidate
    chosen = options_for(options, best)

    def row(load: float, workers: Workers) -> WhatIf:
        kept = Simulator(profile, workers, Change(load=load).applied(sent), chosen).run().attainment(goals)
        return WhatIf(load, str(replace(best, workers=workers)), kept, load * found.requests_per_s * kept)

    rows = []
    asked = [(load, best.workers) for load in LOADS]
    asked += [(1.0, one) for one in one_more_or_less(best.workers) if space.has_cores_for(one)]
    for done, (load, workers) in enumerate(asked):
        tell("what if", done, len(asked))
        rows.append(row(load, workers))
    loads = [one for one in rows if one.workers == str(best)]
    low = max((one.load for one in loads if one.attainment >= goals.percentile), default=0.0)
    high = min((one.load for one in loads if one.load > low), default=HEADROOM_MAX)
    for step in range(HEADROOM_STEPS):
        tell("headroom", step, HEADROOM_STEPS)
        middle = (low + high) / 2
        low, high = (middle, high) if row(middle, best.workers).attainment >= goals.percentile else (low, middle)
    return rows, low


def one_more_or_less(workers: Workers) -> list[Workers]:
    """Returns the ratios with one worker more or less in a role that these workers have; both phases keep a worker."""
    found = []
    for role, count in enumerate(workers):
        for step in (1, -1):
            other = Workers(*(n + step if at == role else n for at, n in enumerate(workers)))
            if count and min(other) >= 0 and (other.mixed or (other.prefill and other.decode)):
                found.append(other)
    return found


def _side(most: int, best: int) -> list[int]:
    """Returns numbers of workers from 1 to `most`: all of them, or some at even distances and the best one."""
    if most <= MAP_SIDE_MAX:
        return list(range(1, most + 1))
    found = {1 + round(place * (most - 1) / (MAP_SIDE_MAX - 1)) for place in range(MAP_SIDE_MAX)}
    return sorted(found | ({best} if best else set()))
