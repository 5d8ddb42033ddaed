"""The embedded default model, through the whole cluster: right answers, and the very tokens `generate` gives."""

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from launcher.models import resolve as models
from tests.e2e.live import Live, at_once, live
from tests.e2e.test_exactness import generate

PROMPTS = [
    "The capital of France is",
    "Water boils at",
    "def fibonacci(n):",
    "Once upon a time",
    "The three primary colours are",
    "In 1969, the first",
    "My favourite recipe for bread:",
    "The quick brown fox",
    "Photosynthesis is the process",
    "To be, or not",
    "A haiku about the sea:\n",
    "import numpy as np\n",
    "The speed of light is",
    "Dear Sir or Madam,",
    "Q: What is 2 + 2?\nA:",
    "The history of Rome begins",
    "SELECT name FROM users WHERE",
    "Die Hauptstadt von Deutschland ist",
    "Once the rain stopped,",
    "List of planets: Mercury, Venus,",
]
LONG = {"Once upon a time": 700, "SELECT name FROM users WHERE": 300}
"""Prompts that are repeated up to so many tokens, so that chunks, segments and several blocks are in it."""
FEW = ["The capital of France is", "def fibonacci(n):", "Die Hauptstadt von Deutschland ist", *LONG]

pytestmark = pytest.mark.timeout(600)  # the model may have to be fetched and converted first


@pytest.fixture(scope="module")
def model_path() -> Path:
    try:
        return models.ready("", "", Console(quiet=True)).path
    except models.ModelError as error:  # type: ignore[attr-defined]
        pytest.skip(f"the default model cannot be had here: {error}")


@pytest.fixture(scope="module")
def up(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with live(model_path, tmp_path_factory.mktemp("state")) as one:
        yield one


def test_streamed_chat_answer_is_right(up: Live) -> None:
    """The default model's streamed answer to a question contains the right word."""
    body = {
        "model": up.model_id, "messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0,
        "max_tokens": 32, "stream": True,
    }  # fmt: skip
    text = ""
    with httpx.stream(
        "POST", f"{up.base_url}/v1/chat/completions", json=body, timeout=120.0, trust_env=False
    ) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                text += json.loads(line.removeprefix("data: "))["choices"][0]["delta"].get("content") or ""
    assert "Paris" in text


@pytest.mark.parametrize(
    ("texts", "new_tokens"),
    [pytest.param(FEW, 24, id="few"), pytest.param(PROMPTS, 64, id="all", marks=pytest.mark.long)],
)
def test_greedy_tokens_equal_generate(up: Live, model_path: Path, texts: list[str], new_tokens: int) -> None:
    """Greedy tokens of the default model equal those of transformers' generate."""
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    prompts = []
    for text in texts:
        ids = tokenizer(text)["input_ids"]
        prompts.append((ids * 200)[: LONG[text]] if text in LONG else ids)
    served = at_once(lambda prompt: up.token_ids(prompt, new_tokens, ignore_eos=True), prompts, threads=8)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    for text, prompt, tokens in zip(texts, prompts, served, strict=True):
        assert tokens == generate(model, prompt, new_tokens), text
