"""The closed list of what the forward of a model may name, so that the kernels can run it.

A model whose code names anything else runs in transformers: it may apply a factor, a limit or a position that the kernels do
not know.

The names are those that versions 5.17 to 5.23 of transformers have in the models of `cpu.recognise`.
"""

from collections.abc import Iterator
from typing import Any, Final

from torch import nn

from engine.attention.forward_code import names_read

_TENSORS: Final = """F cat config contiguous device dict dtype enumerate expand float float32 functional getattr int isinstance
 nn reshape self set shape slice str to torch training transpose type unsqueeze view x"""
_INPUTS: Final = (
    "attention_mask hidden_states input input_ids inputs_embeds past_key_values position_embeddings use_cache"
)
_KNOWN: Final = {
    "model": """CausalLMOutputWithPast MoeCausalLMOutputWithPast attentions final_logit_softcapping labels last_hidden_state
 lm_head load_balancing_loss_func logits_scaling logits_to_keep loss_function model num_experts num_experts_per_tok
 num_local_experts output_router_logits position_ids router_aux_loss_coef router_logits slice_logits_to_keep tanh vocab_size""",
    "body": """BaseModelOutputWithPast CwmModelOutputWithPast DynamicCache MoeModelOutputWithPast ValueError
 _bidirectional_window_overlay abs arange batch_idx bool copy create_causal_mask create_sliding_window_causal_mask embed_tokens
 embedding_multiplier get_seq_length has_sliding_layers head_idx kv_idx layer_types layers norm num_hidden_layers position_ids
 q_idx rotary_emb sliding_window tensor use_bidirectional_attention""",
    "layer": """input_layernorm mlp position_ids post_attention_layernorm post_feedforward_layernorm pre_feedforward_layernorm
 resid_attn_dropout resid_mlp_dropout residual_multiplier self_attn""",
    "attention": """ALL_ATTENTION_FUNCTIONS _attn_implementation apply_rotary_pos_emb attention_dropout attn_logit_softcapping
 clamp_ clip_qkv cos dropout eager_attention_forward get_interface head_dim is_sliding k k_norm k_proj layer_idx
 num_attention_heads num_key_value_heads o_proj q q_norm q_proj qkv_proj residual_dropout rotate_half scaling sin
 sliding_window unsqueeze_dim update use_rope v_proj""",
    "rotary": "attention_scaling cos inv_freq layer_type maybe_autocast position_ids sin",
    "token": """_norm act act_fn activation_fn chunk down_proj dropout embed_scale empty_like eps experts forward gate gate_proj
 gate_up_proj greater hidden_dim index_add_ jitter_noise linear mean no_grad nonzero norm_topk_prob num_experts one_hot permute
 pow residual_dropout rsqrt silu softmax sum super top_k top_k_index top_k_weights topk type_as uniform_ up_proj
 variance_epsilon weight where zeros_like""",
}
"""Part of a model → names. `token` is everything that reads one token at a time: norms, MLPs, routers, the embedding."""
_NAMES: Final = {part: frozenset(f"{_TENSORS} {_INPUTS} {names}".split()) for part, names in _KNOWN.items()}
_MUST_BE_OFF: Final = ("clip_qkv", "use_bidirectional_attention")
"""Properties of a configuration that known code reads and the kernels do not compute."""


def unknown_code(model: Any, body: Any, config: Any) -> str | None:
    """Returns what the model's code names beyond the list, in a few words; None if there is nothing."""
    for name in _MUST_BE_OFF:
        if getattr(config, name, None):
            return f"{name} is {getattr(config, name)}"
    checked: set[tuple[str, type]] = set()
    for part, module in _parts(model, body):
        if type(module).__module__.startswith("torch.nn.") or (part, type(module)) in checked:
            continue
        checked.add((part, type(module)))
        unknown = names_read(module) - _NAMES[part]
        if unknown:
            return f"{type(module).__name__} has {', '.join(sorted(unknown)[:4])}"
    return None


def _parts(model: Any, body: Any) -> Iterator[tuple[str, nn.Module]]:
    layers, attentions = list(body.layers), [layer.self_attn for layer in body.layers]
    known = {model: "model", body: "body", body.rotary_emb: "rotary"}
    known |= dict.fromkeys(layers, "layer") | dict.fromkeys(attentions, "attention")
    return ((known.get(module, "token"), module) for module in model.modules())
