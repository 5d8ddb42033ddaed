"""A profile from published figures of a card and the shape of a model.

A step takes the slower of its arithmetic and reading the weights, then the communication between a worker's cards, and a time
for each layer. How far hardware stays below its makers' figures was fitted to 150 published measurements of Llama 2 70B and
BLOOM 176B on 2, 4 and 8 A100 and H100 (Splitwise, https://github.com/Mutinifni/splitwise-sim, MIT), one set of numbers for
both cards. `tests/tuning/test_estimates.py` says how far they are off.
"""

from math import log2
from typing import Any, Final

from proto.errors import CrossdockError
from tuning.estimates.cards import Card
from tuning.estimates.shapes import Shape
from tuning.profile import Curve, DecodeCost, HostCost, PrefillCost, Profile, ProfileCapacity, Residuals, TransferCost

COMPUTE: Final = 0.60  # share of a card's arithmetic that large matrices reach
MEMORY: Final = 0.74  # share of its memory's speed that reading weights and KV reaches
LINK: Final = 0.37  # share of its link's speed that sums over all cards reach
LAYER_MS: Final = 0.026  # that each layer adds to a step
SYNC_MS: Final = 0.093  # that each layer adds for each doubling of a worker's cards
LARGE_TOKENS, LARGE_FACTOR = 4096, 2.1  # sums over more than two cards take so many times as long from so many tokens
VALUE_BYTES: Final = 2  # of a weight, key or value: bfloat16
MEMORY_SHARE: Final = 0.9  # of a card, for weights, KV and steps
ACTIVATION_BYTES: Final = 2 << 30  # of that share, on each card, for steps
BLOCK_TOKENS: Final = 16
HOST: Final = HostCost(request_ms=5.0, request_token_ms=0.002, step_gap_ms=0.3, join_ms=1.0)
RUN_SIGMA: Final = 0.15  # not measured, so a wide band
SPREAD: Final = Residuals(count=0, p10=-0.15, p50=0.0, p90=0.15, worst=0.3)
SIZES: Final = tuple(1 << power for power in range(14))


class EstimateError(CrossdockError):
    """The model does not fit the cards."""


class Roofline:
    def __init__(self, card: Card, shape: Shape, cards: int = 1) -> None:
        self._card, self._shape, self._cards = card, shape, cards
        self._flop_per_ms = cards * card.tflops * 1e9 * COMPUTE
        self._bytes_per_ms = cards * card.gb_per_s * 1e6 * MEMORY
        self._layers_ms = shape.layers * (LAYER_MS + SYNC_MS * log2(cards))

    def prefill_ms(self, tokens: int) -> float:
        """Returns the time of a step's tokens, context left out."""
        shape = self._shape
        read_ms = VALUE_BYTES * shape.read_weights(tokens) / self._bytes_per_ms
        return (
            max(2 * shape.token_weights * tokens / self._flop_per_ms, read_ms) + self._sums_ms(tokens) + self._layers_ms
        )

    @property
    def context_ms(self) -> float:
        """Time of each token and token of context."""
        return 4 * self._shape.layers * self._shape.heads * self._shape.head_dim / self._flop_per_ms

    def decode_ms(self, sequences: int) -> float:
        """Time of a step, reading KV left out."""
        shape = self._shape
        weights = shape.token_weights + shape.head
        read_ms = VALUE_BYTES * (shape.read_weights(sequences) + shape.head) / self._bytes_per_ms
        return max(2 * weights * sequences / self._flop_per_ms, read_ms) + self._sums_ms(sequences) + self._layers_ms

    @property
    def kv_token_ms(self) -> float:
        return VALUE_BYTES * self._shape.kv_values / self._bytes_per_ms

    def _sums_ms(self, tokens: int) -> float:
        """Returns the time of two all-reduces per layer. Each sends nearly twice its data (ring all-reduce)."""
        cards, shape = self._cards, self._shape
        sent_bytes = 2 * shape.layers * tokens * shape.hidden * VALUE_BYTES * 2 * (cards - 1) / cards
        slower = LARGE_FACTOR if cards > 2 and tokens >= LARGE_TOKENS else 1.0
        return slower * sent_bytes / (self._card.link_gb_per_s * 1e6 * LINK)

    def kv_tokens(self) -> int:
        """Returns the number of tokens for whose KV there is memory. Raises `EstimateError`."""
        each = self._card.memory_gib * 2**30 * MEMORY_SHARE - ACTIVATION_BYTES
        left = self._cards * each - VALUE_BYTES * self._shape.parameters
        tokens = int(left / (VALUE_BYTES * self._shape.kv_values))
        if tokens < 2 * BLOCK_TOKENS:
            need_gib = VALUE_BYTES * self._shape.parameters / 2**30
            raise EstimateError(
                f"the weights take {need_gib:.0f} GiB, and {self._cards} x {self._card.memory_gib:g} GiB leave no room for KV;"
                " more cards for each worker: --tensor-parallel"
            )
        return tokens


def estimated(
    card: Card,
    shape: Shape,
    cards: int,
    *,
    network_gbit_per_s: float,
    step_tokens: int,
    seqs_max: int,
    cost_per_hour: float,
    about: dict[str, Any],
) -> Profile:
    """`cards`: of one worker; `cost_per_hour`: of one worker. Raises `EstimateError`."""
    model = Roofline(card, shape, cards)
    kv_tokens = model.kv_tokens()
    context = min(shape.context_tokens, kv_tokens // 2)
    capacity = ProfileCapacity(kv_tokens // BLOCK_TOKENS, BLOCK_TOKENS, seqs_max, context, cost_per_hour)
    sizes = [one for one in SIZES if one >= 16]
    batches = [one for one in SIZES if one <= max(seqs_max, 1)]
    return Profile(
        PrefillCost(Curve(*_points(sizes, model.prefill_ms)), model.context_ms, SPREAD),
        DecodeCost(Curve(*_points(batches, model.decode_ms)), model.kv_token_ms, SPREAD),
        capacity,
        capacity,
        TransferCost(1.0, network_gbit_per_s * 1e9 / 8 / 1000, VALUE_BYTES * shape.kv_values, "network", SPREAD),
        HOST,
        run_sigma=RUN_SIGMA,
        step_tokens=step_tokens,
        attention_tokens=max(round(shape.token_weights / (2 * shape.layers * shape.heads * shape.head_dim)), 1),
        about=about,
        origin="estimated",
    )


def _points(counts: list[int], ms: Any) -> tuple[tuple[float, ...], tuple[float, ...]]:
    return tuple(float(count) for count in counts), tuple(ms(count) for count in counts)
