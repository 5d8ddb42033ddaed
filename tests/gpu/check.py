"""What `scripts/gpu_check` runs: the GPU tests, the benches of the engine and of KV, and answers of a whole cluster on one GPU.

    python -m tests.gpu.check [--out FILE] [--skip PART] [MODEL_FOLDER]

Prints a table, and the same as JSON to FILE, which is written again after each part: a run that is cut off leaves what it had.
A part that takes longer than its time fails, and all of them together end within nine minutes. Status 0: all good; 1: something
is not; 77: there is no GPU here.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
NO_GPU = 77
PROMPT = "The quick brown fox jumps over the lazy dog. " * 6
TRANSPORTS = ("auto", "cuda_ipc", "nccl", "tcp", "gloo")


PARTS_S = {"engine": 150.0, "tests": 150.0, "kv": 100.0, "host": 20.0, "answers": 110.0}
"""Parts in their order, and the seconds that each may take."""


class TooLong(RuntimeError):
    """A part took longer than its time."""


def output_of(arguments: list[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Raises TooLong."""
    try:
        return subprocess.run(
            [sys.executable, "-m", *arguments], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            check=False, timeout=timeout_s,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        tail = error.stdout or b""
        text = tail if isinstance(tail, str) else tail.decode(errors="replace")
        raise TooLong(f"not done in {timeout_s:.0f} s; its last words: {text[-1500:]}") from error


def json_of(module: str, timeout_s: float) -> dict[str, Any]:
    """What a bench prints in its last line."""
    done = output_of([module], timeout_s)
    if done.returncode or not done.stdout.strip():
        return {"ok": False, "error": f"status {done.returncode}: {done.stdout[-3000:]}"}
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def tests(timeout_s: float) -> dict[str, Any]:
    done = output_of(["pytest", "-q", "-rf", "--no-header", "-p", "no:cacheprovider", "tests/gpu"], timeout_s)
    sys.stderr.write(done.stdout[-6000:])
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|skipped|errors?)", done.stdout)}
    return {"ok": done.returncode == 0 and counts.get("passed", 0) > 0, **counts}


def engine(timeout_s: float) -> dict[str, Any]:
    """Steps and prompts beside what the GPU can do, and isolation."""
    result = json_of("tests.gpu.engine_bench", timeout_s)
    parts = [result.get(name) for name in ("decode", "prefill", "isolation")]
    return {"ok": all(part and "error" not in part for part in parts), **result}


def kv(timeout_s: float) -> dict[str, Any]:
    result = json_of("tests.gpu.bench", timeout_s)
    return {"ok": all("GB_s" in row for row in result.get("pairs", [{}])), **result}


def host(timeout_s: float) -> dict[str, Any]:
    return {"ok": True, **json_of("tests.gpu.host_time", timeout_s)}


def answer(model: Path, transport: str) -> dict[str, Any]:
    """A greedy answer of a cluster whose prefill and decode worker share the GPU."""
    import httpx

    from tests.e2e.parts import parts  # here: they import what a machine without a GPU need not have

    options = ["--device", "cuda", "--kv-transport", transport, "--gpu-memory-share", "0.2"]
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


def answers(models: list[Path], timeout_s: float) -> dict[str, Any]:
    """All transports must say the same."""
    found: dict[str, Any] = {"ok": True}
    until = time.monotonic() + timeout_s
    for model in models:
        by: dict[str, Any] = {}
        for transport in TRANSPORTS:
            try:
                by[transport] = {"error": "no time left"} if time.monotonic() > until else answer(model, transport)
            except Exception as error:  # whatever it is, the others are still worth an answer
                by[transport] = {"error": f"{type(error).__name__}: {str(error)[-2000:]}"}
        texts = {one.get("text") for one in by.values()}
        found[model.name] = by
        found["ok"] &= len(texts) == 1 and None not in texts
    return found


def show(result: dict[str, Any]) -> None:
    lines = [f"{name:<10}{'good' if result[name].get('ok') else 'NOT GOOD'}" for name in PARTS_S if name in result]
    engine_ = result.get("engine", {})
    for row in engine_.get("decode", []) if isinstance(engine_.get("decode"), list) else []:
        name = f"decode, {row['rows']} rows, {row['sampling']}"
        lines.append(f"{name:<44}{row['step_ms']:>9.2f} ms, {row['ratio']:.2f} x the floor")
    if "ratio" in engine_.get("prefill", {}):
        row = engine_["prefill"]
        lines.append(f"{'prefill of ' + str(row['tokens']):<44}{row['ms']:>9.2f} ms, {row['ratio']:.2f} x the floor")
    for name, value in engine_.get("isolation", {}).items():
        lines.append(f"{'isolation, ' + name:<44}{value if isinstance(value, str) else round(value, 2):>9}")
    for row in result.get("kv", {}).get("pairs", []):
        name = f"{row['transport']}, segments of {row['segment_mib']} MiB, digest {row['digest']}"
        lines.append(f"{name:<44}{row['GB_s']:>9.1f} GB/s" if "GB_s" in row else f"{name:<44} {row['error']}")
    for model, by in result.get("answers", {}).items():
        for transport, one in by.items() if isinstance(by, dict) else ():
            lines.append(f"{f'answer of {model} by {transport}':<44} {one.get('error') or repr(one['text'][:40])}")
    sys.stdout.write("\n".join(lines) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/gpu_check", description=__doc__, allow_abbrev=False)
    parser.add_argument("--out", default="", help="File for the result as JSON; standard output if not given.")
    parser.add_argument("--skip", action="append", default=[], choices=list(PARTS_S), help="A part that is not run.")
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
    with tempfile.TemporaryDirectory() as folder:
        models = [tiny_models.make("llama", Path(folder) / "tiny-llama")] + ([Path(asked.model)] if asked.model else [])
        run: dict[str, Callable[[float], dict[str, Any]]] = {
            "engine": engine, "tests": tests, "kv": kv, "host": host, "answers": lambda limit_s: answers(models, limit_s),
        }  # fmt: skip
        for name, limit_s in PARTS_S.items():
            if name in asked.skip:
                continue
            began = time.monotonic()
            try:
                result[name] = run[name](limit_s)
            except (TooLong, ImportError, ValueError, KeyError) as error:  # the others are still worth a figure
                result[name] = {"ok": False, "error": f"{type(error).__name__}: {error}"}
            result[name]["took_s"] = round(time.monotonic() - began, 1)
            if asked.out:
                Path(asked.out).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    show(result)
    if not asked.out:
        sys.stdout.write(json.dumps(result, indent=1) + "\n")
    return 0 if all(result[name]["ok"] for name in PARTS_S if name in result) else 1


if __name__ == "__main__":
    sys.exit(main())
