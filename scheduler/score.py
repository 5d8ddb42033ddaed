"""The score of a pair of workers for a prompt: one number, in seconds, less is better. Pure.

    score(p, d) = queue * (tokens before it on p / rate of p)
                + compute * (prompt tokens not cached on p / rate of p)
                + (time to hand over blocks that are not cached on d, as measured, less the load forgone: see `hand_overs`)
                + room * (fullness of p squared) + load * (fullness of d)
                + targets                       where d is assigned to other targets per token than its own
                + slow                          what its answer takes longer where streams wait longer for tokens than elsewhere
                + numerics                      where an interrupted stream began on a worker that computes other bits than d
                + trouble * (share of recent work that failed on p + the same of d, or of what went from p to d if that is more)

The first two terms are the time that the prompt waits. The other terms are in seconds too, so each weight says how much longer
a first token may take to avoid what its term measures. Longest-prefix-first is `compute` without bounds, least-loaded is
`compute` zero.
"""

from collections.abc import Iterable
from dataclasses import dataclass

SLOWER = 1.25  # a decode worker is slow if its streams wait for a token so many times as long as others
ALIKE = 0.8
"""Only workers with at least this part of its sequences are compared with it, since more sequences take longer."""


@dataclass(frozen=True)
class Weights:
    queue: float = 1.0
    compute: float = 4.0
    """Well over 1: computing tokens again delays this prompt and all prompts behind it, and evicts other blocks from a cache.
    Caches with room for one copy of all hot prefixes, but not for two, lost half their hits in an overload at 1.5."""
    pressure: float = 2.0  # how much more computing weighs for each waiting request, since it delays those requests too
    transfer_s: float = 0.0005
    """Per block to send while none was measured: a block of some hundred KB on a fast network, or in shared memory."""
    remote_s: float = 0.001  # per block to send from host to host, on top
    room_s: float = 0.2
    """Seconds for a full prefill worker, far less for one with room: a full one has to give up cached blocks."""
    load_s: float = 1.0
    """Seconds for a full decode worker, proportionally less for others. Each further stream slows all others there for as long
    as it runs."""
    trouble_s: float = 5.0
    """Seconds for a worker on which everything failed lately: it is avoided as long as there is another."""
    targets_s: float = 2.0
    """Seconds for a decode worker that is assigned to other targets for the time per token: more than for a full one."""
    slow_s_max: float = 4.0
    """The most seconds for a slow decode worker: it is better than one on which everything fails."""
    numerics_s: float = 1000.0
    """Seconds for a decode worker that computes other last bits than the one where an interrupted stream began: it is chosen
    only if there is no other, since the stream may then go on with other tokens."""
    margin_s: float = 0.0
    """A request waits for another worker than the one that could take it now only if the score is better by more than this."""


@dataclass(slots=True)
class PrefillSide:
    """A prefill worker, as this prompt would find it."""

    tokens_before: int  # dispatched or placed there and not computed yet
    tokens_per_s: float
    cached_tokens: int  # tokens of this prompt that it has
    fullness: float  # 0 with all blocks free, 1 with none
    failure_rate: float  # 0 … 1
    host: str


@dataclass(slots=True)
class DecodeSide:
    """A decode worker, as this prompt would find it."""

    hand_over_s: float  # the cost of the blocks of this prompt that it does not have cached
    fullness: float  # how full its blocks or its sequences are, whichever is more
    failure_rate: float
    token_s: float = 0.0  # how long its streams wait for each token; 0: not known
    token_seqs: float = 0.0  # the number of sequences with which that was measured
    is_guest: bool = False  # the worker is assigned to another class of targets: see `token_targets`
    other_numerics: bool = False  # it computes other bits than the worker where this stream began


def prefill_s(prompt_tokens: int, side: PrefillSide, weights: Weights, waiting: float = 0.0) -> float:
    """The part of the score that the prefill worker decides. `waiting`: requests for each worker that wait for their turn."""
    compute = weights.compute * (1.0 + weights.pressure * waiting)
    work = weights.queue * side.tokens_before + compute * (prompt_tokens - side.cached_tokens)
    return work / side.tokens_per_s + weights.room_s * side.fullness**2 + weights.trouble_s * side.failure_rate


def decode_s(side: DecodeSide, weights: Weights) -> float:
    """The part of the score that the decode worker decides, given where the prompt is computed."""
    own = side.hand_over_s + weights.load_s * side.fullness + weights.trouble_s * side.failure_rate
    own += weights.targets_s if side.is_guest else 0.0
    return own + (weights.numerics_s if side.other_numerics else 0.0)


def slow_s(side: DecodeSide, others: Iterable[DecodeSide], answer_tokens: float, weights: Weights) -> float:
    """How much longer an answer takes on a worker that is clearly slower than others, which have about as many sequences or
    more."""
    least_s = min(
        (one.token_s for one in others if one.token_s and one.token_seqs >= ALIKE * side.token_seqs),
        default=side.token_s,
    )
    return min(answer_tokens * max(side.token_s - SLOWER * least_s, 0.0), weights.slow_s_max)


def best_decode(decode: Iterable[tuple[int, DecodeSide]], weights: Weights, answer_tokens: float = 0.0) -> int | None:
    """The incarnation of the best decode worker; of equals the first. `answer_tokens`: the expected length of the answer."""
    entries = list(decode)
    sides = [side for _, side in entries]

    def score(entry: tuple[int, DecodeSide]) -> float:
        return decode_s(entry[1], weights) + slow_s(entry[1], sides, answer_tokens, weights)

    return min(entries, key=score)[0] if entries else None
