"""Decides whether the kernels can run a model, from its modules and not from its name.

The shape is that of Llama (Touvron et al. 2023, arXiv:2302.13971): RMSNorm, attention with rotary embedding, RMSNorm, gated
MLP; with or without biases, norms of queries and keys, norms of what a part adds (Gemma 2, OLMo 2), sliding windows, several
rotary embeddings or none in some layers (Gemma 3, SmolLM 3), multipliers (Granite), mixtures of MLPs (Mixtral, Qwen 3), joined
projections. Modules that look alike may compute different functions. So their code may name only what `cpu.known_code` lists;
norms, activations and routers are tested here with inputs, and the whole model is compared after load (`model.selfcheck`).
"""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from engine.attention.forward_code import names_read
from engine.attention.paged import AttentionCall
from engine.cpu.known_code import unknown_code
from engine.cpu.library import HEAD_DIM_MAX, LANES, QUERIES_MAX

ACTIVATIONS: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (F.silu, lambda x: F.gelu(x, approximate="tanh"))
"""Activations by their numbers in the kernels."""
_IGNORED = (nn.Dropout, nn.Identity)
_LAYERS: dict[frozenset[str], tuple[str | None, str | None, str | None, str | None]] = {
    frozenset({"input_layernorm", "post_attention_layernorm"}): (
        "input_layernorm", None, "post_attention_layernorm", None,
    ),
    frozenset({"post_attention_layernorm", "post_feedforward_layernorm"}): (
        None, "post_attention_layernorm", None, "post_feedforward_layernorm",
    ),
    frozenset({"input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"}): (
        "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm",
    ),
}  # fmt: skip
"""The names of a layer's norms → the norms of the attention input, the attention output, the MLP input and the MLP output."""


class NotRecognised(Exception):
    pass


@dataclass(frozen=True)
class MlpParts:
    gate_up: tuple[nn.Linear, ...]  # as one layer or as two
    down: nn.Linear


@dataclass(frozen=True)
class RouterParts:
    linear: nn.Linear  # [experts, hidden]
    experts_per_token: int
    normalises: bool  # the shares of a token's experts add up to 1


@dataclass(frozen=True)
class LayerParts:
    qkv: tuple[nn.Linear, ...]  # queries, keys, values, as one layer or as three
    out: nn.Linear
    mlps: tuple[MlpParts, ...]  # one, or the experts of a mixture
    router: RouterParts | None
    attention_norm: torch.Tensor | None  # of what attention reads
    attention_out_norm: torch.Tensor | None  # of what attention adds
    mlp_norm: torch.Tensor | None
    mlp_out_norm: torch.Tensor | None
    query_norm: torch.Tensor | None  # [head_dim] or [heads * head_dim]
    key_norm: torch.Tensor | None
    window: int
    rotary: int  # index of its table of cosines and sines; -1: no rotary embedding

    def is_plain(self, head_dim: int) -> bool:
        pre_normed = self.attention_norm is not None and self.mlp_norm is not None
        post_normed = self.attention_out_norm is not None or self.mlp_out_norm is not None
        by_head = all(norm is None or norm.numel() == head_dim for norm in (self.query_norm, self.key_norm))
        return self.router is None and self.rotary == 0 and pre_normed and not post_normed and by_head


@dataclass(frozen=True)
class ModelParts:
    layers: tuple[LayerParts, ...]
    embedding: torch.Tensor  # [vocab, hidden]
    embedding_scale: float
    head: nn.Linear
    norm: torch.Tensor
    rotary: nn.Module
    rotary_types: tuple[str | None, ...]  # by table, as `rotary` names them; None where there is one only
    heads: int
    kv_heads: int
    head_dim: int
    activation: int
    epsilon: float
    scaling: float
    softcap: float
    residual: float  # factor on the sum that a part adds
    logit_scale: float
    logit_softcap: float

    @property
    def is_plain(self) -> bool:
        """Returns whether the model has only Llama's shape with biases, head norms, windows and soft caps of scores. Other
        runners than the CPU kernels require this."""
        return (
            self.rotary_types == (None,)
            and ((self.embedding_scale, self.residual, self.logit_scale, self.logit_softcap) == (1.0, 1.0, 1.0, 0.0))
            and all(layer.is_plain(self.head_dim) for layer in self.layers)
        )

    def linears(self) -> Iterator[nn.Linear]:
        for layer in self.layers:
            yield from (*layer.qkv, layer.out)
            for mlp in layer.mlps:
                yield from (*mlp.gate_up, mlp.down)
        yield self.head


