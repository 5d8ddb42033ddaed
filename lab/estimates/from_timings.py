"""A profile from what requests to a running server took.

The server is taken for mixed workers: steps with prompt tokens and steps of the streams take turns, which is what a step with
both comes to. Six numbers are fitted, so that the simulation of the same requests gives the times that were measured: quantiles
of the time to first token, of short, middle and long prompts apart, and of the time per later token.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from coordinator.events import Limits
from lab.advise import Workers
from lab.play.options import RunOptions
from lab.play.outcome import Floats, PlayedOutcome
from lab.play.player import Player
from lab.play.request import Sent
from lab.profile import Curve, DecodeCost, HostCost, PrefillCost, Profile, ProfileCapacity, Residuals, TransferCost
from proto.errors import CrossdockError

REQUESTS_MIN: Final = 60
REQUESTS_MAX: Final = 600  # the last ones are taken
FIT_SHARE: Final = 0.7  # first requests that are fitted to; the others show how good the fit is
ROUNDS: Final = 10
STRIDE: Final = 0.4
STRIDE_MIN: Final = 0.02
SHARES: Final = (0.1, 0.25, 0.5, 0.75, 0.9, 0.95)
SIZES: Final = tuple(1 << power for power in range(15))
LIMITS: Final = Limits(queue_requests_max=10**6, queue_wait_s_max=1e6, step_ms=0.0)
"""Another server's steps are not bounded by time, and it rejects no requests."""


class TimingsError(CrossdockError):
    """There are too few requests, or they are all alike."""


