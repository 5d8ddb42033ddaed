"""The times of prefill, decode and KV transfer on one installation. `docs/ratio-lab.md` describes the file. Pure.

    prefill step   = curve(prompt tokens of the step) + context_ms * sum of tokens * mean context
    decode step    = curve(sequences) + kv_token_ms * KV tokens read
    KV transfer    = latency_ms + bytes / bandwidth, of which a prompt's last chunk is what prefill cannot hide

A mixed worker does prefill steps and decode steps in turn.

Curves are piecewise linear through the measured medians. The residuals of the fit are kept, to be shown.
"""

import codecs
from bisect import bisect_right
from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal

import msgspec

from proto.errors import CrossdockError

FORMAT: Final = 1
Least = Annotated[float, msgspec.Meta(ge=0)]
More = Annotated[float, msgspec.Meta(gt=0)]
Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 50)]
Cores = Annotated[int, msgspec.Meta(ge=0, le=1 << 20)]
Origin = Literal["calibrated", "estimated", "from a server"]
"""`calibrated`: measured by `crossdock calibrate`. `estimated`: from published figures. `from a server`: fitted to the times
of requests to another server."""
LEAST_SURE: Final[Sequence[Origin]] = ("estimated", "from a server", "calibrated")


class ProfileError(CrossdockError):
    """A profile that cannot be used; `str()` says what is wrong with it."""


class Curve(msgspec.Struct, frozen=True):
    """A piecewise linear function of a count, in ms. Beyond its last point it goes on with the last slope."""

    at: tuple[Least, ...]
    ms: tuple[More, ...]

    def __call__(self, count: float) -> float:
        at, ms = self.at, self.ms
        if len(at) == 1:
            return ms[0]
        upper = min(max(bisect_right(at, count), 1), len(at) - 1)
        x0, x1, y0, y1 = at[upper - 1], at[upper], ms[upper - 1], ms[upper]
        if count <= at[0]:
            return ms[0]
        return y0 + (y1 - y0) * (count - x0) / (x1 - x0)

    def scaled(self, factor: float) -> "Curve":
        return Curve(self.at, tuple(factor * value for value in self.ms))


class Residuals(msgspec.Struct, frozen=True):
    """How far measurements lie from the fit, as measured / fitted - 1."""

    count: int = 0
    p10: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    worst: float = 0.0

    @staticmethod
    def of(found: Sequence[float]) -> "Residuals":
        if not found:
            return Residuals()
        order = sorted(found)
        p10, p50, p90 = (order[round(share * (len(order) - 1))] for share in (0.1, 0.5, 0.9))
        return Residuals(len(order), p10, p50, p90, max(order, key=abs))


class PrefillCost(msgspec.Struct, frozen=True):
    curve: Curve
    context_ms: Least = 0.0  # for each pair of tokens that attend to each other
    residuals: Residuals = Residuals()

    def step_ms(self, tokens: int, pairs: float) -> float:
        """`pairs`: (token, token it attends to) pairs of the step."""
        return self.curve(tokens) + self.context_ms * pairs

    def scaled(self, factor: float) -> "PrefillCost":
        return PrefillCost(self.curve.scaled(factor), factor * self.context_ms, self.residuals)

    def prompt_ms(self, prompt_tokens: int, cached_tokens: int, step_tokens: int) -> float:
        """All steps of one prompt that runs alone."""
        total, start = 0.0, cached_tokens
        while start < prompt_tokens:
            tokens = min(step_tokens, prompt_tokens - start)
            total += self.step_ms(tokens, tokens * (start + tokens / 2))
            start += tokens
        return total


class DecodeCost(msgspec.Struct, frozen=True):
    curve: Curve
    kv_token_ms: Least = 0.0  # for each token of KV that a step reads
    residuals: Residuals = Residuals()

    def step_ms(self, sequences: float, kv_tokens: float) -> float:
        return self.curve(sequences) + self.kv_token_ms * kv_tokens

    def scaled(self, factor: float) -> "DecodeCost":
        return DecodeCost(self.curve.scaled(factor), factor * self.kv_token_ms, self.residuals)


class TransferCost(msgspec.Struct, frozen=True):
    latency_ms: Least = 0.0
    bytes_per_ms: More = 1e9  # of one prefill worker's link
    bytes_per_token: Least = 0.0
    transport: str = ""
    residuals: Residuals = Residuals()

    def ms(self, tokens: float) -> float:
        return self.latency_ms + tokens * self.bytes_per_token / self.bytes_per_ms


