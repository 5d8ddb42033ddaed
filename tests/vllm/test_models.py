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
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]


def tokens(python: str, how: str, model: Path, *options: str) -> list[list[int]]:
    environment = os.environ | {
        "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR",
        "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    command = [python, str(HERE / "rows.py"), how, str(model), *options]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    found: list[list[int]] = json.loads(ran.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_equal_those_of_vllm(kind: str, vllm_python: str, tmp_path: Path) -> None:
    """Prompts in alternating chunks, in blocks out of order and beside each other, get the tokens of vLLM alone."""
    model = tiny_models.make(kind, tmp_path / kind, **{**WIDE, **KINDS[kind]})
    assert tokens(vllm_python, "crossdock", model) == tokens(vllm_python, "stock", model)


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
        (("--pipeline-parallel-size", "2"), "--pipeline-parallel-size cannot be used"),
    ],
)
def test_unsuitable_options_are_named(options: tuple[str, ...], says: str, vllm_python: str, tmp_path: Path) -> None:
    """Options that break a promise, or that crossdock has itself, are refused by name before a model is loaded."""
    command = [vllm_python, str(HERE / "rows.py"), "crossdock", str(tmp_path), *(f"'{o}'" for o in options)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode and says in ran.stderr.splitlines()[-1], ran.stderr[-2000:]
