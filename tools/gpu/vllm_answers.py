"""Greedy answers of prefill and decode workers whose engine is vLLM: by each transport, and of two ranks in either phase where
there are two GPUs. `python -m tools.gpu.vllm_answers [MODEL_FOLDER]`, of a tiny model where none is named.

Different numbers of ranks may draw other tokens in 16 bits, which is recorded and is no error.
"""

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from tests import tiny_models
from tests.e2e.parts import parts
from tools.gpu.answers import TRANSPORTS, answer
from tools.gpu.record import ON_GPU, attempt
from worker import engine_python

LIMIT_S = 450.0  # of the part, of which each answer may take what is left
WIDE = {
    "head_dim": 64,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def of(model: Path, until: float) -> None:
    python = os.environ.get("CROSSDOCK_ENGINE_PYTHON") or engine_python.python_of_vllm()
    texts: list[str] = []

    def options(ranks: int) -> list[str]:
        args = f"--enforce-eager --block-size 32 --tensor-parallel-size {ranks}"
        return ["--engine", "vllm", "--engine-python", python, f"--vllm-args={args}", "--max-model-len", "512"]

    with parts(model) as cluster:
        cluster.start("coordinator")
        cluster.start("gateway")

        def compared(transport: str, prefill: int = 1, decode: int = 1) -> dict[str, Any]:
            began = time.perf_counter()
            text = answer(cluster, transport, until, prefill=options(prefill), decode=options(decode))
            texts.append(text)
            assert text == texts[0] or prefill + decode > 2, f"another answer: {text!r}, not {texts[0]!r}"
            return {"text": text, "same": text == texts[0], "seconds": round(time.perf_counter() - began, 1)}

        for transport in TRANSPORTS:
            attempt("vllm", f"{model.name} by {transport}", lambda transport=transport: compared(transport))
        for ranks in ((2, 2), (1, 2), (2, 1)) if not ON_GPU or torch.cuda.device_count() > 1 else ():
            attempt(
                "vllm", f"{model.name}, {ranks[0]} and {ranks[1]} ranks", lambda ranks=ranks: compared("auto", *ranks)
            )


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    ends = time.monotonic() + LIMIT_S
    with tempfile.TemporaryDirectory() as folder:
        of(
            Path(sys.argv[1]) if len(sys.argv) > 1 else tiny_models.make("llama", Path(folder) / "tiny-llama", **WIDE),
            ends,
        )
