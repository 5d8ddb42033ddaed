"""Three models behind one gateway: each answers as it does alone, and one without workers leaves the others served."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests import tiny_models
from tests.e2e.parts import Parts, parts
from tests.e2e.test_exactness import generate

KINDS = ("llama", "qwen3", "mistral")
PROMPTS = ["The capital of France is", "def fibonacci(n):", "Once upon a time"]
TOKENS = 12


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {kind: tiny_models.make(kind, folder / kind, seed=number) for number, kind in enumerate(KINDS)}


@pytest.fixture(scope="module")
def up(models: dict[str, Path]) -> Iterator[Parts]:
    first, *others = models.values()
    with parts(first) as cluster:
        cluster.start("coordinator", "--queue-wait-s-max", "2")
        more = ",".join(f"{path.name}={path}" for path in others)
        cluster.start("gateway", "--more-models", more, "--served-model-name", "small,default")
        for name, path in models.items():
            for role in ("prefill", "decode"):
                cluster.model = path
                cluster.start(f"{role}_worker", name=f"{role}-{name}")
        cluster.model = first
        cluster.wait_for("all are there", lambda: len(cluster.status().workers) == 6)
        yield cluster


def ask(up: Parts, model: str, prompt: str, timeout_s: float = 60.0) -> httpx.Response:
    body = {
        "model": model, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True,
    }  # fmt: skip
    return httpx.post(f"{up.base_url}/v1/completions", json=body, timeout=timeout_s, trust_env=False)


def ids(answer: httpx.Response) -> list[int]:
    assert answer.status_code == 200, answer.text
    return list(answer.json()["choices"][0]["token_ids"])


def test_models_answer_as_if_alone(up: Parts, models: dict[str, Path]) -> None:
    """Each model of a cluster with several gives the answers that it gives alone."""
    up.wait_ready()
    said = set()
    for name, path in models.items():
        alone = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        up.wait_for(f"{name} answers", lambda name=name: ask(up, name, "x").status_code == 200)
        for prompt in PROMPTS:
            answer = ask(up, name, prompt)
            body = answer.json()
            assert body["model"] == name and body["system_fingerprint"].startswith("fp_")
            said.add(body["system_fingerprint"])
            assert ids(answer) == generate(alone, body["choices"][0]["prompt_token_ids"], TOKENS)
    assert len(said) == len(models)
    assert ids(ask(up, "small", PROMPTS[0])) == ids(ask(up, KINDS[0], PROMPTS[0]))
    listed = httpx.get(f"{up.base_url}/v1/models", trust_env=False).json()["data"]
    assert [one["id"] for one in listed] == [KINDS[0], "small", "default", *KINDS[1:]]
    assert ask(up, "other", "x").status_code == 404


def test_missing_model_leaves_others_served(up: Parts, models: dict[str, Path]) -> None:
    """Requests to a model without workers get 503, and the other models are served as before."""
    before = {name: ids(ask(up, name, PROMPTS[0])) for name in models}
    for role in ("prefill", "decode"):
        up.kill(f"{role}-{KINDS[0]}")
    up.wait_for("they are missed", lambda: len(up.status().workers) == 4)
    # For as long as a request may wait, the model's workers may come back.
    assert ask(up, KINDS[0], PROMPTS[0]).status_code == 503
    assert httpx.get(f"{up.base_url}/ready", trust_env=False).status_code == 200
    for name in KINDS[1:]:
        assert ids(ask(up, name, PROMPTS[0])) == before[name]