class _Seen:
    """Values that must be equal in all layers."""

    def __init__(self) -> None:
        self.epsilons: set[float] = set()
        self.activations: set[int] = set()
        self.residuals: set[float] = set()

    def norm(self, norm: nn.Module, sizes: tuple[int, ...] = ()) -> torch.Tensor:
        return _norm(norm, self.epsilons, sizes)


def recognise(model: Any, kv_heads: int, head_dim: int, calls: list[AttentionCall]) -> ModelParts:
    """The parts of a causal language model of transformers. Raises NotRecognised."""
    body, head, config = model.get_decoder(), model.get_output_embeddings(), model.config.get_text_config()
    children = _children(body, {"embed_tokens", "layers", "norm", "rotary_emb"})
    embedding = children["embed_tokens"]
    if type(head) is not nn.Linear or not isinstance(embedding, nn.Embedding):
        raise NotRecognised("its embeddings are of another kind")
    rotary = children["rotary_emb"]
    types = _rotary_types(rotary, config)
    heads = children["layers"][0].self_attn.o_proj.in_features // head_dim
    seen = _Seen()
    layers = tuple(
        _layer(layer, call, (heads, kv_heads, head_dim), types.index(_layer_type(types, config, index)), seen)
        for index, (layer, call) in enumerate(zip(children["layers"], calls, strict=True))
    )
    unknown = unknown_code(model, body, config)
    if unknown is not None:
        raise NotRecognised(unknown)
    norm = seen.norm(children["norm"])
    scalings = {head_dim**-0.5 if call.scaling is None else call.scaling for call in calls}
    softcaps = {call.softcap or 0.0 for call in calls}
    for found in (seen.epsilons, seen.activations, seen.residuals, scalings, softcaps):
        if len(found) > 1:
            raise NotRecognised("its layers differ from each other")
    _check_sizes(norm.numel(), heads, kv_heads, head_dim, layers)
    return ModelParts(
        layers, embedding.weight, _embedding_scale(body, embedding), head, norm, rotary, types, heads, kv_heads, head_dim,
        seen.activations.pop(), seen.epsilons.pop(), scalings.pop(), softcaps.pop(), seen.residuals.pop(),
        1.0 / float(getattr(config, "logits_scaling", None) or 1.0),
        float(getattr(config, "final_logit_softcapping", None) or 0.0),
    )  # fmt: skip


def _children(module: nn.Module, wanted: set[str], optional: set[str] = frozenset()) -> dict[str, Any]:  # type: ignore[assignment]
    found = {name: child for name, child in module.named_children() if not isinstance(child, _IGNORED)}
    if not wanted <= set(found) <= wanted | optional:
        raise NotRecognised(f"{type(module).__name__} has the parts {', '.join(sorted(found))}")
    return found


def _rotary_types(rotary: nn.Module, config: Any) -> tuple[str | None, ...]:
    if "layer_type" not in inspect.signature(rotary.forward).parameters:
        return (None,)
    return tuple(sorted(set(config.layer_types)))


def _layer_type(types: tuple[str | None, ...], config: Any, index: int) -> str | None:
    return None if types == (None,) else config.layer_types[index]


def _embedding_scale(body: Any, embedding: nn.Embedding) -> float:
    """The factor on embeddings: in the embedding itself (Gemma), or behind it (Granite)."""
    ids = torch.arange(min(8, embedding.num_embeddings), device=embedding.weight.device)
    rows, embedded = embedding.weight[ids], embedding(ids)
    scale = float((embedded.norm() / rows.norm()).item()) if rows.norm() > 0 else 1.0
    own = getattr(embedding, "scalar_embed_scale", scale)
    if not torch.allclose(embedded.float(), rows.float() * own, rtol=1e-4 if rows.dtype == torch.float32 else 2e-2):
        raise NotRecognised("its embeddings are of another kind")
    return float(own) * float(getattr(body, "embedding_multiplier", 1.0))


