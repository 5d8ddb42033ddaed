"""The last requests for one model: when they came, how long their prompts and answers were. For those who choose how many
workers each role needs.
"""

from collections import OrderedDict
from collections.abc import Callable

import msgspec

from proto.messages import Submit
from proto.status import TrafficStatus

ARRIVALS_MAX = 512


class _Arrival(msgspec.Struct, gc=False):
    at: float
    prompt_tokens: int
    max_tokens: int
    cached_tokens: int = 0
    output_tokens: int = 0
    """Once it has ended."""
    has_ended: bool = False


class Traffic:
    def __init__(self) -> None:
        self._last: OrderedDict[str, _Arrival] = OrderedDict()

    def arrived(self, submit: Submit, now: float) -> None:
        """A new request, whether it is let in or not."""
        self._last[submit.request_id] = _Arrival(now, submit.prompt_tokens, submit.sampling.max_tokens)
        if len(self._last) > ARRIVALS_MAX:
            self._last.popitem(last=False)

    def computed(self, request_id: str, cached_tokens: int) -> None:
        """So much of its prompt needed no computation."""
        if (arrival := self._last.get(request_id)) is not None and not arrival.cached_tokens:
            arrival.cached_tokens = min(cached_tokens, arrival.prompt_tokens)

    def finished(self, request_id: str, output_tokens: int) -> None:
        if (arrival := self._last.get(request_id)) is not None:
            arrival.output_tokens, arrival.has_ended = output_tokens, True

    def report(self, model: str, emitted: Callable[[str], int], waiting_tokens: int, now: float) -> TrafficStatus:
        """`emitted(request_id)`: tokens of an answer so far. An answer that goes on is expected to have as many more as answers
        have on average: tokens of all so far, over those that ended."""
        so_far = {name: one.output_tokens if one.has_ended else emitted(name) for name, one in self._last.items()}
        ended = sum(one.has_ended for one in self._last.values())
        mean = sum(so_far.values()) // max(ended, 1)
        return TrafficStatus(
            model,
            tuple(1000 * max(now - one.at, 0.0) for one in self._last.values()),
            tuple(one.prompt_tokens for one in self._last.values()),
            tuple(one.cached_tokens for one in self._last.values()),
            tuple(
                so_far[name] if one.has_ended else min(one.max_tokens, so_far[name] + max(mean, 1))
                for name, one in self._last.items()
            ),
            waiting_tokens,
        )
