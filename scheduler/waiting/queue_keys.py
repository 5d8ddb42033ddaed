"""Queue keys of the coordinator: under which key of the fair queue a request waits. Pure.

- A request that is placed waits under its prefill worker's incarnation, which is positive.
- A request that is not placed waits under the key of its class of KV demand (`class_key`).
- A request that is not placed, but is to run on one prefill worker because that one has its prompt cached, waits under
  `bound_key` of that worker's incarnation.
- A request that may have ended a decode worker waits for its trial under `TRIAL_KEY`.

A class holds the demands of half an octave of tokens (2^n to 1.5 * 2^n, 1.5 * 2^n to 2^(n+1)) at a decode worker, by an octave
of choices and a quarter of an octave of the target for the time per token. If one request of a class has no room, its whole
class counts as full until something is released. So a large request holds up those of about its own size, and no smaller ones.
"""

from collections.abc import Iterable
from math import log2
from typing import NamedTuple

from proto.messages import Submit
from scheduler.kv_admission.admission import NEVER, KvDemand

_TOKENS_MIN = 2  # smaller demands are in one class
_CHOICES_BITS, _TOKENS_BITS = 5, 6
_CLASSES = 1 << 20


class Demand(NamedTuple):
    """The most that a request may come to hold at a decode worker."""

    tokens: int
    choices: int
    target: int = 0  # see `target_class`

    @staticmethod
    def of(submit: Submit, expected_left: int = NEVER, tpot_ms: float = 0.0) -> "Demand":
        return Demand(KvDemand.of(submit, expected_left).whole(1), submit.choices, target_class(tpot_ms))


def target_class(tpot_ms: float) -> int:
    """A class of targets for the time per token. A larger number allows a longer time; 0: no target."""
    return 1 + round(4 * log2(max(tpot_ms, 1.0))) if tpot_ms else 0


def class_key(demand: Demand) -> int:
    tokens = max(demand.tokens, _TOKENS_MIN)
    octave = tokens.bit_length() - 1
    half = (tokens >> (octave - 1)) & 1
    number = (demand.target << _TOKENS_BITS | 2 * octave + half) << _CHOICES_BITS
    return -1 - (number | demand.choices.bit_length() - 1)


def smallest(key: int) -> Demand:
    """The least demand in a class."""
    number = -1 - key
    octave, half = divmod((number >> _CHOICES_BITS) & ((1 << _TOKENS_BITS) - 1), 2)
    tokens = (2 + half) << (octave - 1)
    choices = 1 << (number & ((1 << _CHOICES_BITS) - 1))
    return Demand(tokens if tokens > _TOKENS_MIN else 1, choices, number >> (_CHOICES_BITS + _TOKENS_BITS))


def classes_without_room(demand: Demand, classes: Iterable[int]) -> list[int]:
    """Returns the classes that cannot have room either if `demand` has none."""
    found = []
    for key in classes:
        least = smallest(key)
        if least.target == demand.target and least.tokens >= demand.tokens and least.choices >= demand.choices:
            found.append(key)
    return found


def bound_key(incarnation: int) -> int:
    return -_CLASSES - incarnation


PAUSED_KEY = 0  # the key of paused turns: it would be that of a prefill worker with the incarnation 0, which none has
TRIAL_KEY = bound_key(0)  # the key of requests that wait for a trial in decode: no prefill worker asks for it


def is_class(key: int) -> bool:
    return -_CLASSES < key < 0
