"""How much a model computes for a token."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from engine.model.work import attention_tokens

SHAPE = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip
ATTENTION = 2 * 32 * 32 + 2 * 32 * 16


def test_work_skips_embeddings() -> None:
    """Weights of layers count for the work of a token, and embeddings do not."""
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=False))  # type: ignore[arg-type]
    a_layer = ATTENTION + 3 * 32 * 48
    assert attention_tokens(model, model.config, 2, 8) == a_layer // (2 * 4 * 8)


def test_work_counts_active_experts_only() -> None:
    """Experts count for the work of a token only if the token goes through them."""
    with torch.device("meta"):
        model = MixtralForCausalLM(MixtralConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2))  # type: ignore[arg-type]
    a_layer = ATTENTION + 4 * 32 + 2 * 3 * 32 * 48
    assert attention_tokens(model, model.config, 2, 8) == a_layer // (2 * 4 * 8)
