"""How much a model computes for a token."""

from typing import Any, Final

import torch
from torch import nn

from proto.limits import MAX_CONTEXT_TOKENS

_EXPERTS: Final = ("num_local_experts", "num_experts", "n_routed_experts")


def attention_tokens(model: nn.Module, text_config: Any, layers: int, head_dim: int) -> int:
    """The context at which attention takes as much work for a token as the weights of the decoder layers: each weight is
    multiplied once, and each head does two products of `head_dim` for each token of context. At least 1."""
    heads = int(text_config.num_attention_heads)
    embeddings = {id(module.weight) for name, module in model.named_modules() if _embeds(name, module)}
    experts = next((n for name in _EXPERTS if (n := getattr(text_config, name, None))), 1)
    used = (getattr(text_config, "num_experts_per_tok", None) or 1) / experts
    weights = sum(
        weight.numel() * (used if ".experts." in name else 1.0)
        for name, weight in model.named_parameters()
        if weight.dim() > 1 and id(weight) not in embeddings
    )
    return min(max(int(weights / (2 * layers * heads * head_dim)), 1), MAX_CONTEXT_TOKENS)


def _embeds(name: str, module: nn.Module) -> bool:
    """Whether a module's weights are read row by row, or once for each answer's token alone."""
    is_output = name.rpartition(".")[2] in ("lm_head", "embed_out", "output")
    return isinstance(getattr(module, "weight", None), torch.Tensor) and (
        is_output or isinstance(module, nn.Embedding) or "Embedding" in type(module).__name__
    )