def _layer(layer: nn.Module, call: AttentionCall, sizes: tuple[int, int, int], rotary: int, seen: _Seen) -> LayerParts:
    names = {name for name, child in layer.named_children() if not isinstance(child, _IGNORED)}
    norms = _LAYERS.get(frozenset(names - {"self_attn", "mlp"}))
    if norms is None:
        raise NotRecognised(f"{type(layer).__name__} has the parts {', '.join(sorted(names))}")
    parts = _children(layer, {"self_attn", "mlp"}, names)
    attention = parts["self_attn"]
    qkv = _projections(attention, "qkv_proj", ("q_proj", "k_proj", "v_proj"), {"o_proj"}, {"q_norm", "k_norm"})
    heads, kv_heads, head_dim = sizes
    if sum(part.out_features for part in qkv) != (heads + 2 * kv_heads) * head_dim:
        raise NotRecognised("its projections have other sizes")
    mlps, router = (
        _mixture(parts["mlp"], seen) if hasattr(parts["mlp"], "experts") else ((_mlp(parts["mlp"], seen),), None)
    )
    seen.residuals.add(float(getattr(layer, "residual_multiplier", 1.0)))
    read, added, mlp_read, mlp_added = (None if name is None else seen.norm(parts[name]) for name in norms)
    query_norm, key_norm = (
        None
        if getattr(attention, name, None) is None
        else seen.norm(getattr(attention, name), (head_dim, count * head_dim))
        for name, count in (("q_norm", heads), ("k_norm", kv_heads))
    )
    return LayerParts(
        qkv, attention.o_proj, mlps, router, read, added, mlp_read, mlp_added, query_norm, key_norm, call.window or 0,
        rotary if _rotates(attention) else -1,
    )  # fmt: skip


def _rotates(attention: Any) -> bool:
    """Returns whether a layer has a rotary embedding: SmolLM 3 says so, EXAONE 4 has none in its layers without a window."""
    if "is_sliding" in names_read(attention) and attention.sliding_window is not None and not attention.is_sliding:
        return False
    return bool(getattr(attention, "use_rope", True))


def _projections(
    module: nn.Module, joined: str, single: tuple[str, ...], others: set[str], optional: set[str]
) -> tuple[nn.Linear, ...]:
    """The linear layers of one input, as one or as several; checks that the module has nothing else."""
    names = (joined,) if hasattr(module, joined) else single
    own = _children(module, {*names, *others}, optional)
    if any(type(own[name]) is not nn.Linear for name in (*names, *others)):
        raise NotRecognised("its projections are not plain linear layers")
    return tuple(own[name] for name in names)


def _mlp(mlp: Any, seen: _Seen) -> MlpParts:
    gate_up = _projections(mlp, "gate_up_proj", ("gate_proj", "up_proj"), {"down_proj"}, {"activation_fn", "act_fn"})
    if sum(part.out_features for part in gate_up) != 2 * mlp.down_proj.in_features:
        raise NotRecognised("its projections have other sizes")
    seen.activations.add(_activation(mlp))
    return MlpParts(gate_up, mlp.down_proj)


