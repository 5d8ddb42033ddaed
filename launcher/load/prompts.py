"""Prompts of a wanted length: token ids where the server takes them; else words, whose number of tokens the server gave or a
local tokenizer measured."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from launcher.http.streams import WORDS
from launcher.load.plan import NEVER, PlannedRequest
from runtime.settings.options import SettingsError

Prompt = str | list[int]


@dataclass(frozen=True)
class Prompts:
    """Makes prompts from random tokens, or words, of `pool`. Equal seeds make equal prompts. Each request has a part of its
    own that no other request shares, so that only intended parts are cached."""

    seed: int
    pool: Sequence[int] | Sequence[str]
    block_tokens: int
    prefix_tokens: int
    tokens_per_word: float = 1.0
    overhead_tokens: float = 0.0  # of the chat template, or a first token that the server adds

    def make(self, planned: PlannedRequest) -> Prompt:
        words = isinstance(self.pool[0], str)
        units = planned.prompt_tokens
        if words:
            units = max(1, round((planned.prompt_tokens - self.overhead_tokens) / self.tokens_per_word))
        drawn: list[Any] = []
        if planned.prefix != NEVER:
            size = round(self.prefix_tokens / self.tokens_per_word)
            drawn = self._draw(f"prefix {planned.prefix}", max(1, min(size, units - 1)))
        for block in planned.blocks:
            if len(drawn) >= units:
                break
            drawn += self._draw(f"block {block}", round(self.block_tokens / self.tokens_per_word) or 1)
        drawn = drawn[:units]
        drawn += self._draw(f"request {planned.index}", units - len(drawn))
        return " ".join(drawn) if words else drawn

    def _draw(self, what: str, count: int) -> list[Any]:
        return random.Random(f"{self.seed} {what}").choices(self.pool, k=count)


def words_with_a_tokenizer(path: str, overhead_tokens: float) -> tuple[list[str], float]:
    """Returns the words that are one token each after another word, and 1.0; if they are few, all words and their mean tokens.
    Raises `SettingsError`."""
    file = Path(path).expanduser()
    file = file / "tokenizer.json" if file.is_dir() else file
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # noqa: BLE001 - the library raises nothing more special
        raise SettingsError(f"--tokenizer: cannot read {file}: {error}") from None
    single = [word for word in WORDS if len(tokenizer.encode(f" {word}", add_special_tokens=False).ids) == 1]
    if len(single) >= len(WORDS) // 4:
        return single, 1.0
    return list(WORDS), len(tokenizer.encode(" ".join(WORDS), add_special_tokens=False).ids) / len(WORDS)
