"""Logits of every token of a chunk, some at a time, and the log-probabilities of a prompt made of them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.attention.forward_batch import LOGITS_ROWS
from engine.cpu.library import KernelsUnavailable
from engine.engine import SeqChunk
from engine.model import backend
from engine.model.runner import TransformersRunner
from engine.sampling.prompt_logprobs import PromptScorer
from tests import tiny_models
from tests.engine import support
from tests.engine.test_exactness import prompts_of

LENGTH = 3 * LOGITS_ROWS + 5


def no_kernels() -> None:
    raise KernelsUnavailable("the test wants transformers' own")


def plain_logprobs(path: Path, prompt: list[int]) -> torch.Tensor:
    """[tokens, vocab] of transformers, alone."""
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([prompt])).logits[0]
    return torch.log_softmax(logits.float(), dim=-1)


@pytest.mark.parametrize("plain", [False, True], ids=["kernels", "transformers"])
@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_prompt_logprobs_match_transformers(
    kind: str, plain: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Log probabilities of a prompt in chunks equal those of transformers."""
    path = tiny_models.make(kind, tmp_path)
    if plain:
        monkeypatch.setattr(backend, "load_kernels", no_kernels)
    (prompt,) = prompts_of((LENGTH,), seed=5)
    expected = plain_logprobs(path, prompt)
    engine = support.load(path)
    size = engine.info.block_size
    blocks = list(range(-(-LENGTH // size)))
    found = []
    for start, end in ((0, 70), (70, 71), (71, LENGTH)):
        scorer = PromptScorer(prompt, start, top=3)
        logits = engine.forward([SeqChunk(prompt[start:end], start, blocks, end == LENGTH, scorer)])
        found += scorer.joined(rows_max=50)
    assert [rows.start for rows in found] == [1, 51, 71, 72, 122, 172]
    own = np.concatenate([rows.logprobs for rows in found])
    at = torch.arange(LENGTH - 1)
    np.testing.assert_allclose(own, expected[at, torch.tensor(prompt[1:])].numpy(), atol=1e-4)
    best = expected[:-1].topk(3)
    np.testing.assert_allclose(np.concatenate([rows.top_logprobs for rows in found]), best.values.numpy(), atol=1e-4)
    ranks = (expected[:-1] > expected[at, torch.tensor(prompt[1:])][:, None]).sum(-1) + 1
    assert np.mean(np.concatenate([rows.ranks for rows in found]) == ranks.numpy()) > 0.98, "rounding may swap two"
    assert torch.allclose(torch.log_softmax(logits[0], -1), expected[-1], atol=1e-4), "the last row is given as well"


def test_layers_run_once_for_all_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layers run once for a prompt whose rows are all wanted."""
    monkeypatch.setattr(backend, "load_kernels", no_kernels)
    engine = support.load(tiny_models.make("llama", tmp_path))
    runner = engine.runner
    assert isinstance(runner, TransformersRunner)
    calls = []
    first = runner._model.base_model.layers[0]
    first.register_forward_pre_hook(lambda *_: calls.append(1))
    scorer = PromptScorer(list(range(6, 6 + LENGTH)), 0, top=0)
    engine.forward([SeqChunk(list(range(6, 6 + LENGTH)), 0, list(range(20)), True, scorer)])
    assert len(calls) == 1 and len(scorer.found) == 4


def test_chunk_wants_all_rows_beside_others(tmp_path: Path) -> None:
    """A chunk that wants all its rows gets the same log probabilities beside another chunk as alone."""
    path = tiny_models.make("llama", tmp_path)
    one, two = prompts_of((9, 7), seed=2)
    alone = support.load(path)
    expected = PromptScorer(two, 0, top=1)
    alone.forward([SeqChunk(two, 0, [4], True, expected)])
    engine, scorer = support.load(path), PromptScorer(two, 0, top=1)
    logits = engine.forward([SeqChunk(one, 0, [3], True), SeqChunk(two, 0, [4], False, scorer)])
    assert logits.shape[0] == 1
    (found,), (wanted,) = scorer.joined(100), expected.joined(100)
    np.testing.assert_array_equal(found.logprobs, wanted.logprobs)
