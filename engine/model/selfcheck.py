"""Tests at load that a model's paged forward computes the same as its plain forward.

Two random prompts go through the engine in packed chunks and one decode step, and their logits are compared with what the
model computes by itself, with its own eager attention and masks. Where layers have sliding windows it is done again with
windows shorter than the prompt, set for the time of the check.
"""

from contextlib import nullcontext
from typing import Any

import torch

from engine.engine import Engine, ModelInfo, SeqChunk
from engine.model.runner import short_windows

_TOLERANCE = {"float32": 2e-3, "float16": 5e-2, "bfloat16": 1e-1}
"""Largest ‖paged - plain‖ / ‖plain‖ of one position's logits."""


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
        self._windows: list[int | None] = [None]
        if windows:
            self._windows.append(min(min(windows), size // 2 + 2))
        self._references: list[list[torch.Tensor]] = []

    @torch.inference_mode()
    def compute_reference(self) -> None:
        """Plain logits [2, vocab] of each prompt, for its last two positions, for each window setting."""
        for window in self._windows:
            with nullcontext() if window is None else short_windows(self._model, self._config, window):
                self._references.append([self._plain(prompt) for prompt in self._prompts])

    def compare(self, engine: Engine) -> str | None:
        """None when all is well, otherwise what differs. Leaves the pool zeroed and no tokens counted."""
        for window, references in zip(self._windows, self._references, strict=True):
            with nullcontext() if window is None else engine.runner.short_windows(window):
                paged = self._paged(engine)
            for reference, logits in zip(references, paged, strict=True):
                difference = ((logits - reference).norm(dim=-1) / reference.norm(dim=-1)).max().item()
                if not difference <= _TOLERANCE[self._info.dtype]:
                    case = "" if window is None else f" with a sliding window of {window}"
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

    def _plain(self, prompt: list[int]) -> torch.Tensor:
        ids = torch.tensor([prompt], device=self._model.device)
        logits: torch.Tensor = self._model(input_ids=ids, use_cache=False).logits[0, -2:].float()
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


def _random_tokens(vocab_size: int, text_config: Any, count: int, seed: int) -> list[int]:
    """Reproducible token ids, without those the configuration gives a special meaning."""
    special = {
        value for name, value in text_config.to_dict().items() if name.endswith("_token_id") and isinstance(value, int)
    }
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(vocab_size, (4 * count + 64,), generator=generator).tolist()
    plain = [token for token in drawn if token not in special]
    return [plain[index % len(plain)] for index in range(count)]