def _mixture(mlp: Any, seen: _Seen) -> tuple[tuple[MlpParts, ...], RouterParts]:
    """Experts as transformers keeps them: their weights in two tensors [experts, outputs, inputs]."""
    own = _children(mlp, {"experts", "gate"})
    experts, router = own["experts"], own["gate"]
    gate_up, down = getattr(experts, "gate_up_proj", None), getattr(experts, "down_proj", None)
    weight = getattr(router, "weight", None)
    if not (isinstance(gate_up, nn.Parameter) and isinstance(down, nn.Parameter) and isinstance(weight, nn.Parameter)):
        raise NotRecognised("its experts are of another kind")
    if gate_up.dim() != 3:
        raise NotRecognised("its experts are of another kind")
    count, inner2, hidden = gate_up.shape
    if down.shape != (count, hidden, inner2 // 2) or weight.shape != (count, hidden):
        raise NotRecognised("its experts have other sizes")
    names = {name for module in (experts, router) for name, _ in module.named_parameters()}
    if names != {"gate_up_proj", "down_proj", "weight"}:
        raise NotRecognised(f"its experts have the parts {', '.join(sorted(names))}")
    seen.activations.add(_activation(experts))
    mlps = tuple(MlpParts((_linear(gate_up[at]),), _linear(down[at])) for at in range(count))
    return mlps, _router(router, weight)


def _router(router: Any, weight: torch.Tensor) -> RouterParts:
    """Finds, by test inputs, which of the known rules the router follows."""
    x = torch.randn(4, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight)
    try:
        _, shares, chosen = router(x)
    except (TypeError, ValueError) as error:
        raise NotRecognised("its router is of another kind") from error
    per_token, tolerance = chosen.shape[-1], 1e-5 if weight.dtype == torch.float32 else 2e-2
    likeliest, order = torch.softmax(F.linear(x, weight).float(), dim=-1).topk(per_token, dim=-1)
    for normalises in (True, False):
        want = likeliest / likeliest.sum(-1, keepdim=True) if normalises else likeliest
        if torch.equal(chosen, order) and torch.allclose(shares.float(), want, atol=tolerance):
            return RouterParts(_linear(weight), per_token, normalises)
    raise NotRecognised("its router is of another kind")


def _linear(weight: torch.Tensor) -> nn.Linear:
    """A layer around a weight that is part of something larger."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight.detach(), requires_grad=False)
    return layer


def _norm(norm: nn.Module, epsilons: set[float], sizes: tuple[int, ...]) -> torch.Tensor:
    """Returns the effective weights of an RMSNorm: the stored ones, or 1 plus them."""
    weight, epsilon = getattr(norm, "weight", None), getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if not isinstance(weight, torch.Tensor) or not isinstance(epsilon, float) or weight.dim() != 1:
        raise NotRecognised(f"{type(norm).__name__} is not an RMSNorm")
    if sizes and weight.numel() not in sizes:
        raise NotRecognised("its queries and keys are normed in another way")
    x = (torch.randn(2, weight.numel(), generator=torch.Generator().manual_seed(0)) * 0.01).to(weight)
    plain = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + epsilon)
    tolerance = 1e-4 if weight.dtype == torch.float32 else 2e-2
    for candidate in (weight.float(), 1.0 + weight.float()):
        if torch.allclose(norm(x).float(), plain * candidate, rtol=tolerance, atol=tolerance / 10):
            epsilons.add(epsilon)
            return candidate.detach().float().clone()  # a view would keep the whole file mapped
    raise NotRecognised(f"{type(norm).__name__} is not an RMSNorm")


def _activation(mlp: nn.Module) -> int:
    function = getattr(mlp, "act_fn", getattr(mlp, "activation_fn", None))
    x = torch.linspace(-8.0, 8.0, 65)
    for number, known in enumerate(ACTIVATIONS):
        if function is not None and torch.allclose(function(x), known(x), atol=1e-5):
            return number
    raise NotRecognised("its MLP has another activation")


def _check_sizes(hidden: int, heads: int, kv_heads: int, head_dim: int, layers: tuple[LayerParts, ...]) -> None:
    inner = {mlp.down.in_features for layer in layers for mlp in layer.mlps}
    if any(size % LANES for size in (hidden, head_dim, *inner)) or head_dim > HEAD_DIM_MAX:
        raise NotRecognised(f"its sizes {hidden}, {head_dim}, {sorted(inner)} are not multiples of {LANES}")
    if heads % kv_heads or heads // kv_heads > QUERIES_MAX:
        raise NotRecognised(f"{heads} heads of queries for {kv_heads} of keys")