class RequestTiming(NamedTuple):
    """A request that ended, as its server timed it."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    ttft_ms: float
    end_s: float

    @property
    def tpot_ms(self) -> float:
        """NaN for an answer of one token."""
        later = self.output_tokens - 1
        return (1000 * (self.end_s - self.at_s) - self.ttft_ms) / later if later > 0 else float("nan")


class Misfit(NamedTuple):
    """How far predictions are off for requests that were not fitted to: predicted / measured - 1."""

    ttft_p50: float
    ttft_p90: float
    tpot_p50: float
    tpot_p90: float


class MeasuredServer(NamedTuple):
    capacity: ProfileCapacity
    instances: int = 1
    step_tokens: int = 2048
    bytes_per_token: float = 0.0
    network_gbit_per_s: float = 200.0


def fitted(
    timings: Sequence[RequestTiming],
    server: MeasuredServer,
    about: dict[str, Any],
    tell: Callable[[int, int], None] = lambda done, of: None,
) -> tuple[Profile, Misfit]:
    """Raises `TimingsError`."""
    rows = sorted(timings)[-REQUESTS_MAX:]
    if len(rows) < REQUESTS_MIN:
        raise TimingsError(f"{len(rows)} requests are too few to fit a profile to; {REQUESTS_MIN} or more are needed")
    first, ttft_ms, tpot_ms = _columns(rows)
    if np.isnan(tpot_ms).all():
        raise TimingsError("no answer has more than one token, so nothing is known of decode")
    sent = [Sent(one.at_s - rows[0].at_s, one.prompt_tokens, one.output_tokens) for one in rows]
    fits = np.arange(len(rows)) < FIT_SHARE * len(rows)
    fit_to = [one for one, is_first in zip(sent, fits, strict=True) if is_first]

    def loss(numbers: tuple[float, ...]) -> float:
        outcome = simulated(profile_of(numbers, server, {}), server, fit_to)
        return _distance(first[fits], (outcome.ttft_ms, ttft_ms[fits]), (outcome.tpot_ms, tpot_ms[fits]))

    numbers = _descend(_guess(first, ttft_ms, tpot_ms), loss, tell)
    profile = profile_of(numbers, server, about)
    outcome = simulated(profile, server, sent)
    misfit = Misfit(*(
        float(np.nanquantile(mine[~fits], share) / np.nanquantile(theirs[~fits], share) - 1)
        for mine, theirs in ((outcome.ttft_ms, ttft_ms), (outcome.tpot_ms, tpot_ms))
        for share in (0.5, 0.9)
    ))  # fmt: skip
    return profile.replaced(run_sigma=max(float(np.mean(np.abs(misfit))), 0.03)), misfit


def simulated(profile: Profile, server: MeasuredServer, sent: Sequence[Sent]) -> PlayedOutcome:
    """Simulates these requests on the server with this profile."""
    return Player(profile, Workers(0, 0, server.instances), sent, RunOptions(limits=LIMITS, slices=False)).run()


def profile_of(numbers: Sequence[float], server: MeasuredServer, about: dict[str, Any]) -> Profile:
    request_ms, token_ms, pair_ms, step_ms, sequence_ms, kv_token_ms = numbers
    sizes = [float(size) for size in SIZES]
    capacity = server.capacity
    batches = [size for size in sizes if size <= max(capacity.seqs_max, 2)]
    return Profile(
        # A step reads all weights, even if it has few tokens.
        PrefillCost(Curve(tuple(sizes), tuple(max(token_ms * size, step_ms) for size in sizes)), pair_ms, Residuals()),
        DecodeCost(Curve(tuple(batches), tuple(step_ms + sequence_ms * size for size in batches)), kv_token_ms),
        capacity,
        capacity,
        TransferCost(1.0, server.network_gbit_per_s * 1e9 / 8 / 1000, server.bytes_per_token, "network"),
        HostCost(request_ms=request_ms),
        step_tokens=server.step_tokens,
        attention_tokens=max(round(token_ms / pair_ms), 1),
        about=about,
        origin="from a server",
    )


def _columns(rows: Sequence[RequestTiming]) -> tuple[Floats, Floats, Floats]:
    """Prompt tokens, TTFT, TPOT."""
    return (
        np.array([float(one.prompt_tokens) for one in rows]),
        np.array([one.ttft_ms for one in rows]),
        np.array([one.tpot_ms for one in rows]),
    )


def _guess(prompt: Floats, ttft_ms: Floats, tpot_ms: Floats) -> tuple[float, ...]:
    """Returns start values from the requests that seem to have waited least."""
    token_ms = max(float(np.quantile(ttft_ms / prompt, 0.1)), 1e-4)
    step_ms = max(float(np.nanquantile(tpot_ms, 0.05)), 1e-3)
    request_ms = max(float(ttft_ms.min()) / 4, 0.1)
    return request_ms, token_ms, token_ms / 8192, step_ms, step_ms / 32, step_ms / 100_000


def _distance(prompt: Floats, ttft: tuple[Floats, Floats], tpot: tuple[Floats, Floats]) -> float:
    """Mean of the quantiles' differences, as logarithms."""
    low, high = np.quantile(prompt, (1 / 3, 2 / 3))
    parts = [prompt <= low, (prompt > low) & (prompt <= high), prompt > high]
    pairs = [(ttft[0][part], ttft[1][part]) for part in parts if part.sum() >= len(SHARES)]
    found = [_log_differences(*pair) for pair in pairs]
    return float(np.mean(found)) + float(_log_differences(*tpot))


def _log_differences(mine: Floats, theirs: Floats) -> float:
    ratio = np.nanquantile(mine, SHARES) / np.maximum(np.nanquantile(theirs, SHARES), 1e-6)
    return float(np.mean(np.abs(np.log(np.maximum(ratio, 1e-9)))))


def _descend(
    numbers: tuple[float, ...], loss: Callable[[tuple[float, ...]], float], tell: Callable[[int, int], None]
) -> tuple[float, ...]:
    """Coordinate descent over their logarithms."""
    best, strides = loss(numbers), [STRIDE] * len(numbers)
    for done in range(ROUNDS):
        tell(done, ROUNDS)
        for place, stride in enumerate(strides):
            for factor in (1 + stride, 1 / (1 + stride)):
                tried = tuple(value * factor if place == at else value for at, value in enumerate(numbers))
                if (value := loss(tried)) < best:
                    best, numbers = value, tried
                    break
            else:
                strides[place] = max(stride * 0.6, STRIDE_MIN)
    return numbers
