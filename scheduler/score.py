"""The costs of a pair of workers for a prompt, in seconds; less is better. Pure.

    cost_s(p, d) = queue * (tokens before it on p / rate of p)
                 + (prompt tokens not cached on p / rate of p)
                 + waste * (those of them that another prefill worker has / rate of p)
                 + (time to fetch tokens from d)
                 + (time to hand over blocks that are not cached on d, as measured, less the load forgone: see `hand_overs`)
                 + room * (fullness of p squared) + load * (fullness of d)
                 + targets                       where d is assigned to other targets per token than its own
                 + slow                          what its answer takes longer where streams wait longer than elsewhere
                 + numerics                      where an interrupted stream began on a worker that computes other bits than d
                 + unsafe                        where it has failed on p, or the host of p has just lost a worker
                 + trouble * (share of recent work that failed on p + the same of d, or from p to d if that is more)

The first two terms are the time that the prompt waits. The other terms are in seconds too, so each weight says how much longer
a first token may take to avoid what its term measures.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Weights:
    queue: float = 1.0
    compute: float = 4.0
    """The weight of computing a token that another prefill worker has. Well over 1: it delays this prompt and those behind
    it, and evicts other blocks from a cache. Caches with room for one copy of all hot prefixes, but not for two, lost half
    their hits in an overload at 1.5."""
    pressure: float = 2.0  # how much more it weighs for each waiting request, since it delays those requests too
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
    unsafe_s: float = 1000.0
    """Seconds for a prefill worker on which an interrupted request is likely to fail again."""


def prefill_s(
    tokens_before: int,
    uncached_tokens: int,
    wasted_tokens: int,
    tokens_per_s: float,
    fullness: float,
    weights: Weights,
    waiting: float = 0.0,
) -> float:
    """The cost of computing a prompt on a worker. `wasted_tokens`: those that another prefill worker has; `waiting`: requests
    that wait longer if it computes longer."""
    waste = weights.compute * (1.0 + weights.pressure * waiting) - 1.0
    work = weights.queue * tokens_before + uncached_tokens + waste * wasted_tokens
    return work / tokens_per_s + weights.room_s * fullness**2
