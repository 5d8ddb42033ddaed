"""The CPU kernels: the same bits in every batch, with any threads and instruction set. Other models run without them."""

import hashlib
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from engine.cpu import library
from engine.cpu.huge_pages import HugePages
from engine.cpu.recognise import ModelParts, recognise
from engine.cpu.weights import PackedWeights, round_weights
from engine.engine import SeqChunk
from engine.kv.allocator import BlockAllocator
from engine.model import backend
from engine.model.errors import ModelUnsupported, WeightsUnsupported
from engine.model.loader import load_engine
from tests import tiny_models
from tests.engine import support
from tests.engine.test_batch_invariance import kv_and_logits

UNKNOWN = ("gpt2", "gpt_neox", "starcoder2")
KNOWN = tuple(kind for kind in tiny_models.KINDS if kind not in UNKNOWN)


def kernels_are_here() -> bool:
    try:
        library.load_kernels()
    except library.KernelsUnavailable:
        return False
    return True


pytestmark = pytest.mark.skipif(not kernels_are_here(), reason="the CPU kernels cannot be built here")


@pytest.mark.parametrize("kind", KNOWN)
def test_common_models_run_on_cpu_kernels(kind: str, tmp_path: Path) -> None:
    """Models of the common shape run on the CPU kernels and are batch-invariant."""
    engine = support.load(tiny_models.make(kind, tmp_path))
    assert engine.runner.backend.startswith("cpu") and engine.is_batch_invariant


@pytest.mark.parametrize(
    ("kind", "overrides"),
    [
        ("granite", {"residual_multiplier": 0.5, "embedding_multiplier": 3.0, "logits_scaling": 4.0}),
        ("gemma2", {"final_logit_softcapping": 3.0, "attn_logit_softcapping": 2.0}),
        ("qwen3_moe", {"norm_topk_prob": True, "decoder_sparse_step": 2, "num_experts": 20}),
        ("smollm3", {"no_rope_layers": [1, 0, 1]}),
    ],
)
def test_configuration_options_are_computed(kind: str, overrides: dict[str, object], tmp_path: Path) -> None:
    """Multipliers, softcapping, expert and rope settings give the same greedy tokens as transformers."""
    path = tiny_models.make(kind, tmp_path, **overrides)  # type: ignore[arg-type]
    engine = support.load(path)
    assert engine.runner.backend.startswith("cpu")
    prompts = [[7, 8, 9, 10], [30, 20, 10]]
    assert support.engine_greedy(engine, prompts, 8, 3) == support.plain_greedy(path, prompts, 8)


@pytest.mark.parametrize(("kind", "overrides"), [*((kind, {}) for kind in UNKNOWN), ("llama", {"head_dim": 24})])
def test_other_models_run_in_transformers(kind: str, overrides: dict[str, object], tmp_path: Path) -> None:
    """Models outside the kernels' shape run in transformers, with equal tokens and no batch invariance."""
    path = tiny_models.make(kind, tmp_path, **overrides)  # type: ignore[arg-type]
    engine = support.load(path)
    assert engine.runner.backend.startswith("transformers") and not engine.is_batch_invariant
    prompts = [[7, 8, 9, 10], [30, 20, 10]]
    assert support.engine_greedy(engine, prompts, 8, 3) == support.plain_greedy(path, prompts, 8)


def test_misrecognised_model_runs_in_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that the kernels would compute wrongly falls back to transformers."""

    def recognise_wrongly(*arguments: Any) -> ModelParts:
        return replace(recognise(*arguments), residual=0.5)

    monkeypatch.setattr(backend, "recognise", recognise_wrongly)
    assert support.load(tiny_models.make("llama", tmp_path)).runner.backend.startswith("transformers")


def test_missing_kernels_use_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model loads in transformers and the reason is reported if the CPU kernels are unavailable."""

    def fails() -> None:
        raise library.KernelsUnavailable("planted")

    monkeypatch.setattr(backend, "load_kernels", fails)
    said: list[str] = []
    path = tiny_models.make("llama", tmp_path)
    engine = load_engine(str(path), kv_bytes=support.KV_BYTES, on_progress=said.append)
    assert engine.runner.backend.startswith("transformers") and "without the CPU kernels: planted" in said
    with pytest.raises(WeightsUnsupported, match="planted"):
        load_engine(str(path), kv_bytes=support.KV_BYTES, weights="int8")


