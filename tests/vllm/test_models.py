"""Models of several kinds: crossdock's steps over vLLM's model code give the tokens that vLLM alone gives."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests import tiny_models

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},  # norms of queries and keys
    "mistral": {"sliding_window": 40},
    "gemma3": {"sliding_window": 40},  # windows in some layers alone
    "mixtral": {},
    "qwen3_moe": {},
}
WIDE = {
    "head_dim": 32,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MLA: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 128, "num_key_value_heads": 4, "head_dim": 64, "q_lora_rank": None,
    "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 32, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 64, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1,
}  # fmt: skip
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]


def tokens(python: str, how: str, model: Path, *options: str, dtype: str = "float32") -> list[list[int]]:
    environment = os.environ | {
        "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR",
        "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    command = [python, str(HERE / "rows.py"), how, str(model), dtype, *options]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    found: list[list[int]] = json.loads(ran.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_equal_those_of_vllm(kind: str, vllm_python: str, tmp_path: Path) -> None:
    """Prompts in alternating chunks, in blocks out of order and beside each other, get the tokens of vLLM alone."""
    model = tiny_models.make(kind, tmp_path / kind, **{**WIDE, **KINDS[kind]})
    assert tokens(vllm_python, "crossdock", model) == tokens(vllm_python, "stock", model)


def refusal(python: str, model: Path, *options: str) -> str:
    """The last line of the program that was to load this model."""
    command = [python, str(HERE / "rows.py"), "crossdock", str(model), *options]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode
    return ran.stderr.splitlines()[-1]


def test_latent_attention_is_refused_on_cpus(vllm_python: str, tmp_path: Path) -> None:
    """A model with latent attention (MLA) is refused on CPUs, in a line that says what it needs."""
    model = tiny_models.make_of_type("deepseek_v2", tmp_path / "deepseek", **MLA)
    assert "latent attention (MLA) needs a GPU" in refusal(vllm_python, model, "bfloat16")


def test_fp8_made_of_other_weights_is_refused(vllm_python: str, tmp_path: Path) -> None:
    """vLLM cannot make FP8 weights on CPUs, which is said by name."""
    model = tiny_models.make("llama", tmp_path / "llama", **WIDE)
    assert "only if the model's files have them" in refusal(vllm_python, model, "bfloat16", "--quantization", "fp8")


def test_blocks_of_any_attention_are_whole(vllm_python: str) -> None:
    """Attention that takes every layout, as that of GPUs does, gets one in which a block is one run of bytes."""
    program = (
        "from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts as of\n"
        "from vllm.v1.attention.backend import AttentionBackend\n"
        "from engine.vllm.start import block_outermost_of\n"
        "print(*block_outermost_of([layout.name for layout in of([AttentionBackend])]))"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    ran = subprocess.run([vllm_python, "-c", program], capture_output=True, text=True, env=environment, check=False)
    assert ran.stdout.splitlines()[-1].split() == ["BLNHC", "BLHNC", "BHLNC"], ran.stderr[-2000:]


def test_two_ranks_give_the_same_tokens(vllm_python: str, tmp_path: Path) -> None:
    """Tensor parallelism over two processes changes no token."""
    model = tiny_models.make("llama", tmp_path / "llama", **WIDE)
    ranks = ("--tensor-parallel-size", "2")
    assert tokens(vllm_python, "crossdock", model, *ranks) == tokens(vllm_python, "stock", model)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            ("--speculative-config", '{"method":"ngram","num_speculative_tokens":2}'),
            "--speculative-config cannot be used",
        ),
        (("--max-num-seqs", "3"), "--max-num-seqs is crossdock's own --max-seqs"),
        (("--no-such-option",), "--no-such-option"),
        (("--quantization", "fp8"), "torch.float32 is not supported for quantization method fp8"),
        (("--pipeline-parallel-size", "2"), "--pipeline-parallel-size cannot be used"),
    ],
)
def test_unsuitable_options_are_named(options: tuple[str, ...], says: str, vllm_python: str, tmp_path: Path) -> None:
    """Options that break a promise, that crossdock has itself, and weights that vLLM cannot compute, are refused by name."""
    model = tiny_models.make("llama", tmp_path / "llama", **WIDE)
    assert says in refusal(vllm_python, model, "float32", *(f"'{option}'" for option in options))
