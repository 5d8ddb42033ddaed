"""A model in a few integers, over a paged pool like the real one. Its draws are a known function of (prompt, seed, choice,
index), and they are right only if the KV is whole: a slot's value stands for its token and all tokens before it, and a token
is drawn from the sum of all slots, read through the block table. A block that was freed too early, copied wrongly or received
half changes the token, as in a real model.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from engine.sampling.finish import finish_reason
from proto.errors import FinishReason
from proto.sampling import Sampling

VOCAB = 40
EOS = 0
_MASK = (1 << 64) - 1


def mix(a: int, b: int) -> int:
    value = ((a ^ b) * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) & _MASK
    return value ^ (value >> 29)


class Toy:
    """One worker's pool and its forward pass."""

    def __init__(self, blocks: int, block_size: int) -> None:
        self.pool: list[list[int]] = [[-1] * block_size for _ in range(blocks)]
        self.block_size = block_size
        self.tokens_forwarded = 0

    def forward(self, tokens: Sequence[int], start: int, table: Sequence[int]) -> int:
        """Writes these tokens' KV at `start`…; returns the sum of all slots up to the last, for `draw`."""
        pool, size = self.pool, self.block_size
        last = pool[table[(start - 1) // size]][(start - 1) % size] if start else 0
        for position, token in enumerate(tokens, start):
            last = mix(last, token)
            pool[table[position // size]][position % size] = last
        self.tokens_forwarded += len(tokens)
        whole, rest = divmod(start + len(tokens), size)
        total = sum([sum(pool[block]) for block in table[:whole]])
        return total + (sum(pool[table[whole]][:rest]) if rest else 0)

    def copy(self, source: int, target: int) -> None:
        self.pool[target][:] = self.pool[source]

    def packed(self, sub_blocks: Iterable[int], ratio: int) -> tuple[tuple[int, ...], ...]:
        """Returns the contents of these sub-blocks, of which `ratio` make a block."""
        size = self.block_size // ratio
        return tuple(tuple(self.pool[c // ratio][c % ratio * size : (c % ratio + 1) * size]) for c in sub_blocks)

    def spread(self, sub_blocks: Iterable[int], ratio: int, content: Iterable[Sequence[int]]) -> None:
        size = self.block_size // ratio
        for sub_block, slots in zip(sub_blocks, content, strict=True):
            self.pool[sub_block // ratio][sub_block % ratio * size : (sub_block % ratio + 1) * size] = slots


@dataclass
class ToyState:
    """A choice's sampler. If penalties are on, its draws depend on the tokens so far, as in a real sampler."""

    sampling: Sampling
    choice: int
    index: int
    seen: int = 0

    @staticmethod
    def of(
        sampling: Sampling, choice: int, prompt: Sequence[int], output: Sequence[int], start_index: int | None = None
    ) -> "ToyState":
        state = ToyState(sampling, choice, len(output) if start_index is None else start_index)
        if sampling.repetition_penalty != 1.0:
            state.seen += sum(prompt) + sum(output)
        if sampling.presence_penalty:
            state.seen += 1000 * sum(output)
        return state

    def accept(self, token: int) -> None:
        self.index += 1
        if self.sampling.repetition_penalty != 1.0:
            self.seen += token
        if self.sampling.presence_penalty:
            self.seen += 1000 * token

    def draw(self, total: int) -> int:
        return mix(mix(total & _MASK, self.sampling.seed + 131 * self.choice), self.seen + self.index) % VOCAB


@dataclass(frozen=True)
class ToyAnswer:
    """The tokens that a choice must get."""

    tokens: tuple[int, ...]
    finish: FinishReason
    stopped: bool
    """True if a stop string ended it, which happens in the gateway."""


def expected(prompt: Sequence[int], sampling: Sampling, choice: int, stop_word: int) -> ToyAnswer:
    """Returns the expected answer. `stop_word` is a token whose text is a stop string; -1 for none."""
    last = total = 0
    for token in prompt:
        last = mix(last, token)
        total += last
    state, tokens = ToyState.of(sampling, choice, prompt, ()), list[int]()
    while True:
        token = state.draw(total)
        tokens.append(token)
        finish = finish_reason(token, len(tokens), sampling)
        if token == stop_word and finish is not FinishReason.STOP:
            return ToyAnswer(tuple(tokens), FinishReason.STOP, True)
        if finish is not None:
            return ToyAnswer(tuple(tokens), finish, False)
        state.accept(token)
        last = mix(last, token)
        total += last
