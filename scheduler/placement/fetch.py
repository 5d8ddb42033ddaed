"""Whether a prefill worker fetches the beginning of a prompt that its decode worker has, or computes it. Pure.

    computing   tokens that the one has not and the other has / rate of the prefill worker
    fetching    a round trip + their number x what a token took in earlier fetches

The smaller one wins. Before the first fetch has been measured, blocks are assumed to move faster than the score assumes, so
that a first fetch is tried. After a fetch has failed, the same two workers do not fetch for a while.
"""

from typing import Final, NamedTuple

from proto.messages import Submit
from scheduler.placement.choice import cached_tokens
from scheduler.workers.pool import Pool
from scheduler.workers.worker import DecodeWorker, PrefillWorker, Worker

ROUND_TRIP_S: Final = 0.002
PAUSE_S: Final = 60.0
_GAIN: Final = 0.2
_HOPE: Final = 0.25


class Beginning(NamedTuple):
    """The beginning of a prompt that a prefill worker need not compute."""

    tokens: int  # the number of tokens after which chunks start
    fetched_tokens: int = 0  # how many of them, the last ones, come from the decode worker
    fetch_s: float = 0.0  # the expected time of the fetch, in seconds
    compute_s: float = 0.0  # the time in which the prefill worker would compute them, in seconds


def beginning(submit: Submit, prefill: Worker, decode: DecodeWorker, pool: Pool, now: float) -> Beginning:
    """Returns the beginning of a prompt that need not be computed if these two workers serve it."""
    here = cached_tokens(submit, prefill, pool)
    if not isinstance(prefill, PrefillWorker) or not _may_fetch(prefill, decode, now):
        return Beginning(here)
    there = cached_tokens(submit, decode, pool)
    if there <= here:
        return Beginning(here)
    fetch_s = ROUND_TRIP_S + (there - here) * (prefill.fetch_token_s or _guess_s(submit, prefill, decode, pool))
    compute_s = (there - here) / pool.rate(prefill)
    return Beginning(there, there - here, fetch_s, compute_s) if fetch_s < compute_s else Beginning(here)


def measured(prefill: PrefillWorker, tokens: int, ms: float) -> None:
    """Learn from a fetch how long this worker takes per token."""
    token_s = max(ms / 1000 - ROUND_TRIP_S, 0.1 * ms / 1000) / tokens
    prefill.fetch_token_s += (_GAIN if prefill.fetch_token_s else 1.0) * (token_s - prefill.fetch_token_s)


def failed(prefill: PrefillWorker, decode_incarnation: int, now: float) -> None:
    """Stop fetches between these two workers for `PAUSE_S`."""
    paused = prefill.fetch_paused_until
    for incarnation in [incarnation for incarnation, until in paused.items() if until <= now]:
        del paused[incarnation]
    paused[decode_incarnation] = now + PAUSE_S


def _guess_s(submit: Submit, prefill: PrefillWorker, decode: DecodeWorker, pool: Pool) -> float:
    """Returns the assumed time to fetch a token, in seconds, while none was measured."""
    is_remote = prefill.hello.host != decode.hello.host
    return _HOPE * (pool.weights.transfer_s + pool.weights.remote_s * is_remote) / submit.hash_block_size


def _may_fetch(prefill: PrefillWorker, decode: DecodeWorker, now: float) -> bool:
    one, other = prefill.capacity, decode.capacity
    if not (one.fetches and other.fetches) or one.block_size != other.block_size:
        return False
    return now >= prefill.fetch_paused_until.get(decode.incarnation, now) and not prefill.is_same_process(decode)
