"""Tiny random models with a byte-level tokenizer, made on the fly: what tests serve when no real language is needed.

    path = tiny_models.make("llama", tmp_path / "llama")           # any of KINDS
    path = tiny_models.make("mistral", path, sliding_window=8)      # overrides go to the configuration

Weights are drawn with a large spread, so that attention is sharp and the likeliest token is far ahead of the next: greedy
decoding then has no near ties, and a wrong cache changes the text.
"""

import os
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast

SPECIAL = ["<pad>", "<bos>", "<eos>", "<|user|>", "<|assistant|>", "<|system|>"]
PAD, BOS, EOS = 0, 1, 2
VOCAB = 320
CHAT_TEMPLATE = (
    "<bos>{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

HEAD_DIM = 32 if os.environ.get("CROSSDOCK_ENGINE") == "vllm" else 16  # vLLM has no kernels for 16
_BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 512,
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "tie_word_embeddings": False,
}
_MOE: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "mistral": ("mistral", {"sliding_window": 12}),
    "gemma2": ("gemma2", {"sliding_window": 12, "query_pre_attn_scalar": 16, "num_hidden_layers": 4}),
    "gemma3": ("gemma3_text", {"sliding_window": 12, "query_pre_attn_scalar": 16, "num_hidden_layers": 6}),
    "phi3": ("phi3", {}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen3_moe": ("qwen3_moe", {**_MOE, "num_experts": 4}),
    "olmo2": ("olmo2", {}),
    "gpt_neox": ("gpt_neox", {}),
    "granite": ("granite", {"attention_multiplier": 0.25}),
    "starcoder2": ("starcoder2", {"sliding_window": 12}),
    "smollm3": ("smollm3", {}),
    "gpt2": ("gpt2", {}),
}
"""Kind → (transformers model type, what differs from the common sizes)."""


def make(kind: str, path: str | Path, *, seed: int = 0, spread: float = 0.25, **overrides: Any) -> Path:
    """Saves a model of `kind` with its tokenizer in the folder `path`, and returns the folder.

    `seed` draws the weights, `spread` is their standard deviation; `overrides` go to the configuration.
    """
    model_type, special = KINDS[kind]
    return make_of_type(model_type, path, seed=seed, spread=spread, **{**special, **overrides})


def make_of_type(model_type: str, path: str | Path, *, seed: int = 0, spread: float = 0.25, **settings: Any) -> Path:
    """As `make`, for any model type of transformers: the common sizes, then `settings`."""
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    config = AutoConfig.for_model(model_type, **{**_BASE, **settings})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                torch.nn.init.normal_(parameter, std=spread)
            elif name.endswith("bias"):
                torch.nn.init.normal_(parameter, std=0.1)
    generation: Any = GenerationConfig
    model.generation_config = generation(eos_token_id=EOS, bos_token_id=BOS, pad_token_id=PAD)
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, so any text can be written; special tokens, and a chat template of the simplest form."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate(SPECIAL + alphabet)}
    raw = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    make_fast: Any = PreTrainedTokenizerFast
    fast: PreTrainedTokenizerFast = make_fast(
        tokenizer_object=raw,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        additional_special_tokens=SPECIAL[3:],
        model_max_length=_BASE["max_position_embeddings"],
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast
