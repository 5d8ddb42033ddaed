"""What cannot be served is refused at load, with a sentence that says why."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, T5Config, T5ForConditionalGeneration

from engine.attention import torch_backend
from engine.model import backend
from engine.model.errors import ContextUnsupported
from engine.model.loader import ModelUnsupported, load_engine  # type: ignore[attr-defined]
from proto.limits import context_tokens
from tests import tiny_models
from tests.engine import support
from tests.engine.configurations import ROPES

TYPES: dict[str, tuple[dict[str, Any], str]] = {
    "mamba": ({"state_size": 8, "head_dim": None}, "position_ids"),
    "bloom": ({"n_head": 4, "n_layer": 2}, "position_ids|attention"),
    "gpt_oss": ({"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 12}, "s_aux"),
    "recurrent_gemma": ({"lru_width": 64, "attention_window_size": 16}, "attention|position_ids"),
    "deepseek_v3": (
        {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
         "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
         "head_dim": 8, "num_key_value_heads": 4},
        "shape",
    ),
}  # fmt: skip


@pytest.mark.parametrize("model_type", list(TYPES))
def test_unsupported_architecture_is_refused(model_type: str, tmp_path: Path) -> None:
    """A model of an unsupported architecture is refused with the reason."""
    settings, why = TYPES[model_type]
    tiny_models.make_of_type(model_type, tmp_path, **settings)
    with pytest.raises(ModelUnsupported, match=why):
        support.load(tmp_path)


def test_encoder_decoder_model_is_refused(tmp_path: Path) -> None:
    config = T5Config(vocab_size=64, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    with pytest.raises(ModelUnsupported, match="encoder-decoder"):
        support.load(tmp_path)


def test_remote_code_is_never_run(tmp_path: Path) -> None:
    """A model that brings its own code is refused, and the code is not run."""
    tiny_models.make("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {
        "model_type": "homemade",
        "auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "evil.py").write_text("raise SystemExit('executed')")
    with pytest.raises(ModelUnsupported, match="configuration"):
        support.load(tmp_path)


def test_missing_or_broken_folder_is_refused(tmp_path: Path) -> None:
    """A model folder that is absent, empty, broken or without safetensors is refused."""
    with pytest.raises(ModelUnsupported, match="no such folder"):
        support.load(tmp_path / "nowhere")
    with pytest.raises(ModelUnsupported, match=r"config\.json"):
        support.load(tmp_path)
    config = AutoConfig.for_model("llama", hidden_size=16, num_attention_heads=2, num_hidden_layers=1, vocab_size=32)
    config.save_pretrained(tmp_path)
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelUnsupported, match="safetensors"):
        support.load(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(ModelUnsupported, match="cannot be loaded"):
        support.load(tmp_path)
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(ModelUnsupported, match=r"model\.safetensors is a pointer of Git LFS.*git lfs pull"):
        support.load(tmp_path)


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes", "compressed-tensors"])
def test_quantized_checkpoint_is_refused(method: str, tmp_path: Path) -> None:
    """A checkpoint of four bits is refused with the name of its method, and the message says what to use."""
    tiny_models.make("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    settings = {"quant_method": method, "bits": 4, "group_size": 128, "load_in_4bit": True, "format": "pack-quantized"}
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    with pytest.raises(ModelUnsupported, match=f"quantized by {method}.*checkpoint in float32"):
        support.load(tmp_path)


def test_packed_weights_are_named(tmp_path: Path) -> None:
    """Quantized weights whose configuration does not say so are refused as such."""
    [file] = tiny_models.make("llama", tmp_path).glob("*.safetensors")
    weights = load_file(file)
    weights["model.layers.0.self_attn.q_proj.qweight"] = weights.pop("model.layers.0.self_attn.q_proj.weight")
    save_file(weights, file)
    with pytest.raises(ModelUnsupported, match="quantized by a method that its configuration does not name"):
        support.load(tmp_path)


def test_missing_weights_are_refused(tmp_path: Path) -> None:
    """A model is refused if weights of one of its layers are missing."""
    tiny_models.make("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["num_hidden_layers"] += 1
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelUnsupported, match="missing"):
        support.load(tmp_path)


def test_bad_settings_are_refused(tmp_path: Path) -> None:
    """A pool that is too small and an unknown dtype are refused."""
    path = str(tiny_models.make("llama", tmp_path))
    with pytest.raises(
        ModelUnsupported, match=r"holds 128 tokens.*at least 0\.0002 GiB \(0\.0004 GiB hold one context"
    ):
        load_engine(path, kv_bytes=int(0.0001 * 2**30))
    with pytest.raises(ModelUnsupported, match="dtype"):
        load_engine(path, dtype="int3", kv_bytes=1 << 20)


@pytest.mark.parametrize("block_size", [1, 2, 3, 16])
def test_smallest_pool_passes_the_check(block_size: int, tmp_path: Path) -> None:
    """The check after load passes with the smallest pool."""
    path = tiny_models.make("llama", tmp_path)
    blocks = -(-256 // block_size)
    assert support.load(path, block_size, kv_bytes=blocks * 3 * 2 * block_size * 2 * 16 * 4).blocks == blocks


def test_wrong_paged_forward_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The window is lost: only the check with windows shorter than its prompt can see it, since the real one is longer."""
    path = tiny_models.make("mistral", tmp_path, sliding_window=200)
    real = torch_backend._attend
    monkeypatch.setattr(torch_backend, "_attend", lambda *args: real(*args[:-1], replace(args[-1], window=None)))  # type: ignore[call-arg]
    monkeypatch.setattr(backend, "_recognised", lambda *_: None)
    with pytest.raises(ModelUnsupported, match="sliding window"):
        support.load(path)


