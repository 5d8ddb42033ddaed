"""What the engine serves equals transformers at all positions: on the kernels, in transformers, and in the GPU's runner."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from engine.attention import paged
from engine.cpu import recognise
from engine.cpu.recognise import NotRecognised
from engine.engine import Engine, SeqChunk
from engine.model import backend
from engine.model.errors import ModelUnsupported
from tests import tiny_models
from tests.engine import support
from tests.engine.configurations import REFUSED, SERVED
from tests.engine.gpu_runners import gpu_engine

POSITIONS = 700
TOLERANCE = 2e-3  # of log-probabilities; those of the models here spread over ten


def make(name: str, path: Path) -> Path:
    model_type, settings = {**SERVED, **REFUSED}[name]
    if model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        pytest.skip(f"this version of transformers has no {model_type}")
    return tiny_models.make_of_type(model_type, path, **{"max_position_embeddings": 1024, **settings})


def wanted(path: Path, tokens: list[int]) -> torch.Tensor:
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        return torch.log_softmax(model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].float(), -1)


def computed(engine: Engine, tokens: list[int]) -> torch.Tensor:
    """Log-probabilities of a prompt in two chunks and, for its last tokens, of single steps."""
    out = torch.full((len(tokens), engine.info.vocab_size), torch.nan)
    blocks = list(range(-(-len(tokens) // engine.info.block_size)))[::-1]
    ends = sorted({len(tokens) * 3 // 7, *range(max(1, len(tokens) - 4), len(tokens) + 1)})
    for start, end in zip([0, *ends], ends, strict=False):

        def keep(first: int, logits: torch.Tensor, start: int = start) -> None:
            out[start + first : start + first + len(logits)] = torch.log_softmax(logits, -1)

        engine.forward([SeqChunk(tokens[start:end], start, blocks, True, keep)])
    return out


def difference(engine: Engine, path: Path) -> float:
    count = min(POSITIONS, engine.info.context_tokens)
    tokens = torch.randint(6, tiny_models.VOCAB, (count,), generator=torch.Generator().manual_seed(3)).tolist()
    return float((computed(engine, tokens) - wanted(path, tokens)).abs().max())


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", list(SERVED))
def test_configuration_equals_transformers(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Log-probabilities to position 700 equal those of transformers in every runner that takes the model."""
    path = make(name, tmp_path)
    engines = {"served": support.load(path)}
    monkeypatch.setattr(backend, "_recognised", lambda *_: None)
    engines["transformers"] = support.load(path)
    try:
        engines["gpu"] = gpu_engine(path)
    except NotRecognised:
        pass
    found = {kind: difference(engine, path) for kind, engine in engines.items()}
    sys.stdout.write(f"{name}: {engines['served'].backend}, {found}\n")
    assert all(one < TOLERANCE for one in found.values()), found


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", list(REFUSED))
def test_configuration_is_refused(name: str, tmp_path: Path) -> None:
    """A model whose attention the engine does not know is refused."""
    with pytest.raises(ModelUnsupported) as refused:
        support.load(make(name, tmp_path))
    sys.stdout.write(f"{name}: {refused.value}\n")


def test_queries_scaled_by_position(tmp_path: Path) -> None:
    """A model that scales its queries beyond position 64 equals transformers there."""
    path = make("ministral3-llama_4", tmp_path)
    engine = support.load(path)
    assert engine.backend.startswith("transformers") and difference(engine, path) < TOLERANCE


@pytest.mark.parametrize("name", ["ministral3-llama_4", "ministral3-beta-1"])
def test_check_sees_distant_positions(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check after load alone finds kernels that do not scale queries beyond position 64."""
    path = make(name, tmp_path)
    monkeypatch.setattr(recognise, "unknown_code", lambda *_: None)
    assert support.load(path).backend.startswith("transformers")


def test_attention_that_counts_is_refused(tmp_path: Path) -> None:
    """A model whose attention counts positions in the packed batch is refused."""
    with pytest.raises(ModelUnsupported, match="counts positions by itself"):
        support.load(make("llama4-temperature", tmp_path))


def test_hidden_windows_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose mask has another window than its attention says is refused."""
    path = make("mistral-window", tmp_path)
    real = paged.Recorder.record
    monkeypatch.setattr(
        paged.Recorder,
        "record",
        lambda self, module, key, value, call, mask: real(self, module, key, value, type(call)(None, None, None), mask),
    )
    with pytest.raises(ModelUnsupported, match="attention mask of layer 0 is not causal"):
        support.load(path)