def test_broken_kernel_library_is_unavailable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel library that cannot be loaded raises KernelsUnavailable."""
    (tmp_path / "kernels.so").write_text("no library")
    monkeypatch.setattr(library, "_built", lambda: tmp_path / "kernels.so")
    with pytest.raises(library.KernelsUnavailable, match="cannot be loaded"):
        library.load_kernels.__wrapped__()


def test_foreign_kernels_are_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the cache folder is one that everybody may write to."""
    monkeypatch.setattr(library.platformdirs, "user_cache_dir", lambda _: str(tmp_path))  # type: ignore[attr-defined]
    monkeypatch.setattr(library, "_compile", lambda target, path: path.write_text("ours"))
    built = library._built()
    assert built.is_relative_to(tmp_path)
    planted = tmp_path / "planted.so"
    built.rename(planted)
    built.symlink_to(planted)
    monkeypatch.setattr(library, "_compile", lambda target, path: (path.unlink(), path.write_text("ours")))
    assert library._built() == built and not built.is_symlink()


@pytest.mark.parametrize("squatted", [False, True])
def test_fallback_kernel_folder_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, squatted: bool) -> None:
    """`squatted`: another user has made the folder of our name in the shared one, here by a link to it."""
    (tmp_path / "file").write_text("no folder")
    shared = tmp_path / "shared"
    shared.mkdir()
    monkeypatch.setattr(library.platformdirs, "user_cache_dir", lambda _: str(tmp_path / "file"))  # type: ignore[attr-defined]
    monkeypatch.setattr(library.tempfile, "tempdir", str(shared))  # type: ignore[attr-defined]
    monkeypatch.setattr(library, "_compile", lambda target, path: path.write_text("ours"))
    own = shared / f"crossdock-{os.geteuid()}"
    if squatted:
        (tmp_path / "theirs").mkdir()
        own.symlink_to(tmp_path / "theirs")
    built = library._built()
    assert built.parent.parent == shared and (built.parent == own) != squatted
    assert built.parent.stat().st_mode & 0o777 == 0o700 and built.read_text() == "ours"
    assert not squatted or not list((tmp_path / "theirs").iterdir())
    assert library._built() == built or squatted


