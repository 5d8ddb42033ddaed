"""The shape of a model: its properties that decide how long a step takes. It comes from config.json, or from a table of known
models."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from proto.errors import CrossdockError

COUNT_MAX: Final = 1 << 40
_PLAIN_MLP: Final = frozenset({"opt", "bloom", "gpt2", "gpt_neox", "gptj", "falcon", "mpt", "phi", "starcoder2"})
"""Kinds of models whose MLP has two matrices; those of all others have three."""


class ShapeError(CrossdockError):
    """A config.json that says too little, or describes an attention that is not known here."""


@dataclass(frozen=True)
class Shape:
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int  # width of an MLP, or of one expert's
    vocabulary: int
    context_tokens: int
    experts: int = 1
    experts_per_token: int = 1
    mlp_matrices: int = 3
    tied: bool = False  # one matrix for embedding and output
    weight_bytes: float = 2.0  # of a weight of the layers; the embedding and the output matrix have 16 bits

    @property
    def _attention(self) -> int:
        return self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)

    @property
    def _expert(self) -> int:
        return self.mlp_matrices * self.hidden * self.mlp

    @property
    def head(self) -> int:
        """Weights of the output matrix."""
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        """All weights, but for biases and norms."""
        return self.layers * (self._attention + self.experts * self._expert) + self.head * (1 if self.tied else 2)

    @property
    def stored_bytes(self) -> float:
        """Memory of all weights."""
        embeddings = self.head * (1 if self.tied else 2)
        return self.weight_bytes * (self.parameters - embeddings) + 2 * embeddings

    @property
    def token_weights(self) -> int:
        """Weights of all layers that one token is multiplied with."""
        return self.layers * (self._attention + self.experts_per_token * self._expert)

    def read_weights(self, tokens: int) -> float:
        """Returns the weights of all layers that a step of `tokens` tokens reads. Only experts that some token chooses are
        read; each expert is taken to be equally likely."""
        idle = (1 - self.experts_per_token / self.experts) ** tokens
        return self.layers * (self._attention + self.experts * (1 - idle) * self._expert)

    @property
    def kv_values(self) -> int:
        """Keys and values of one token."""
        return 2 * self.layers * self.kv_heads * self.head_dim


def of_config(config: Mapping[str, Any]) -> Shape:
    """The shape that a config.json in Hugging Face format describes. Raises `ShapeError` naming what is missing."""
    config = {**config, **(config.get("text_config") or {})}
    if config.get("kv_lora_rank"):
        raise ShapeError("config.json: latent attention (kv_lora_rank) is not known here")
    kind = str(config.get("model_type", ""))
    hidden, heads = _count(config, "hidden_size", "n_embd"), _count(config, "num_attention_heads", "n_head")
    experts = _count(config, "num_local_experts", "num_experts", "n_routed_experts", default=1)
    return Shape(
        layers=_count(config, "num_hidden_layers", "n_layer"),
        hidden=hidden,
        heads=heads,
        kv_heads=_count(config, "num_key_value_heads", default=heads),
        head_dim=_count(config, "head_dim", default=max(hidden // heads, 1)),
        mlp=_count(
            config,
            *(("moe_intermediate_size",) if experts > 1 else ()),
            *("intermediate_size", "ffn_dim", "n_inner"),
            default=4 * hidden,
        ),
        vocabulary=_count(config, "vocab_size"),
        context_tokens=_count(config, "max_position_embeddings", "n_positions", "seq_length", default=2048),
        experts=experts,
        experts_per_token=min(_count(config, "num_experts_per_tok", default=1), experts),
        mlp_matrices=2 if kind in _PLAIN_MLP else 3,
        tied=bool(config.get("tie_word_embeddings", kind in _PLAIN_MLP)),
        weight_bytes=weight_bytes(config),
    )


def weight_bytes(config: Mapping[str, Any]) -> float:
    """Returns the bytes of a weight of the layers. Raises `ShapeError` for a format that is not known here."""
    quantization = config.get("quantization_config")
    if not isinstance(quantization, Mapping):
        return 2.0
    words = " ".join(str(quantization.get(name, "")) for name in ("quant_method", "quant_algo", "fmt", "bits")).lower()
    if any(name in words for name in ("fp8", "e4m3", "w8a8", "int8")):
        return 1.0
    if any(name in words for name in ("fp4", "awq", "gptq 4", "4bit")) or words.endswith(" 4"):
        return 0.5
    raise ShapeError(f"config.json: weights of the format {words.strip()} are not known here")


def config_of(shape: Shape) -> dict[str, Any]:
    """Returns what config.json says of a model of this shape, with three matrices in its MLP."""
    found = {
        "architectures": ["Qwen3MoeForCausalLM" if shape.experts > 1 else "LlamaForCausalLM"],
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.mlp,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": shape.context_tokens,
        "tie_word_embeddings": shape.tied,
    }
    if shape.experts > 1:
        found |= {
            "num_experts": shape.experts,
            "num_experts_per_tok": shape.experts_per_token,
            "moe_intermediate_size": shape.mlp,
        }
    return found


def _count(config: Mapping[str, Any], *names: str, default: int = 0) -> int:
    """Returns the first of these keys that is there."""
    value = next((config[name] for name in names if config.get(name) is not None), default)
    if type(value) is not int or not 0 < value <= COUNT_MAX:
        raise ShapeError(f"config.json: {names[0]} must be a number above 0")
    return value


KNOWN: Final = {
    "Llama-2-7B": Shape(32, 4096, 32, 32, 128, 11008, 32000, 4096),
    "Llama-2-70B": Shape(80, 8192, 64, 8, 128, 28672, 32000, 4096),
    "Llama-3.1-8B": Shape(32, 4096, 32, 8, 128, 14336, 128256, 131072),
    "Llama-3.1-70B": Shape(80, 8192, 64, 8, 128, 28672, 128256, 131072),
    "Llama-3.1-405B": Shape(126, 16384, 128, 8, 128, 53248, 128256, 131072),
    "Llama-3.2-1B": Shape(16, 2048, 32, 8, 64, 8192, 128256, 131072, tied=True),
    "Llama-3.2-3B": Shape(28, 3072, 24, 8, 128, 8192, 128256, 131072, tied=True),
    "Llama-3.3-70B": Shape(80, 8192, 64, 8, 128, 28672, 128256, 131072),
    "Mistral-7B": Shape(32, 4096, 32, 8, 128, 14336, 32768, 32768),
    "Mistral-Small-24B": Shape(40, 5120, 32, 8, 128, 32768, 131072, 32768),
    "Mixtral-8x7B": Shape(32, 4096, 32, 8, 128, 14336, 32000, 32768, 8, 2),
    "Mixtral-8x22B": Shape(56, 6144, 48, 8, 128, 16384, 32768, 65536, 8, 2),
    "Qwen2.5-7B": Shape(28, 3584, 28, 4, 128, 18944, 152064, 32768),
    "Qwen2.5-14B": Shape(48, 5120, 40, 8, 128, 13824, 152064, 32768),
    "Qwen2.5-32B": Shape(64, 5120, 40, 8, 128, 27648, 152064, 32768),
    "Qwen2.5-72B": Shape(80, 8192, 64, 8, 128, 29568, 152064, 32768),
    "Qwen3-4B": Shape(36, 2560, 32, 8, 128, 9728, 151936, 40960, tied=True),
    "Qwen3-8B": Shape(36, 4096, 32, 8, 128, 12288, 151936, 40960),
    "Qwen3-14B": Shape(40, 5120, 40, 8, 128, 17408, 151936, 40960),
    "Qwen3-32B": Shape(64, 5120, 64, 8, 128, 25600, 151936, 40960),
    "Qwen3-30B-A3B": Shape(48, 2048, 32, 4, 128, 768, 151936, 40960, 128, 8),
    "Qwen3-235B-A22B": Shape(94, 4096, 64, 4, 128, 1536, 151936, 40960, 128, 8),
    "OPT-13B": Shape(40, 5120, 40, 40, 128, 20480, 50272, 2048, mlp_matrices=2, tied=True),
    "BLOOM-176B": Shape(70, 14336, 112, 112, 128, 57344, 250880, 2048, mlp_matrices=2, tied=True),
    "SmolLM2-135M": Shape(30, 576, 9, 3, 64, 1536, 49152, 8192, tied=True),
}
