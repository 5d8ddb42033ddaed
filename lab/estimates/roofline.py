"""A profile from published figures of a card and the shape of a model, where there are no measured tables.

A step takes the slower of its arithmetic and reading the weights, then the sums over a worker's cards, and a time for each
layer. How far hardware stays below its makers' figures was fitted to tables of measured operator times (aiconfigurator-core
0.12, vLLM 0.24, and 0.14 on A100) of Llama 3.1 8B and 70B and Qwen3 32B on 1 to 8 cards, one set of numbers for all cards.
`ERRORS` says how far steps are off. `tests/lab/test_estimates.py` holds some of the tables' points.
"""

from collections.abc import Callable
from typing import Any, Final, Protocol

from lab.estimates.cards import Card
from lab.estimates.shapes import Shape
from lab.profile import Curve, DecodeCost, HostCost, PrefillCost, Profile, ProfileCapacity, Residuals, TransferCost
from proto.errors import CrossdockError

COMPUTE: Final = 0.68  # share of a card's arithmetic that large matrices reach
MEMORY: Final = 0.80  # share of its memory's speed that reading weights and KV reaches
LINK: Final = 0.45  # share of its link's speed that sums over all cards reach
LAYER_MS: Final = 0.055  # that each layer adds to a step
SUM_MS: Final = 0.004  # that each sum over a worker's cards takes at least; a layer has two
BUS_GB_PER_S: Final = 100  # cards with slower links share one bus, if a worker has more than two
ERRORS: Final = {1: (0.09, 0.29), 2: (0.11, 0.35), 4: (0.12, 0.33), 8: (0.13, 0.39)}
"""How far steps of dense models in 16 bit are off, by the cards of a worker: on average and at most, on H100, H200, A100 and
B200. Prefill of models with experts is on average a quarter to a third faster in the formula than in the tables."""
KV_BYTES: Final = 2  # of a key or value: bfloat16
MEMORY_SHARE: Final = 0.9  # of a card, for weights, KV and steps
ACTIVATION_BYTES: Final = 2 << 30  # of that share, on each card, for steps
BLOCK_TOKENS: Final = 16
HOST: Final = HostCost(request_ms=5.0, request_token_ms=0.002, step_gap_ms=0.3, join_ms=1.0)
RUN_SIGMA: Final = 0.15  # not measured, so a wide band
SPREAD: Final = Residuals(count=0, p10=-0.15, p50=0.0, p90=0.15, worst=0.3)
SIZES: Final = tuple(1 << power for power in range(14))


class EstimateError(CrossdockError):
    """The model does not fit the cards, or nothing is known of it."""


class StepTimes(Protocol):
    """The times and the memory of one worker that a profile is made of."""

    context_ms: float  # of each token of a prefill step and token of context
    kv_token_ms: float  # of each token of KV that a decode step reads
    kv_bytes: float  # of one token, over all cards
    context_tokens: int  # that the model is made for
    attention_tokens: int  # context at which attention costs a token as much as the weights

    def prefill_ms(self, tokens: int) -> float:
        """Returns the time of a step's tokens, context left out."""

    def decode_ms(self, sequences: int) -> float:
        """Returns the time of a step, reading KV left out."""

    def kv_tokens(self) -> int:
        """Returns the number of tokens for whose KV there is memory. Raises `EstimateError`."""


class Roofline:
    def __init__(self, card: Card, shape: Shape, cards: int = 1) -> None:
        self._card, self._shape, self._cards = card, shape, cards
        faster = 2 if shape.weight_bytes == 1 and card.has_fp8 else 1
        self._flop_per_ms = cards * card.tflops * faster * 1e9 * COMPUTE
        self._bytes_per_ms = cards * card.gb_per_s * 1e6 * MEMORY
        self._layers_ms = shape.layers * (LAYER_MS + (2 * SUM_MS if cards > 1 else 0.0))
        attention = 4 * shape.layers * shape.heads * shape.head_dim
        self.context_ms = attention / (cards * card.tflops * 1e9 * COMPUTE)
        self.kv_bytes = float(KV_BYTES * shape.kv_values)
        self.kv_token_ms = self.kv_bytes / self._bytes_per_ms
        self.context_tokens = shape.context_tokens
        self.attention_tokens = max(round(2 * shape.token_weights / attention), 1)

    def prefill_ms(self, tokens: int) -> float:
        shape = self._shape
        read_ms = shape.weight_bytes * shape.read_weights(tokens) / self._bytes_per_ms
        return (
            max(2 * shape.token_weights * tokens / self._flop_per_ms, read_ms) + self._sums_ms(tokens) + self._layers_ms
        )

    def decode_ms(self, sequences: int) -> float:
        shape = self._shape
        weights = shape.token_weights + shape.head
        read_bytes = shape.weight_bytes * shape.read_weights(sequences) + KV_BYTES * shape.head
        read_ms = read_bytes / self._bytes_per_ms
        return max(2 * weights * sequences / self._flop_per_ms, read_ms) + self._sums_ms(sequences) + self._layers_ms

    def _sums_ms(self, tokens: int) -> float:
        """Returns the time of two all-reduces per layer. Each sends nearly twice its data (ring all-reduce)."""
        cards, shape, link = self._cards, self._shape, self._card.link_gb_per_s
        sent_bytes = 2 * shape.layers * tokens * shape.hidden * 2 * 2 * (cards - 1) / cards
        slower = cards if link < BUS_GB_PER_S and cards > 2 else 1
        return slower * sent_bytes / (link * 1e6 * LINK)

    def kv_tokens(self) -> int:
        each = self._card.memory_gib * 2**30 * MEMORY_SHARE - ACTIVATION_BYTES
        left = self._cards * each - self._shape.stored_bytes
        tokens = int(left / self.kv_bytes)
        if tokens < 2 * BLOCK_TOKENS:
            need_gib = self._shape.stored_bytes / 2**30
            raise EstimateError(
                f"the weights take {need_gib:.0f} GiB, and {self._cards} x {self._card.memory_gib:g} GiB leave no room for KV;"
                " more cards for each worker: --tensor-parallel"
            )
        return tokens


def estimated(
    times: StepTimes,
    *,
    network_gbit_per_s: float,
    step_tokens: int,
    seqs_max: int,
    cost_per_hour: float,
    about: dict[str, Any],
) -> Profile:
    """`cost_per_hour`: of one worker. Raises `EstimateError`."""
    kv_tokens = times.kv_tokens()
    context = min(times.context_tokens, kv_tokens // 2)
    capacity = ProfileCapacity(kv_tokens // BLOCK_TOKENS, BLOCK_TOKENS, seqs_max, context, cost_per_hour)
    sizes = [one for one in SIZES if one >= 16]
    batches = [one for one in SIZES if one <= max(seqs_max, 1)]
    return Profile(
        PrefillCost(_curve(sizes, times.prefill_ms), times.context_ms, SPREAD),
        DecodeCost(_curve(batches, times.decode_ms), times.kv_token_ms, SPREAD),
        capacity,
        capacity,
        TransferCost(1.0, network_gbit_per_s * 1e9 / 8 / 1000, times.kv_bytes, "network", SPREAD),
        HOST,
        run_sigma=RUN_SIGMA,
        step_tokens=step_tokens,
        attention_tokens=times.attention_tokens,
        about=about,
        origin="estimated",
    )


def _curve(counts: list[int], ms: Callable[[int], float]) -> Curve:
    """A step never takes longer than a larger one, because it can be padded."""
    found = [ms(count) for count in counts]
    for place in range(len(found) - 2, -1, -1):
        found[place] = min(found[place], found[place + 1])
    return Curve(tuple(map(float, counts)), tuple(found))
