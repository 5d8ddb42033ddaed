"""Tests at load that a model's paged forward computes the same as its plain forward.

Two random prompts go through the engine in packed chunks and one decode step, and their logits are compared with what the
model computes by itself, with its own eager attention and masks. It is done again with positions that end where the context
ends, and around each position that the configuration names. Where layers have sliding windows, one of these has windows
shorter than the prompt.
"""

from collections.abc import Iterator
from typing import Any, Final

import torch

from engine.engine import Engine, ModelInfo, SeqChunk
from engine.model.runner import short_windows

_POSITION_WORDS: Final = ("position", "window", "chunk", "length", "floor_scale")
"""Parts of the names of numbers in a configuration that are positions or distances."""
_OFFSETS_MAX: Final = 4
_TOLERANCE = {"float32": 2e-3, "float16": 5e-2, "bfloat16": 1e-1}  # of ‖paged - plain‖ / ‖plain‖, at one position


class SelfCheck:
    """`compute_reference` while the model runs its own attention, then `compare` once it runs the paged one."""

    def __init__(self, model: Any, info: ModelInfo, text_config: Any, windows: set[int]) -> None:
        self._model = model
        self._info = info
        self._config = text_config
        size = info.block_size
        long = max(2, min(2 * size + 3, info.context_tokens - 1))
        short = max(1, min(5, 2 * size, long - 1))
        self._prompts = [
            _random_tokens(info.vocab_size, text_config, count, seed) for seed, count in ((1, long), (2, short))
        ]
        window = min(min(windows), size // 2 + 2) if windows else None
        offsets = _offsets(text_config.to_dict(), long, info.context_tokens)
        cases = [(None, 0), *((None, offset) for offset in offsets[1:]), (window, offsets[0])]
        self._cases: list[tuple[int | None, int]] = list(dict.fromkeys(cases))  # (window, position of the first token)
        self._references: list[list[torch.Tensor]] = []

    @torch.inference_mode()
    def compute_reference(self) -> None:
        """Plain logits [2, vocab] of each prompt, for its last two positions, in each case."""
        for window, offset in self._cases:
            with short_windows(self._model, self._config, window):
                self._references.append([self._plain(prompt, offset) for prompt in self._prompts])

    def compare(self, engine: Engine) -> str | None:
        """None when all is well, otherwise what differs. Leaves the pool zeroed and no tokens counted."""
        for (window, offset), references in zip(self._cases, self._references, strict=True):
            with engine.runner.checked(window, offset):
                paged = self._paged(engine)
            for reference, logits in zip(references, paged, strict=True):
                difference = ((logits - reference).norm(dim=-1) / reference.norm(dim=-1)).max().item()
                if not difference <= _TOLERANCE[self._info.dtype]:
                    case = "" if window is None else f" with a sliding window of {window}"
                    case += f" from position {offset}" if offset else ""
                    return (
                        f"its paged attention{case} does not compute what the model computes by itself "
                        f"(logits differ by {difference:.2g}), so it is not served"
                    )
        # Only what was written: touching all of a large pool would take its memory at once.
        engine.pool[: self._blocks_used() + 1].zero_()
        engine.tokens_forwarded = 0
        return None

    def _blocks_used(self) -> int:
        return sum(-(-len(prompt) // self._info.block_size) for prompt in self._prompts)

    def _plain(self, prompt: list[int], offset: int) -> torch.Tensor:
        ids = torch.tensor([prompt], device=self._model.device)
        positions = torch.arange(offset, offset + len(prompt), device=ids.device)[None] if offset else None
        logits: torch.Tensor = (
            self._model(input_ids=ids, position_ids=positions, use_cache=False).logits[0, -2:].float()
        )
        return logits

    def _paged(self, engine: Engine) -> list[torch.Tensor]:
        """Logits [2, vocab] of the last two positions of both prompts: first in two passes, the last token as a decode step."""
        long, short = self._prompts
        size = self._info.block_size
        long_blocks, short_blocks = -(-len(long) // size), -(-len(short) // size)
        assert long_blocks + short_blocks < engine.blocks
        # In descending order, so that a table read in the wrong order shows.
        tables = [list(range(long_blocks, 0, -1)), list(range(long_blocks + short_blocks, long_blocks, -1))]
        cut = max(1, (len(long) - 1) // 2)
        passes = [
            [SeqChunk(long[:cut], 0, tables[0], False)],
            [SeqChunk(long[cut:-1], cut, tables[0], True), SeqChunk(short[:-1], 0, tables[1], True)],
            [
                SeqChunk(long[-1:], len(long) - 1, tables[0], True),
                SeqChunk(short[-1:], len(short) - 1, tables[1], True),
            ],
        ]
        outputs = [engine.forward([chunk for chunk in chunks if chunk.tokens]) for chunks in passes]
        return [torch.stack((outputs[1][row], outputs[2][row])) for row in range(2)]


def _offsets(config: dict[str, Any], count: int, context_tokens: int) -> list[int]:
    """Positions at which a prompt of `count` tokens begins: the first lets it end with the context, the others are just before
    the positions that the configuration names, from the greatest."""
    last = max(0, context_tokens - count)
    named = {position - 2 for position in _positions(config) if count < position < last}
    return [last, *sorted(named - {last}, reverse=True)[: _OFFSETS_MAX - 1]]


def _positions(config: dict[str, Any]) -> Iterator[int]:
    for name, value in config.items():
        if isinstance(value, dict):
            yield from _positions(value)
        elif type(value) is int and any(word in name for word in _POSITION_WORDS):
            yield value


def _random_tokens(vocab_size: int, text_config: Any, count: int, seed: int) -> list[int]:
    """Reproducible token ids, without those the configuration gives a special meaning."""
    special = {
        value for name, value in text_config.to_dict().items() if name.endswith("_token_id") and isinstance(value, int)
    }
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(vocab_size, (4 * count + 64,), generator=generator).tolist()
    plain = [token for token in drawn if token not in special]
    return [plain[index % len(plain)] for index in range(count)]
