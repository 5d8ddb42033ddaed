"""The engine on a GPU: greedy tokens equal those of transformers, with CUDA graphs where the model allows it."""

from pathlib import Path

import pytest

from engine.model.loader import load_engine
from tests import tiny_models
from tests.engine import support
from tests.engine.test_exactness import prompts_of
from tests.engine.test_gpu_runner import GREEDY, RECOGNISED, SAMPLINGS, one_by_one, pipelined

COUNT = 16


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3", "mixtral"])
def test_greedy_tokens_match_transformers(kind: str, tmp_path: Path) -> None:
    """Greedy tokens on a GPU equal those of transformers, with and without the pipeline."""
    path = tiny_models.make(kind, tmp_path)
    prompts = prompts_of((1, 16, 40, 70), seed=7)
    expected = support.plain_greedy(path, prompts, COUNT)
    engine = load_engine(str(path), device="cuda", dtype="float32", kv_bytes=support.KV_BYTES)
    assert support.engine_greedy(engine, prompts, COUNT, chunk=13) == expected
    assert (engine.pipeline is not None) == (kind in RECOGNISED), engine.backend
    if engine.pipeline is not None:
        assert pipelined(engine, prompts, [GREEDY] * 4, COUNT, join_every=3) == expected


def test_sampled_tokens_match_the_host(tmp_path: Path) -> None:
    """Tokens that the pipeline samples on a GPU equal those of the host's sampler."""
    engine = load_engine(
        str(tiny_models.make("llama", tmp_path, spread=0.1)), device="cuda", dtype="float32", kv_bytes=support.KV_BYTES
    )
    prompts = prompts_of((5, 9, 20, 3, 17, 8), seed=1)
    expected = [one_by_one(engine, *both, 20) for both in zip(prompts, SAMPLINGS, strict=True)]
    assert pipelined(engine, prompts, SAMPLINGS, 20, join_every=2) == expected


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", list(tiny_models.KINDS))
def test_half_precision_passes_load_check(kind: str, dtype: str, tmp_path: Path) -> None:
    """Models in half precision pass the check after load on a GPU."""
    path = tiny_models.make(kind, tmp_path, spread=0.05)
    engine = load_engine(str(path), device="cuda", dtype=dtype, kv_bytes=support.KV_BYTES)
    assert engine.backend.startswith("gpu") == (kind in RECOGNISED), engine.backend


def test_pool_fills_the_memory_share(tmp_path: Path) -> None:
    """The pool takes what the memory share leaves if no size is given."""
    engine = load_engine(str(tiny_models.make("llama", tmp_path)), device="cuda", kv_bytes=None)
    assert engine.pool.numel() * engine.pool.element_size() > 1 << 30
