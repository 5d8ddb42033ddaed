"""The last requests for one model: when they came, how long their prompts and answers were, and how long they took. For those
who choose how many workers each role needs.

No more than one request in `SPACING_S` is sampled; it stands for all that came since the sample before. So the samples cover a
minute at any rate, and long answers end within it.
"""

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Sequence
from math import inf

import msgspec

from proto.messages import Submit
from proto.status import TrafficStatus

SAMPLE_MAX = 512
SPACING_S = 0.125
ANSWERS = 192  # the number of latest requests that tell how long answers are


class _Arrival(msgspec.Struct, gc=False):
    at: float
    stands_for: int
    prompt_tokens: int
    max_tokens: int
    choices: int
    cached_tokens: int = 0
    output_tokens: int = 0  # once it has ended
    has_ended: bool = False
    first_at: float | None = None  # when its prompt was computed, and with it the first token
    tpot_ms: float = 0.0  # once it has ended, if it has more than one token


class RecentTraffic:
    def __init__(self) -> None:
        self._last: OrderedDict[str, _Arrival] = OrderedDict()
        self._passed = 0  # requests since the last one that was sampled
        self._next_at = -inf
        self.lost = 0  # workers that were lost

    def arrived(self, submit: Submit, now: float) -> None:
        """A new request, whether it is let in or not."""
        self._passed += 1
        if now < self._next_at:
            return
        arrival = _Arrival(now, self._passed, submit.prompt_tokens, submit.sampling.max_tokens, submit.choices)
        self._last[submit.request_id] = arrival
        self._passed, self._next_at = 0, now + SPACING_S
        if len(self._last) > SAMPLE_MAX:
            self._last.popitem(last=False)

    def computed(self, request_id: str, cached_tokens: int, now: float) -> None:
        """Note that a sampled prompt is computed, and how much of it was cached."""
        if (arrival := self._last.get(request_id)) is None:
            return
        if not arrival.cached_tokens:
            arrival.cached_tokens = min(cached_tokens, arrival.prompt_tokens)
        if arrival.first_at is None:
            arrival.first_at = now

    def finished(self, request_id: str, output_tokens: int, now: float) -> None:
        if (arrival := self._last.get(request_id)) is not None:
            output_tokens = min(output_tokens, arrival.max_tokens * arrival.choices)  # a worker may say anything
            arrival.output_tokens, arrival.has_ended = output_tokens, True
            arrival.tpot_ms = _tpot_ms(arrival, output_tokens - 1, now)

    def report(
        self, model: str, emitted: Callable[[str], int | None], waiting_tokens: int, now: float
    ) -> TrafficStatus:
        """`emitted(request_id)`: tokens of an answer so far, the first one aside; None: it has ended."""
        last = list(self._last.values())
        known = [one.output_tokens if one.has_ended else emitted(name) for name, one in self._last.items()]
        so_far = [tokens or 0 for tokens in known]
        expect = expected_lengths(so_far[-ANSWERS:], [one.has_ended for one in last[-ANSWERS:]])
        return TrafficStatus(
            model,
            tuple(1000 * max(now - one.at, 0.0) for one in last),
            tuple(one.stands_for for one in last),
            tuple(one.prompt_tokens for one in last),
            tuple(one.cached_tokens for one in last),
            tuple(
                length if one.has_ended else min(one.max_tokens, expect(length))
                for one, length in zip(last, so_far, strict=True)
            ),
            waiting_tokens,
            tuple(_ttft_ms(one, tokens is not None, now) for one, tokens in zip(last, known, strict=True)),
            tuple(
                one.tpot_ms if one.has_ended or tokens is None else _tpot_ms(one, tokens, now)
                for one, tokens in zip(last, known, strict=True)
            ),
            self.lost,
        )


def _ttft_ms(one: _Arrival, is_alive: bool, now: float) -> float:
    if one.first_at is None and not is_alive:
        return 0.0
    return 1000 * max((now if one.first_at is None else one.first_at) - one.at, 0.0)


def _tpot_ms(one: _Arrival, tokens: int, now: float) -> float:
    """`tokens`: behind the first one."""
    return 1000 * max(now - one.first_at, 0.0) / tokens if one.first_at is not None and tokens > 0 else 0.0


def expected_lengths(so_far: Sequence[int], has_ended: Sequence[bool]) -> Callable[[int], int]:
    """Returns a function that estimates an answer's length from its tokens so far. The estimate uses these answers, some of
    them unfinished: the mean of what is left by Kaplan and Meier's estimate, up to the longest answer seen."""
    order = sorted(zip(so_far, has_ended, strict=True))
    steps: list[tuple[int, float]] = [(0, 1.0)]  # (length, share of answers that are longer)
    for at, (length, ended) in enumerate(order):
        if ended:
            steps.append((length, steps[-1][1] * (1 - 1 / (len(order) - at))))
    longest = order[-1][0] if order else 0
    begins = [begin for begin, _ in steps]
    areas = [0.0]  # under the shares from each step's begin to the longest answer; last step first
    for (begin, share), end in zip(reversed(steps), reversed([*begins[1:], longest]), strict=True):
        areas.append(areas[-1] + share * (end - begin))
    areas.reverse()

    def expected(length: int) -> int:
        step = bisect_right(begins, length) - 1
        longer = steps[step][1]
        if longer <= 0 or length >= longest:
            return length + length // 4 + 1
        area = areas[step] - longer * (length - begins[step])
        return length + max(1, round(area / longer))

    return expected
