"""What `scripts/gpu_check` runs: the GPU tests, the benches, and answers of a whole cluster on one GPU by every transport.

    python -m tests.gpu.check [--out FILE] [MODEL_FOLDER]

Prints a table, and the same as JSON to FILE. Status 0: all good; 1: something is not; 77: there is no GPU here.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).parents[2]
NO_GPU = 77
PROMPT = "The quick brown fox jumps over the lazy dog. " * 6
TRANSPORTS = ("auto", "cuda_ipc", "nccl", "tcp", "gloo")


def tests() -> dict[str, Any]:
    command = [sys.executable, "-m", "pytest", "-q", "-rf", "--no-header", "-p", "no:cacheprovider", "tests/gpu"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    sys.stderr.write(done.stdout[-6000:])
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|skipped|errors?)", done.stdout)}
    return {"ok": done.returncode == 0 and counts.get("passed", 0) > 0, **counts}


def bench() -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.bench"], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode or not done.stdout.strip():
        return {"ok": False, "error": f"status {done.returncode}"}
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return {"ok": all("GB_s" in row for row in result["pairs"]), **result}


def answer(model: Path, transport: str) -> dict[str, Any]:
    """A greedy answer of a cluster whose prefill and decode worker share the GPU."""
    from tests.e2e.parts import parts  # here: it imports what a machine without a GPU need not have

    options = ["--device", "cuda", "--kv-transport", transport]
    with parts(model) as cluster:
        cluster.start("coordinator")
        cluster.start("gateway")
        cluster.start("prefill_worker", *options)
        cluster.start("decode_worker", *options)
        cluster.wait_registered(2)
        began = time.perf_counter()
        body = {"model": cluster.model_id, "prompt": PROMPT, "max_tokens": 32, "temperature": 0}
        reply = httpx.post(f"{cluster.base_url}/v1/completions", json=body, timeout=120)
        reply.raise_for_status()
        text = reply.json()["choices"][0]["text"]
        return {"text": text, "seconds": time.perf_counter() - began}


def answers(model: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for transport in TRANSPORTS:
        try:
            found[transport] = answer(model, transport)
        except (AssertionError, OSError, RuntimeError, httpx.HTTPError) as error:
            found[transport] = {"error": f"{type(error).__name__}: {str(error)[-2000:]}"}
    texts = {one.get("text") for one in found.values()}
    return {"ok": len(texts) == 1 and None not in texts, "by": found}


def show(result: dict[str, Any]) -> None:
    lines = [f"{'GPU tests':<44}{result['tests']}"]
    for name, rate in result["bench"].get("within_GB_s", {}).items():
        lines.append(f"{name:<44}{rate:>9.1f} GB/s")
    for row in result["bench"].get("pairs", []):
        name = f"{row['transport']}, segments of {row['segment_mib']} MiB, digest {row['digest']}"
        lines.append(f"{name:<44}{row['GB_s']:>9.1f} GB/s" if "GB_s" in row else f"{name:<44} {row['error']}")
    for model, found in result["answers"].items():
        for transport, one in found["by"].items():
            lines.append(f"{f'answer of {model} by {transport}':<44} {one.get('error') or repr(one['text'][:40])}")
    sys.stdout.write("\n".join(lines) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/gpu_check", description=__doc__, allow_abbrev=False)
    parser.add_argument("--out", default="", help="File for the result as JSON; standard output if not given.")
    parser.add_argument("model", nargs="?", default="", help="Folder of a model to answer with, besides a tiny one.")
    asked = parser.parse_args()
    try:
        import torch
    except ImportError:
        sys.stderr.write("gpu_check: there is no torch here; name an interpreter that has one in CROSSDOCK_PYTHON\n")
        return NO_GPU
    if not torch.cuda.is_available():
        sys.stderr.write("gpu_check: torch sees no NVIDIA GPU here; nothing was checked\n")
        return NO_GPU
    from tests import tiny_models

    os.environ["HF_HUB_OFFLINE"] = "1"
    result: dict[str, Any] = {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "gpu": torch.cuda.get_device_name(0),
    }
    result["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    result["tests"], result["bench"], result["answers"] = tests(), bench(), {}
    with tempfile.TemporaryDirectory() as folder:
        models = [tiny_models.make("llama", Path(folder) / "tiny-llama")] + ([Path(asked.model)] if asked.model else [])
        for model in models:
            result["answers"][model.name] = answers(model)
    show(result)
    text = json.dumps(result, indent=1)
    if asked.out:
        Path(asked.out).write_text(text + "\n", encoding="utf-8")
    else:
        sys.stdout.write(text + "\n")
    good = result["tests"]["ok"] and result["bench"]["ok"] and all(one["ok"] for one in result["answers"].values())
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
