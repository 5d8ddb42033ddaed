"""The least time that a machine could need for a step of decode, or for a prompt.

A model has P weights in its linear layers, P' of them outside of the head, and is served b streams of n tokens each:
- a decode step reads every weight and every stream's KV once, and computes `2 P b` floating-point operations;
- prefill of T tokens computes `2 P' T`, and for attention `2 heads head_dim T²` per layer: queries times keys and weights times
  values are `4 heads head_dim T²` together, and causality halves them. Each chunk reads the weights once.
Reading takes at least the bytes over the bandwidth of memory, and computing at least the operations over the rate of a large
matrix product; as both may happen at once, the floor is the larger of the two. All of this leaves something out (norms,
softmax, the embedding), so no step can be faster. Sliding windows are the exception: models with windows shorter than the
context read less KV than is counted here.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class MachineRates:
    """Rates that were measured on this machine."""

    read_bytes_per_s: float
    flops_per_s: float


@dataclass(frozen=True)
class Work:
    """The least bytes to read and operations to compute."""

    read_bytes: float
    flops: float

    def floor_s(self, rates: MachineRates) -> float:
        return max(self.read_bytes / rates.read_bytes_per_s, self.flops / rates.flops_per_s)


@dataclass(frozen=True)
class ModelSize:
    body_weights: int  # weights of the linear layers, without the head
    head_weights: int
    number_bytes: int  # bytes of one number, of weights and KV alike
    layers: int
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * self.number_bytes

    def decode_step(self, streams: int, context_tokens: float) -> Work:
        """Returns the work of one token for each of `streams` streams, with `context_tokens` tokens each."""
        weights = self.body_weights + self.head_weights
        kv_bytes = streams * context_tokens * self.kv_bytes_per_token
        return Work(weights * self.number_bytes + kv_bytes, 2 * weights * streams)

    def prefill(self, tokens: int, chunks: int = 1) -> Work:
        attention = 2 * self.heads * self.head_dim * tokens**2 * self.layers
        return Work(chunks * self.body_weights * self.number_bytes, 2 * self.body_weights * tokens + attention)