def test_fingerprint_depends_on_model_only(tmp_path: Path) -> None:
    """Equal models have one fingerprint with any block size; other weights or rope settings change it."""
    path = tiny_models.make("llama", tmp_path / "a")
    info = support.load(path).info
    assert (info.layers, info.kv_heads, info.head_dim, info.block_size) == (3, 2, 16, 16)
    assert info.block_bytes == 3 * 2 * 16 * 2 * 16 * 4
    assert info.dtype == "float32" and info.eos_token_ids == (tiny_models.EOS,) and info.context_tokens == 512
    assert info.fingerprint == support.load(tiny_models.make("llama", tmp_path / "copy")).info.fingerprint
    rope = {"rope_type": "default", "rope_theta": 1e5}
    assert support.load(path, block_size=8).info.fingerprint == info.fingerprint, "block sizes may differ"
    others = {
        support.load(tiny_models.make("llama", tmp_path / "b", seed=1)).info.fingerprint,
        support.load(tiny_models.make("llama", tmp_path / "c", rope_parameters=rope)).info.fingerprint,
    }
    assert len(others | {info.fingerprint}) == 3
    assert "layers=3;kv_heads=2;head_dim=16;rope={" in info.fingerprint


def test_yarn_extends_the_context(tmp_path: Path) -> None:
    """YaRN's factor extends the original context in the older and in the newer form of the configuration."""
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    path = tiny_models.make("qwen3", tmp_path, rope_parameters=rope | {"rope_theta": 10000.0})
    assert support.load(path).info.context_tokens == 1024
    config = json.loads((path / "config.json").read_text())
    del config["rope_parameters"]
    (path / "config.json").write_text(json.dumps(config | {"rope_scaling": rope}))
    assert support.load(path).info.context_tokens == 1024
    assert context_tokens(json.loads((path / "config.json").read_text())) == 1024


@pytest.mark.parametrize(
    ("positions", "rope"),
    [(256, {"rope_type": "dynamic", "factor": 4.0}), (1024, {**ROPES["longrope"], "factor": 4.0})],
    ids=["dynamic", "longrope"],
)
def test_dynamic_rope_caps_the_context(tmp_path: Path, positions: int, rope: dict[str, Any]) -> None:
    """The context is capped at the model's own length if rope depends on the batch."""
    rope = {"rope_theta": 10000.0, **rope}
    path = tiny_models.make("llama", tmp_path, max_position_embeddings=positions, rope_parameters=rope)
    assert support.load(path).info.context_tokens == 256


def test_option_lowers_the_context(tmp_path: Path) -> None:
    """The context can be set lower than the model's, and not higher, nor below what a check needs."""
    path = str(tiny_models.make("llama", tmp_path))
    assert load_engine(path, kv_bytes=1 << 22, context_tokens_max=128).info.context_tokens == 128
    for tokens in (513, 1):
        with pytest.raises(ContextUnsupported, match=f"{tokens} tokens; the model takes .* to 512"):
            load_engine(path, kv_bytes=1 << 22, context_tokens_max=tokens)
