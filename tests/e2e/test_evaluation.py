"""What lm-eval asks of `local-completions`, over the whole cluster: the log-likelihoods that transformers gives."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from launcher.models import resolve as models
from tests.e2e.live import Live, live
from tests.e2e.test_default_model import PROMPTS

pytestmark = pytest.mark.timeout(900)  # the model may have to be fetched and converted first
ITEMS = 25


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


def items(tokenizer: Any) -> list[tuple[list[int], int]]:
    """(tokens of context and continuation, tokens of the context); one is longer than a prefill step."""
    generator, words = random.Random(4), " ".join(PROMPTS).split()
    found = []
    for number in range(ITEMS):
        context = tokenizer.encode(
            " ".join(generator.choices(words, k=700 if number == 7 else generator.randrange(3, 60)))
        )
        continuation = tokenizer.encode(" " + " ".join(generator.choices(words, k=generator.randrange(1, 6))))
        found.append((context + continuation, len(context)))
    return found


def test_log_likelihoods_match_transformers(up: Live, model_path: Path) -> None:
    """Log likelihoods of echoed prompts match those that transformers computes."""
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    model: Any = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    asked = items(tokenizer)
    with httpx.Client(base_url=up.base_url, timeout=300, trust_env=False) as client:
        for start in range(0, ITEMS, 5):
            batch = asked[start : start + 5]
            body = {
                "model": up.model_id, "prompt": [tokens for tokens, _ in batch], "temperature": 0, "max_tokens": 1,
                "logprobs": 1, "seed": 1234, "echo": True,
            }  # fmt: skip
            answer = client.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            for (tokens, context), choice in zip(batch, answer.json()["choices"], strict=True):
                logprobs = choice["logprobs"]
                own, top = logprobs["token_logprobs"][context:-1], logprobs["top_logprobs"][context:-1]
                with torch.inference_mode():
                    plain = torch.log_softmax(model(torch.tensor([tokens])).logits[0].float(), -1)[context - 1 : -1]
                expected = plain.gather(1, torch.tensor(tokens[context:])[:, None])[:, 0]
                assert own == pytest.approx(expected.tolist(), abs=1e-4)
                assert sum(own) == pytest.approx(float(expected.sum()), abs=1e-4)
                greedy = all(one == max(best.values()) for one, best in zip(own, top, strict=True))
                assert greedy == (plain.argmax(-1).tolist() == tokens[context:])
