"""Configurations of transformers' causal language models, to be compared with transformers: every kind of rotary embedding, and
every architecture whose forward has something of its own. Positions of 64 and less are where their computation changes."""

from typing import Any

_ORIGINAL = {"original_max_position_embeddings": 64}
_LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **_ORIGINAL}
_YARN = {"rope_type": "yarn", "factor": 16.0, **_ORIGINAL}
_LONG = {"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 256}

ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "theta": {"rope_type": "default", "rope_theta": 500.0},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": _YARN,
    "yarn_untruncated": {**_YARN, "truncate": False, "beta_fast": 8.0, "beta_slow": 2.0},
    "yarn_attention": {**_YARN, "attention_factor": 1.7},
    "yarn_mscale": {**_YARN, "mscale": 1.2, "mscale_all_dim": 0.7},
    "longrope": {**_LONG, "short_factor": [1.0] * 8, "long_factor": [3.0] * 8},
    "llama3": {"rope_type": "llama3", **_LLAMA3},
    "partial": {"rope_type": "default", "partial_rotary_factor": 0.5},
    "llama_4": {**_YARN, "llama_4_scaling_beta": 0.1},
    "unknown_key": {"rope_type": "default", "some_later_key": 0.3},
}
_TYPES_OF_ROPES = ("llama", "qwen3", "ministral3", "seed_oss")
"""The kernels run all but Ministral 3, which scales queries by position."""

_MOE: dict[str, Any] = {
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
    "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "moe_num_experts": 4, "moe_k": 2,
    "shared_expert_intermediate_size": 48, "num_shared_experts": 1,
}  # fmt: skip
_WINDOWS = ["sliding_attention", "full_attention", "sliding_attention"]
_PER_TYPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {**_YARN, "rope_theta": 100000.0},
}