def test_open_kernel_folder_becomes_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel folder that others may write to gets mode 700."""
    folder = tmp_path / "kernels"
    folder.mkdir()
    folder.chmod(0o777)
    monkeypatch.setattr(library.platformdirs, "user_cache_dir", lambda _: str(tmp_path))  # type: ignore[attr-defined]
    monkeypatch.setattr(library, "_compile", lambda target, path: path.write_text("ours"))
    assert library._built().parent == folder and folder.stat().st_mode & 0o777 == 0o700


def digest(path: Path) -> str:
    """Of KV and logits of a prompt, computed in chunks beside another."""
    engine = support.load(path)
    source = random.Random(5)
    tokens = [source.randrange(6, tiny_models.VOCAB) for _ in range(150)]
    kv, logits = kv_and_logits(engine, tokens, random.Random(1), 40)
    return hashlib.sha256(kv.numpy().tobytes() + logits.numpy().tobytes()).hexdigest()


CHILD = """
import sys, torch
from pathlib import Path
from engine.cpu import library
from engine.cpu.recognise import ModelParts, recognise
from tests.engine.test_cpu_kernels import digest
torch.set_num_threads(int(sys.argv[1]))
print(library.instruction_set(), *map(digest, map(Path, sys.argv[2:])))
"""


def digests_elsewhere(paths: Sequence[Path], threads: int, capability: str) -> list[str]:
    """The instruction set, and the digest of each model."""
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": capability}
    command = [sys.executable, "-c", CHILD, str(threads), *map(str, paths)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout.split()


def test_bits_ignore_instruction_set_and_threads(tmp_path: Path) -> None:
    """KV and logits have the same bits with other instruction sets and thread counts."""
    paths = [tiny_models.make(kind, tmp_path / kind) for kind in ("qwen3", "mistral", "gemma3", "mixtral")]
    here = [digest(path) for path in paths]
    assert digests_elsewhere(paths, 3, "default")[1:] == here
    if library.instruction_set() == "avx512":
        assert digests_elsewhere(paths, 1, "avx2") == ["avx2", *here]


@pytest.mark.parametrize("format", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("outputs", [64, 100, 320])
def test_products_match_rounded_weights(format: str, outputs: int) -> None:
    """Products of packed weights equal those of the rounded weights, for any number of rows."""
    torch.manual_seed(0)
    layer = nn.Linear(48, outputs).requires_grad_(False)
    packed = PackedWeights([layer], format, HugePages())
    if format != "float32":
        round_weights([layer], format)
    for rows in (1, 5, 6, 7, 250):
        x = torch.randn(rows, 48)
        y = np.full((rows, packed.outputs), np.nan, np.float32)
        described = packed.described()
        library.load_kernels().multiply(described, x.data_ptr(), 48, y.ctypes.data, packed.outputs, rows)
        torch.testing.assert_close(torch.from_numpy(y[:, :outputs]), layer(x), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        packed.row(torch.tensor([0, outputs - 1])), layer.weight[[0, outputs - 1]], rtol=1e-6, atol=0
    )


@pytest.mark.parametrize("format", ["bfloat16", "int8"])
def test_smaller_weights_change_the_fingerprint(format: str, tmp_path: Path) -> None:
    """Smaller weights give logits close to the exact ones, under another fingerprint."""
    path = tiny_models.make("qwen2", tmp_path, tie_word_embeddings=True)
    exact = load_engine(str(path), kv_bytes=support.KV_BYTES)
    engine = load_engine(str(path), kv_bytes=support.KV_BYTES, weights=format)
    assert format in engine.runner.backend and engine.info.fingerprint != exact.info.fingerprint
    prompt = SeqChunk([7, 8, 9, 10, 11], 0, [3], True)
    difference = (engine.forward([prompt]) - exact.forward([prompt])).norm() / exact.forward([prompt]).norm()
    assert 0 < difference < 0.2


def test_unsupported_smaller_weights_are_refused(tmp_path: Path) -> None:
    """Smaller weights are refused for models without CPU kernels and for other dtypes."""
    path = tiny_models.make("gpt2", tmp_path)
    with pytest.raises(WeightsUnsupported, match="int8 weights need the CPU kernels") as refused:
        load_engine(str(path), kv_bytes=support.KV_BYTES, weights="int8")
    assert refused.value.option == "--weights"
    with pytest.raises(ModelUnsupported, match="dtype of float32"):
        load_engine(str(path), kv_bytes=support.KV_BYTES, weights="int8", dtype="bfloat16")


def test_input_outside_pool_is_refused(tmp_path: Path) -> None:
    """Chunks, blocks and tokens out of range raise a ValueError before they touch the pool."""
    engine = support.load(tiny_models.make("llama", tmp_path))
    for chunk in (
        SeqChunk([7] * 17, 0, [1], False),
        SeqChunk([7], 0, [engine.blocks], False),
        SeqChunk([7], 0, [-1], False),
        SeqChunk([7], -1, [1], False),
        SeqChunk([], 0, [1], False),
        SeqChunk([7] * 600, 0, list(range(40)), False),
    ):
        with pytest.raises(ValueError, match=r"chunk|block"):
            engine.forward([chunk])
    for token in (-1, engine.info.vocab_size):
        with pytest.raises(ValueError, match="token"):
            engine.forward([SeqChunk([token], 0, [1], True)])
    assert BlockAllocator(engine.blocks) and engine.tokens_forwarded == 0
