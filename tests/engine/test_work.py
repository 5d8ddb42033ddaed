"""How much a model computes for a token."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from engine.model.work import attention_tokens

SHAPE = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip
ATTENTION = 2 * 32 * 32 + 2 * 32 * 16


def test_weights_of_layers_count_and_embeddings_do_not() -> None:
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=False))  # type: ignore[arg-type]
    a_layer = ATTENTION + 3 * 32 * 48
    assert attention_tokens(model, model.config, 2, 8) == a_layer // (2 * 4 * 8)


def test_of_experts_those_count_that_a_token_goes_through() -> None:
    with torch.device("meta"):
        model = MixtralForCausalLM(MixtralConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2))  # type: ignore[arg-type]
    a_layer = ATTENTION + 4 * 32 + 2 * 3 * 32 * 48
    assert attention_tokens(model, model.config, 2, 8) == a_layer // (2 * 4 * 8)
