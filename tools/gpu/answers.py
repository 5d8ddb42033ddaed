"""Greedy answers of a cluster whose prefill and decode worker share the device, by each transport; all must say the same:
`python -m tools.gpu.answers [MODEL_FOLDER]`, besides a tiny model."""

import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from tests import tiny_models
from tests.e2e.parts import Parts, parts
from tools.gpu.record import DEVICE, ON_GPU, attempt

PROMPT = "The quick brown fox jumps over the lazy dog. " * 6
TRANSPORTS = ("auto", "nccl", "tcp") if ON_GPU else ("auto", "tcp")
WAITED_UNTIL = time.monotonic() + 75.0
"""A wait that has not ended by then fails early enough to be recorded in the part's time."""


def answer(cluster: Parts, transport: str, until: float = WAITED_UNTIL, **engines: Sequence[str]) -> str:
    """Returns the answer of new workers that use this transport, beside the coordinator and gateway that are there. `engines`:
    further options of the `prefill` and the `decode` worker."""
    options = ["--device", DEVICE, "--kv-transport", transport, *(["--gpu-memory-share", "0.2"] if ON_GPU else [])]
    names = [f"{role}-{transport}" for role in ("prefill", "decode")]

    def left_s() -> float:
        return max(5.0, until - time.monotonic())

    try:
        for name in names:
            role = name.split("-")[0]
            cluster.start(f"{role}_worker", *options, *engines.get(role, ()), name=name)
        cluster.wait_registered(2, left_s())
        body = {"model": cluster.model_id, "prompt": PROMPT, "max_tokens": 32, "temperature": 0}
        reply = httpx.post(f"{cluster.base_url}/v1/completions", json=body, timeout=left_s(), trust_env=False)
        reply.raise_for_status()
        return str(reply.json()["choices"][0]["text"])
    finally:
        for name in names:
            if name in cluster.processes:
                cluster.kill(name)


def of(model: Path) -> None:
    texts: set[str] = set()
    with parts(model) as cluster:
        cluster.start("coordinator")
        cluster.start("gateway")

        def compared(transport: str) -> dict[str, Any]:
            began = time.perf_counter()
            text = answer(cluster, transport)
            texts.add(text)
            assert len(texts) == 1, f"another answer: {text!r}, not {texts - {text}}"
            return {"text": text, "seconds": round(time.perf_counter() - began, 1)}

        for transport in TRANSPORTS:
            attempt("answers", f"{model.name} by {transport}", lambda transport=transport: compared(transport))


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        for path in [tiny_models.make("llama", Path(folder) / "tiny-llama"), *map(Path, sys.argv[1:])]:
            of(path)
