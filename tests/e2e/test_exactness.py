"""Greedy tokens through the whole cluster equal `transformers` generate, for every kind of model, alone and in company.
Two of them in short; `tests/engine` compares the engine alone for each."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests import tiny_models
from tests.e2e.live import at_once, live
from tests.helpers import first

KINDS = ["gemma3", "qwen3_moe", "llama", "qwen2", "qwen3", "mistral", "gemma2", "phi3"]
LENGTHS = [1, 15, 16, 17, 40, 64, 65, 200]
NEW_TOKENS = 24


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(6, 256, (length,), generator=generator).tolist() for length in LENGTHS]


def generate(model: Any, prompt: list[int], new_tokens: int) -> list[int]:
    """Without a mask, transformers would leave out prompt tokens that are `pad_token_id`, as answers may have."""
    ids = torch.tensor([prompt])
    with torch.no_grad():
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False, eos_token_id=None,
            pad_token_id=0,
        )  # fmt: skip
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens


@pytest.mark.parametrize("kind", first(2, KINDS))
def test_served_tokens_equal_generate(kind: str, tmp_path: Path) -> None:
    """Tokens equal those of transformers' generate, whether a prompt is served alone or among others."""
    model_path = tiny_models.make(kind, tmp_path / kind)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    expected = [generate(model, prompt, NEW_TOKENS) for prompt in prompts()]
    with live(model_path, tmp_path / "state", STEP_TOKENS="64") as up:

        def ask(prompt: list[int]) -> list[int]:
            return up.token_ids(prompt, NEW_TOKENS, ignore_eos=True)

        alone = [ask(prompt) for prompt in prompts()]
        together = at_once(ask, prompts(), threads=len(LENGTHS))
        up.wait_idle()
    for length, want, one, other in zip(LENGTHS, expected, alone, together, strict=True):
        assert one == want, f"{kind}: a prompt of {length} tokens, alone"
        assert other == want, f"{kind}: a prompt of {length} tokens, in company"