class HostCost(msgspec.Struct, frozen=True):
    """The time that belongs neither to steps nor to transfers."""

    request_ms: Least = 0.0
    """HTTP, tokenizer, control plane and gateway, from the client's send to the first step's begin and from the last step's
    end to the client's first token."""
    request_token_ms: Least = 0.0  # for each prompt token, on top
    step_gap_ms: Least = 0.0  # between two prefill steps of one worker
    join_ms: Least = 0.0  # from a prompt's KV being there to its first decode step, without the step in progress
    residuals: Residuals = Residuals()


class ControlCost(msgspec.Struct, frozen=True):
    """Core time for passing tokens on, in the event loops of decode workers, gateway and client. They share cores with prefill
    workers (`Profile.prefill_cores`). 0: not measured, and not modelled."""

    step_ms: Least = 0.0
    token_ms: Least = 0.0

    def of(self, sequences: float) -> float:
        return self.step_ms + self.token_ms * sequences


class ProfileCapacity(msgspec.Struct, frozen=True):
    """The capacity of one worker."""

    kv_blocks: Count
    block_size: Count = 16
    seqs_max: Count = 1024
    context_tokens: Count = 1 << 20
    cost_per_hour: Least = 0.0  # in any currency; 0: not known

    @property
    def kv_tokens(self) -> int:
        return self.kv_blocks * self.block_size


class Profile(msgspec.Struct, frozen=True):
    prefill: PrefillCost
    decode: DecodeCost
    prefill_capacity: ProfileCapacity
    decode_capacity: ProfileCapacity
    transfer: TransferCost = TransferCost()
    host: HostCost = HostCost()
    prefill_cores: Cores = 0  # shared by all prefill workers of the host, one each at most; 0: each has its own
    decode_cores: Cores = 0  # shared by all decode workers of the host; 0: each has its own
    beside_decode: More = 1.0  # on prefill steps while decode workers of the host are busy
    beside_prefill: More = 1.0  # on decode steps while prefill workers of the host are busy
    beside_mixed: More = 1.0  # on decode steps of a mixed worker while another of the host decodes
    run_sigma: Least = 0.03  # of step times between runs: standard deviation of the logarithm
    step_tokens: Count = 256  # of a prefill step, as calibrated with
    attention_tokens: int = 0  # context at which attention costs a token as much as the weights; 0: not known
    about: dict[str, Any] = {}  # hardware, model, dtype, versions, when
    format: int = FORMAT
    control: ControlCost = ControlCost()
    origin: Origin = "calibrated"

    def cost_per_hour(self, prefill: int, decode: int, mixed: int) -> float:
        """The cost of so many workers; 0 where the cost of a kind is not known."""
        costs = self.prefill_capacity.cost_per_hour, self.decode_capacity.cost_per_hour
        return prefill * costs[0] + (decode + mixed) * costs[1] if min(costs) > 0 else 0.0

    def replaced(self, **changes: Any) -> "Profile":
        return msgspec.structs.replace(self, **changes)


def decoded(data: bytes, name: str) -> Profile:
    """Raises `ProfileError` naming the file."""
    try:
        profile = msgspec.json.decode(data.removeprefix(codecs.BOM_UTF8), type=Profile)
    except msgspec.DecodeError as error:
        raise ProfileError(f"{name}: not a profile, as docs/ratio-lab.md describes it: {error}") from None
    if profile.format != FORMAT:
        raise ProfileError(f"{name}: of format {profile.format}; this version reads {FORMAT}")
    for what, curve in (("prefill", profile.prefill.curve), ("decode", profile.decode.curve)):
        rising = all(a < b for a, b in zip(curve.at, curve.at[1:], strict=False))
        if not curve.at or len(curve.at) != len(curve.ms) or not rising:
            raise ProfileError(f"{name}: {what}.curve needs rising counts, each with a time")
    return profile


def merged(prefill: Profile, decode: Profile) -> Profile:
    """Prefill workers of one kind and decode workers of another, each with hardware of its own: nothing is shared."""
    slower = min(prefill.transfer, decode.transfer, key=lambda cost: cost.bytes_per_ms)
    host = msgspec.structs.replace(prefill.host, join_ms=decode.host.join_ms)
    return Profile(
        prefill.prefill,
        decode.decode,
        prefill.prefill_capacity,
        decode.decode_capacity,
        msgspec.structs.replace(slower, bytes_per_token=decode.transfer.bytes_per_token),
        host,
        run_sigma=max(prefill.run_sigma, decode.run_sigma),
        step_tokens=prefill.step_tokens,
        attention_tokens=prefill.attention_tokens,
        about={
            "model": prefill.about.get("model", ""),
            "prefill": prefill.about | {"origin": prefill.origin},
            "decode": decode.about | {"origin": decode.origin},
        },
        origin=min(prefill.origin, decode.origin, key=LEAST_SURE.index),
    )


def encoded(profile: Profile) -> bytes:
    return msgspec.json.format(msgspec.json.encode(profile), indent=1) + b"\n"