SERVED: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        f"{model_type}-{rope}": (model_type, {"rope_parameters": {"rope_theta": 10000.0, **ROPES[rope]}})
        for model_type in _TYPES_OF_ROPES
        for rope in ROPES
        if (model_type == "ministral3") == (rope == "llama_4")
    },
    "ministral3-window": (
        "ministral3", {"rope_parameters": {"rope_theta": 1e4, **ROPES["llama_4"]}, "sliding_window": 12},
    ),
    "ministral3-beta-1": (
        "ministral3", {"rope_parameters": {"rope_theta": 1e4, **ROPES["llama_4"], "llama_4_scaling_beta": 1.0}},
    ),
    "mistral-window": ("mistral", {"sliding_window": 12}),
    "ministral-window": ("ministral", {"sliding_window": 12}),
    "qwen2-window": ("qwen2", {"sliding_window": 12, "use_sliding_window": True, "layer_types": _WINDOWS}),
    "qwen3-window": ("qwen3", {"sliding_window": 12, "use_sliding_window": True, "layer_types": _WINDOWS}),
    "qwen3-bias": ("qwen3", {"attention_bias": True}),
    "llama-bias": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-one-kv-head": ("llama", {"num_key_value_heads": 1}),
    "llama-gelu": ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "llama-relu": ("llama", {"hidden_act": "relu"}),
    "gemma": ("gemma", {}),
    "gemma2-window": ("gemma2", {"sliding_window": 12, "query_pre_attn_scalar": 16}),
    "gemma2-caps": ("gemma2", {"final_logit_softcapping": 3.0, "attn_logit_softcapping": 2.0, "sliding_window": 12}),
    "gemma3-window": ("gemma3_text", {"sliding_window": 12, "num_hidden_layers": 6, "query_pre_attn_scalar": 16}),
    "gemma3-yarn": ("gemma3_text", {"sliding_window": 12, "layer_types": _WINDOWS, "rope_parameters": _PER_TYPE}),
    "olmo3-yarn": ("olmo3", {"sliding_window": 12, "layer_types": _WINDOWS, "rope_parameters": _PER_TYPE}),
    "olmo2": ("olmo2", {}),
    "olmo": ("olmo", {}),
    "olmo-clip": ("olmo", {"clip_qkv": 0.5}),
    "olmoe": ("olmoe", _MOE),
    "olmoe-clip": ("olmoe", {**_MOE, "clip_qkv": 0.5}),
    "flex_olmo": ("flex_olmo", _MOE),
    "granite": ("granite", {"attention_multiplier": 0.25, "residual_multiplier": 0.5, "embedding_multiplier": 3.0}),
    "granite-logits": ("granite", {"attention_multiplier": 0.25, "logits_scaling": 4.0}),
    "granitemoe": ("granitemoe", {**_MOE, "attention_multiplier": 0.25}),
    "granitemoeshared": ("granitemoeshared", {**_MOE, "attention_multiplier": 0.25, "shared_intermediate_size": 48}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0, 1]}),
    "smollm3-window": ("smollm3", {"no_rope_layers": [1, 0, 1], "use_sliding_window": True, "sliding_window": 12}),
    "exaone4": ("exaone4", {"sliding_window": 12, "layer_types": _WINDOWS}),
    "exaone4-no-window": (
        "exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3, "sliding_window_pattern": 4},
    ),
    "cwm": ("cwm", {"sliding_window": 12, "layer_types": _WINDOWS}),
    "phi3-partial": ("phi3", {"rope_parameters": {"rope_theta": 1e4, **ROPES["partial"]}}),
    "phi3-longrope": ("phi3", {"rope_parameters": {"rope_theta": 1e4, **ROPES["longrope"]}}),
    "phi3-window": ("phi3", {"sliding_window": 12}),
    "phi": ("phi", {}),
    "phi-norms": ("phi", {"qk_layernorm": True}),
    "mixtral": ("mixtral", {**_MOE, "sliding_window": 12}),
    "qwen2_moe": ("qwen2_moe", _MOE),
    "qwen3_moe": ("qwen3_moe", {**_MOE, "norm_topk_prob": True}),
    "ernie4_5": ("ernie4_5", {}),
    "ernie4_5_moe": ("ernie4_5_moe", _MOE),
    "glm": ("glm", {}),
    "glm4": ("glm4", {}),
    "glm4_moe": ("glm4_moe", _MOE),
    "cohere": ("cohere", {"logit_scale": 4.0}),
    "cohere-norms": ("cohere", {"use_qk_norm": True, "logit_scale": 4.0}),
    "cohere2-window": ("cohere2", {"sliding_window": 12, "logit_scale": 4.0, "layer_types": _WINDOWS}),
    "helium": ("helium", {}),
    "arcee-yarn": ("arcee", {"rope_parameters": {"rope_theta": 1e4, **_YARN}}),
    "afmoe": ("afmoe", {**_MOE, "sliding_window": 12, "layer_types": _WINDOWS}),
    "apertus": ("apertus", {}),
    "hunyuan": ("hunyuan_v1_dense", {}),
    "hunyuan-dynamic": (
        "hunyuan_v1_dense", {"rope_parameters": {"rope_theta": 1e4, **ROPES["dynamic"], "alpha": 100.0}},
    ),
    "nemotron": ("nemotron", {}),
    "persimmon": ("persimmon", {}),
    "stablelm": ("stablelm", {"use_qkv_bias": True}),
    "stablelm-norms": ("stablelm", {"qk_layernorm": True}),
    "starcoder2-window": ("starcoder2", {"sliding_window": 12}),
    "gpt2": ("gpt2", {}),
    "gpt2-scaled": ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    "gpt_neox": ("gpt_neox", {}),
    "gpt_neox-sequential": ("gpt_neox", {"use_parallel_residual": False}),
    "opt": ("opt", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    "biogpt": ("biogpt", {}),
    "bitnet": ("bitnet", {}),
}  # fmt: skip
"""Configurations that must give what transformers gives."""

REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama4-temperature": (
        "llama4_text",
        {"floor_scale": 64, "attn_scale": 0.5, "no_rope_layers": [1, 0, 1], "layer_types": ["full_attention"] * 3,
         "moe_layers": [], "intermediate_size_mlp": 96, "num_local_experts": 2},
    ),
    "llama4-chunks": (
        "llama4_text",
        {"attention_chunk_size": 64, "moe_layers": [], "intermediate_size_mlp": 96, "num_local_experts": 2},
    ),
    "gemma3-bidirectional": ("gemma3_text", {"use_bidirectional_attention": True}),
    "doge": ("doge", {}),
    "gpt_oss-sinks": ("gpt_oss", {**_MOE, "sliding_window": 12}),
    "granite_swa-sinks": ("granite_swa", {}),
    "bloom-alibi": ("bloom", {"n_head": 4, "n_layer": 2}),
    "diffllama": ("diffllama", {}),
    "mamba": ("mamba", {"state_size": 8, "head_dim": None}),
    "gptj": ("gptj", {"rotary_dim": 8}),
    "bert": ("bert", {}),
}  # fmt: skip
"""Configurations that the loader must refuse by name: they are not plain causal attention, or count positions by themselves."""
